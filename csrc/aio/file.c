/* SPDX-License-Identifier: Apache-2.0
 *
 * file.c - files of a path: how direct I/O must be aligned, and the two descriptors.
 *
 * A file has a descriptor through the page cache and, where the file system allows, one with
 * O_DIRECT. Both may be used at once, so they must never share a page: a page that is dirty in the
 * cache would be written back over what went direct. The alignment in use is therefore at least a
 * page and a file system block. Nor may reading ahead pull in pages that go direct.
 */
#define _GNU_SOURCE
#include "engine.h"

#include <errno.h>
#include <fcntl.h>
#include <linux/magic.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/vfs.h>
#include <unistd.h>

/* Assumed where the kernel does not tell (before 6.1): every drive in use has blocks of 512 or
 * 4096. */
#define ALIGN_ASSUMED 4096u
/* Block sizes above are a hint for good throughput, as on network file systems, not a unit. */
#define FS_BLOCK_MAX 65536u

enum { BUFFERED, DIRECT };

static uint32_t max_u32(uint32_t a, uint32_t b)
{
	return a > b ? a : b;
}

/* Direct I/O as the kernel describes it. Returns 0 or the errno that says why there is none. */
static int ask_alignment(int fd, uint32_t *memory, uint32_t *offset)
{
	*memory = ALIGN_ASSUMED;
	*offset = ALIGN_ASSUMED;
#ifdef STATX_DIOALIGN
	struct statx info;
	unsigned mask = STATX_DIOALIGN;

#ifdef STATX_DIO_READ_ALIGN
	mask |= STATX_DIO_READ_ALIGN;
#endif
	if (statx(fd, "", AT_EMPTY_PATH, mask, &info) || !(info.stx_mask & STATX_DIOALIGN))
		return 0;
	if (!info.stx_dio_offset_align)
		return EOPNOTSUPP;
	*memory = max_u32(info.stx_dio_mem_align, 1);
	*offset = info.stx_dio_offset_align;
#ifdef STATX_DIO_READ_ALIGN
	if (info.stx_mask & STATX_DIO_READ_ALIGN)
		*offset = max_u32(*offset, info.stx_dio_read_offset_align);
#endif
#else
	(void)fd;
#endif
	return 0;
}

/* The unit in which the page cache reads and writes the file. */
static uint32_t cache_unit(const struct stat *status)
{
	uint32_t page = (uint32_t)sysconf(_SC_PAGESIZE);
	uint64_t block = (uint64_t)status->st_blksize;

	if (!block || block > FS_BLOCK_MAX || (block & (block - 1)))
		return page;
	return max_u32(page, (uint32_t)block);
}

/* File systems in memory may accept O_DIRECT, but there is nothing to bypass. */
static bool lives_in_memory(int fd)
{
	struct statfs info;

	return !fstatfs(fd, &info) && (info.f_type == TMPFS_MAGIC || info.f_type == RAMFS_MAGIC);
}

static int open_buffered(struct file *file, const char *name, struct stat *status)
{
	int fd = open(name, O_RDWR | O_CLOEXEC);

	if (fd < 0)
		return -errno;
	if (fstat(fd, status) || (!S_ISREG(status->st_mode) && !S_ISBLK(status->st_mode))) {
		close(fd);
		return -EINVAL;
	}
	file->fds[BUFFERED] = fd;
	return 0;
}

/* 0: file->fds[DIRECT] is open; > 0: why the file has no direct I/O; < 0: -errno. */
static int open_direct(struct file *file, const char *name, const struct stat *status,
                       const struct aio_faults *faults)
{
	uint32_t memory_align;
	uint32_t align;
	struct stat again;
	int why = faults->refuse_direct_errno;
	int fd;

	if (!why && lives_in_memory(file->fds[BUFFERED]))
		why = EOPNOTSUPP;
	if (!why)
		why = ask_alignment(file->fds[BUFFERED], &memory_align, &align);
	if (why)
		return why;
	fd = open(name, O_RDWR | O_CLOEXEC | O_DIRECT);
	if (fd < 0)
		return errno == EINVAL || errno == EOPNOTSUPP ? errno : -errno;
	if (fstat(fd, &again) || again.st_ino != status->st_ino || again.st_dev != status->st_dev) {
		close(fd);
		return -ESTALE; /* the name was given to another file in between */
	}
	if (faults->force_alignment_bytes)
		memory_align = align = faults->force_alignment_bytes;
	if (faults->force_memory_alignment_bytes)
		memory_align = faults->force_memory_alignment_bytes;
	file->fds[DIRECT] = fd;
	file->memory_align = memory_align;
	file->align = max_u32(align, cache_unit(status));
	posix_fadvise(file->fds[BUFFERED], 0, 0, POSIX_FADV_RANDOM);
	return 0;
}

