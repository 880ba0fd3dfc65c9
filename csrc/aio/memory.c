/* SPDX-License-Identifier: Apache-2.0
 *
 * memory.c - anonymous memory for paged bytes.
 *
 * A transfer from scattered 4 KiB pages costs the drive one segment a page; from huge pages, a few.
 * On virtual disks that is a factor of four in bandwidth. So there is a ladder, and each rung that
 * cannot be had in full leads to the next: huge pages the system keeps in reserve; transparent huge
 * pages, first by touching, then by collapsing what touching made of ordinary ones; ordinary pages.
 *
 * All is touched once, here, where a lack of memory is still an errno. What would break: a reserved
 * page that is promised but not there, since touching it later is SIGBUS. So these are reserved by
 * mmap and populated by a call that returns; where the kernel has no such call, there are none.
 *
 * Forked children do not inherit the memory: a copied page table would make the parent's next store
 * move to a new page while the device writes to the old.
 */
#define _GNU_SOURCE
#include "aio.h"

#include <errno.h>
#include <stdbool.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#ifndef MADV_POPULATE_WRITE
#define MADV_POPULATE_WRITE 23
#endif
#ifndef MADV_COLLAPSE
#define MADV_COLLAPSE 25
#endif
#ifndef MAP_HUGETLB
#define MAP_HUGETLB 0x40000
#endif

/* Rounding up to reserved pages, which may have a gibibyte, may cost one part in so many. */
#define ROUNDING_PART 8

static uint64_t page_bytes(void)
{
	return (uint64_t)sysconf(_SC_PAGESIZE);
}

static uint64_t round_up(uint64_t bytes, uint64_t unit)
{
	return (bytes + unit - 1) / unit * unit;
}

static bool is_page_size(uint64_t bytes)
{
	return bytes && bytes <= INT64_MAX / 4 && !(bytes & (bytes - 1));
}

/* Of transparent huge pages; 0: the kernel has none. */
static uint64_t transparent_bytes(void)
{
	FILE *file = fopen("/sys/kernel/mm/transparent_hugepage/hpage_pmd_size", "re");
	unsigned long long bytes = 0;

	if (!file)
		return 0;
	if (fscanf(file, "%llu", &bytes) != 1 || !is_page_size(bytes))
		bytes = 0;
	fclose(file);
	return bytes;
}

/* Of the huge pages that MAP_HUGETLB gives; 0: the kernel has none. */
static uint64_t reserved_bytes(void)
{
	FILE *file = fopen("/proc/meminfo", "re");
	unsigned long long kib = 0;
	char line[256];

	if (!file)
		return 0;
	while (fgets(line, sizeof(line), file))
		if (sscanf(line, "Hugepagesize: %llu kB", &kib) == 1)
			break;
	fclose(file);
	return kib <= INT64_MAX / 1024 && is_page_size(kib * 1024) ? kib * 1024 : 0;
}

/* Gives a mapping all its pages, without a signal. -EINVAL: the kernel cannot (before 5.14). */
static int populate(char *address, uint64_t bytes)
{
	int rc;

	do
		rc = madvise(address, bytes, MADV_POPULATE_WRITE);
	while (rc && errno == EINTR);
	return rc ? -errno : 0;
}

/* The same by a store to each page. */
static void touch(char *address, uint64_t bytes)
{
	for (uint64_t at = 0, page = page_bytes(); at < bytes; at += page)
		((volatile char *)address)[at] = 0;
}

