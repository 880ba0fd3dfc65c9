/* SPDX-License-Identifier: Apache-2.0
 *
 * memory.c - anonymous memory for paged bytes.
 *
 * A transfer from scattered 4 KiB pages costs the drive one segment a page; from huge pages, a few.
 * So the mapping starts and ends at huge page boundaries, asks for huge pages and is touched once,
 * here, where a lack of memory is still an errno. Forked children do not inherit it: a copied page
 * table would make the parent's next store move to a new page while the device writes to the old.
 */
#define _GNU_SOURCE
#include "aio.h"

#include <errno.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#ifndef MADV_POPULATE_WRITE
#define MADV_POPULATE_WRITE 23
#endif

static uint64_t huge_page_bytes(void)
{
	FILE *file = fopen("/sys/kernel/mm/transparent_hugepage/hpage_pmd_size", "re");
	unsigned long long bytes = 0;

	if (!file)
		return 0;
	if (fscanf(file, "%llu", &bytes) != 1 || (bytes & (bytes - 1)))
		bytes = 0;
	fclose(file);
	return bytes;
}

/* Gives it all its pages. Before Linux 5.14 by a store to each. */
static int populate(char *address, uint64_t bytes, uint64_t page)
{
	int rc;

	do
		rc = madvise(address, bytes, MADV_POPULATE_WRITE);
	while (rc && errno == EINTR);
	if (!rc)
		return 0;
	if (errno != EINVAL)
		return -ENOMEM;
	for (uint64_t at = 0; at < bytes; at += page)
		((volatile char *)address)[at] = 0;
	return 0;
}

/* Maps bytes (a multiple of align) at a multiple of align. */
static char *map_aligned(uint64_t bytes, uint64_t align, uint64_t page)
{
	uint64_t extra = align > page ? align : 0;
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

int aio_memory_map(uint64_t bytes, struct aio_memory *out)
{
	uint64_t page = (uint64_t)sysconf(_SC_PAGESIZE);
	uint64_t huge = huge_page_bytes();
	uint64_t align = huge && bytes >= huge ? huge : page;
	char *address;
	int rc;

	memset(out, 0, sizeof(*out));
	if (!bytes || bytes > INT64_MAX - 2 * align)
		return bytes ? -ENOMEM : -EINVAL;
	bytes = (bytes + align - 1) / align * align;
	address = map_aligned(bytes, align, page);
	if (!address)
		return -ENOMEM;
	if (align > page)
		madvise(address, bytes, MADV_HUGEPAGE); /* a refusal costs speed only */
	rc = madvise(address, bytes, MADV_DONTFORK) ? -errno : populate(address, bytes, page);
	if (rc) {
		munmap(address, bytes);
		return rc;
	}
	*out = (struct aio_memory){.address = address,
	                           .bytes = bytes,
	                           .huge_bytes = align > page ? align : 0,
	                           .owner = (int32_t)getpid()};
	return 0;
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