static struct file *take_file(struct path *path)
{
	struct file *file;

	if (path->free_file) {
		file = &path->files[path->free_file - 1];
		path->free_file = file->next_free;
	} else if (path->files_made < path->aio->options.max_files) {
		file = &path->files[path->files_made++];
	} else {
		return NULL;
	}
	return file;
}

static void give_file(struct path *path, struct file *file)
{
	file->next_free = path->free_file;
	path->free_file = (uint32_t)(file - path->files) + 1;
}

static void set_slot(struct file *file, int which, int fd)
{
	struct path *path = file->path;
	struct command command = {.kind = COMMAND_SET_FILE, .fd = fd};
	uint32_t slot = (uint32_t)(file - path->files) * 2 + (uint32_t)which;

	command.slot = slot;
	file->slots[which] = path_command(path, &command) || fd < 0 ? -1 : (int32_t)slot;
}

void file_close_fds(struct file *file)
{
	for (int which = BUFFERED; which <= DIRECT; which++) {
		if (file->fds[which] >= 0)
			close(file->fds[which]);
		file->fds[which] = -1;
	}
}

struct file *file_find(struct aio *aio, uint32_t number)
{
	uint32_t index = number % AIO_FILES_MAX;
	struct path *path;

	if (number / AIO_FILES_MAX >= aio->paths_made)
		return NULL;
	path = aio->paths[number / AIO_FILES_MAX];
	if (index >= path->files_made || !path->files[index].open)
		return NULL;
	return &path->files[index];
}

/* Makes a place for the file and shows it to the worker. With the lock held. */
static int publish(struct path *path, const struct file *opened)
{
	struct file *file = take_file(path);

	if (!file)
		return -EMFILE;
	*file = *opened;
	for (int which = BUFFERED; which <= DIRECT && path->stats.fixed_files; which++)
		if (file->fds[which] >= 0)
			set_slot(file, which, file->fds[which]);
	file->open = true;
	return (int)(path->number * AIO_FILES_MAX + (uint32_t)(file - path->files));
}

int file_open(struct path *path, const char *name, struct aio_file_info *info)
{
	struct aio *aio = path->aio;
	struct file file = {
	        .path = path, .fds = {-1, -1}, .slots = {-1, -1}, .align = 1, .memory_align = 1};
	struct stat status;
	int why = 0;
	int rc = open_buffered(&file, name, &status);

	if (!rc && aio->options.direct != AIO_DIRECT_OFF) {
		why = open_direct(&file, name, &status, &aio->options.faults);
		rc = why < 0 ? why : 0;
	}
	file.block_bytes =
	        aio->options.block_bytes > file.align ? aio->options.block_bytes : file.align;
	*info = (struct aio_file_info){.direct = file.fds[DIRECT] >= 0,
	                               .direct_errno = why,
	                               .memory_align_bytes = file.memory_align,
	                               .offset_align_bytes = file.align};
	if (!rc) {
		pthread_mutex_lock(&aio->lock);
		rc = publish(path, &file);
		pthread_mutex_unlock(&aio->lock);
	}
	if (rc < 0)
		file_close_fds(&file);
	return rc;
}

int file_close(struct file *file)
{
	if (file->pending)
		return -EBUSY;
	file->open = false; /* nobody finds it while the worker is asked */
	for (int which = BUFFERED; which <= DIRECT; which++)
		if (file->slots[which] >= 0)
			set_slot(file, which, -1);
	file_close_fds(file);
	give_file(file->path, file);
	return 0;
}