/* Maps bytes (a multiple of align) at a multiple of align. */
static char *map_aligned(uint64_t bytes, uint64_t align)
{
	uint64_t extra = align > page_bytes() ? align : 0;
	char *start = mmap(NULL, bytes + extra, PROT_READ | PROT_WRITE,
	                   MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
	uint64_t head;

	if (start == MAP_FAILED)
		return NULL;
	head = (align - (uintptr_t)start % align) % align;
	if (head)
		munmap(start, head);
	if (extra > head)
		munmap(start + head + bytes, extra - head);
	return start + head;
}

/* Reserved huge pages for all of it, or an error and nothing. */
static int map_reserved(uint64_t asked, struct aio_memory *out)
{
	uint64_t huge = reserved_bytes();
	uint64_t bytes;
	char *address;
	int rc;

	if (!huge)
		return -ENOMEM;
	bytes = round_up(asked, huge);
	if (bytes - asked > asked / ROUNDING_PART)
		return -ENOMEM;
	/* Not MAP_NORESERVE: what is mapped is taken from the reserve, or refused. */
	address = mmap(NULL, bytes, PROT_READ | PROT_WRITE,
	               MAP_PRIVATE | MAP_ANONYMOUS | MAP_HUGETLB, -1, 0);
	if (address == MAP_FAILED)
		return -errno;
	rc = madvise(address, bytes, MADV_DONTFORK) ? -errno : populate(address, bytes);
	if (rc) {
		munmap(address, bytes);
		return rc;
	}
	*out = (struct aio_memory){.address = address,
	                           .bytes = bytes,
	                           .huge_bytes = huge,
	                           .pages = AIO_PAGES_RESERVED};
	return 0;
}

/* Gives an ordinary mapping all its pages and keeps them from forked children. */
static int settle(char *address, uint64_t bytes)
{
	int rc;

	if (madvise(address, bytes, MADV_DONTFORK))
		return -errno;
	rc = populate(address, bytes);
	if (rc == -EINVAL)
		touch(address, bytes);
	return rc && rc != -EINVAL ? -ENOMEM : 0;
}

/* A mapping at a multiple of align, with that advice on huge pages. */
static int map_ordinary(uint64_t asked, uint64_t align, int advice, struct aio_memory *out)
{
	uint64_t bytes = round_up(asked, align);
	char *address = map_aligned(bytes, align);
	int rc;

	if (!address)
		return -ENOMEM;
	madvise(address, bytes, advice); /* a refusal costs speed only */
	rc = settle(address, bytes);
	if (rc) {
		munmap(address, bytes);
		return rc;
	}
	*out = (struct aio_memory){.address = address, .bytes = bytes, .pages = AIO_PAGES_SMALL};
	return 0;
}

static int map_best(uint64_t asked, struct aio_memory *out)
{
	uint64_t huge = transparent_bytes();
	int rc;

	if (!map_reserved(asked, out))
		return 0;
	if (!huge || asked < huge)
		return map_ordinary(asked, page_bytes(), MADV_HUGEPAGE, out);
	rc = map_ordinary(asked, huge, MADV_HUGEPAGE, out);
	if (rc)
		return rc;
	madvise(out->address, out->bytes, MADV_COLLAPSE); /* leaves alone what is huge already */
	out->huge_bytes = huge;
	out->pages = AIO_PAGES_TRANSPARENT;
	return 0;
}

int aio_memory_map(uint64_t bytes, uint32_t pages, struct aio_memory *out)
{
	int rc;

	memset(out, 0, sizeof(*out));
	if (!bytes || pages > AIO_PAGES_SMALL)
		return -EINVAL;
	if (bytes > INT64_MAX / 2)
		return -ENOMEM;
	rc = pages == AIO_PAGES_AUTO ? map_best(bytes, out)
	                             : map_ordinary(bytes, page_bytes(), MADV_NOHUGEPAGE, out);
	if (!rc)
		out->owner = (int32_t)getpid();
	return rc;
}

int aio_memory_unmap(struct aio_memory *memory)
{
	int rc = 0;

	if (!memory->address)
		return 0;
	if (memory->owner != (int32_t)getpid())
		return -ECHILD; /* whatever lies at the address in a child, it is not this */
	if (munmap(memory->address, memory->bytes))
		rc = -errno;
	memset(memory, 0, sizeof(*memory));
	return rc;
}
