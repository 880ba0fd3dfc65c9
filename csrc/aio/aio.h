/* SPDX-License-Identifier: Apache-2.0
 *
 * aio.h - asynchronous file I/O between aligned memory and files.
 *
 * An engine owns one worker thread a path (a directory, normally one drive). A caller submits
 * requests; the worker of the file's path splits each into blocks, keeps the device's queue full
 * by refilling it on every completion, reads every result, continues short transfers, retries
 * EAGAIN and EINTR within a bound, and publishes one result a request.
 *
 * Contract of every function here:
 *   - returns 0 (or a non-negative value where stated) on success and -errno on failure;
 *   - never prints, never aborts, never touches Python;
 *   - may be called from any thread; only aio_wait and aio_close wait for I/O (opening, closing and
 *     syncing a file, adding a path and registering take what the kernel takes for them);
 *   - fields named *_errno are positive errno numbers; returns and aio_result.error are negative;
 *   - the caller owns all memory. A request's buffer must stay mapped until the request is done or
 *     aio_close has returned;
 *   - in a forked child every call on the parent's engine returns -ECHILD, and aio_close is a no-op
 *     that returns -ECHILD: the child never disturbs the parent's I/O.
 */
#ifndef AIO_H
#define AIO_H

#include <stddef.h>
#include <stdint.h>

/* cffi: begin */
struct aio;

enum aio_op { AIO_READ = 0, AIO_WRITE = 1 };

enum aio_backend { AIO_BACKEND_AUTO = 0, AIO_BACKEND_URING = 1, AIO_BACKEND_THREADS = 2 };

enum aio_direct { AIO_DIRECT_AUTO = 0, AIO_DIRECT_OFF = 1 };

enum aio_fault_action {
	AIO_FAULT_NONE = 0,
	AIO_FAULT_SHORT = 1,   /* the kernel moves at most `value` bytes for this operation */
	AIO_FAULT_ERRNO = 2,   /* the operation is not performed and completes with -value */
	AIO_FAULT_SWALLOW = 3, /* the operation is performed, its completion never arrives */
	AIO_FAULT_DELAY = 4    /* the completion arrives `value` microseconds later */
};

/* One deliberate fault, counted over the block operations a path issues (retries included). */
struct aio_fault_rule {
	uint32_t action; /* enum aio_fault_action */
	uint32_t op;     /* bit mask: 1 << AIO_READ | 1 << AIO_WRITE */
	uint64_t first;  /* number of the first operation hit, from 1, among those `op` matches */
	uint64_t every;  /* then every so many; 0: that one only */
	uint64_t value;
};

/* Faults for tests; all zero means none. */
struct aio_faults {
	int32_t refuse_uring_errno;            /* ring set-up fails with this errno */
	int32_t refuse_register_errno;         /* buffer registration fails with this errno */
	int32_t refuse_direct_errno;           /* opening with O_DIRECT fails with this errno */
	uint32_t force_alignment_bytes;        /* alignment reported for direct I/O */
	uint32_t force_memory_alignment_bytes; /* of addresses; 0: as the one above */
	uint64_t max_transfer_bytes;    /* cap on one kernel transfer; 0: the built-in 1 GiB */
	struct aio_fault_rule rules[8]; /* the first rule that matches an operation acts */
};

struct aio_options {
	uint64_t block_bytes; /* a request is split at multiples of this; a power of two >= 4096 */
	uint32_t queue_depth; /* blocks in flight a path: 1..4096 */
	uint32_t threads;     /* workers of the thread backend a path; 0: min(queue_depth, 16) */
	uint32_t backend; /* enum aio_backend; AUTO falls back, an explicit choice fails instead */
	uint32_t max_files; /* most files open at once a path (the registered table): 1..65536 */
	uint32_t direct;    /* enum aio_direct; OFF: everything through the page cache, by choice */
	struct aio_faults faults;
};

struct aio_request {
	uint32_t op;   /* enum aio_op */
	uint32_t file; /* from aio_file_open */
	void *buffer;  /* aligned parts go direct, the rest through the page cache */
	uint64_t bytes;
	uint64_t offset;
	uint64_t after; /* id of a request that must succeed first, or 0. One that is already done
	                   and forgotten counts as succeeded; if it fails, this one ends with
	                   -ECANCELED */
	uint64_t tag;   /* the caller's own; comes back in the result */
};

struct aio_result {
	uint64_t id;
	uint64_t tag;
	uint64_t done_bytes; /* how far the request got; valid while it is pending too */
	uint64_t asked_bytes;
	uint64_t error_offset; /* file offset where it failed */
	uint64_t queue_ns;     /* from when it could start until its first block did */
	uint64_t device_ns;    /* from then until it ended */
	int32_t error;         /* 0 or -errno; -ENODATA: the file ended before the request did */
	uint32_t backend;      /* the one that moved its last byte */
};

struct aio_file_info {
	uint32_t direct;      /* 1: O_DIRECT is in effect */
	int32_t direct_errno; /* why not, when direct is 0; 0: it was not asked for */
	uint32_t
	        memory_align_bytes; /* what a buffer's address must be a multiple of to go direct */
	uint32_t offset_align_bytes; /* likewise for file offset and length; at least a page and a
	                                file system block, so that direct and buffered parts
	                                never share one; 1 when direct is 0 */
};

/* Counters of one path since aio_open; every field is a total unless it says otherwise. */
struct aio_stats {
	uint32_t backend;          /* the one in use: AIO_BACKEND_URING or AIO_BACKEND_THREADS */
	int32_t backend_errno;     /* why io_uring is not in use, or 0 */
	uint32_t fixed_files;      /* 1: files are registered with the ring */
	int32_t register_errno;    /* why the memory is not registered, or 0 */
	uint64_t registered_bytes; /* now */
	uint64_t read_bytes;
	uint64_t written_bytes;
	uint64_t read_blocks;
	uint64_t written_blocks;
	uint64_t buffered_blocks; /* blocks that could not go direct */
	uint64_t retries;         /* EAGAIN and EINTR */
	uint64_t short_transfers;
	uint64_t pending_requests; /* now */
	uint64_t ended_requests;
	uint64_t busy_ns;  /* time with at least one block in flight */
	uint64_t queue_ns; /* sums over ended requests, of what aio_result has of each */
	uint64_t device_ns;
	uint64_t waits;     /* calls of aio_wait that had to sleep */
	uint64_t waited_ns; /* and how long they did */
};

/* What memory is made of: AUTO and SMALL can be asked for, the others are what AUTO may get. */
enum aio_pages {
	AIO_PAGES_AUTO = 0,        /* the last of the following that can be had */
	AIO_PAGES_SMALL = 1,       /* ordinary pages, and huge ones refused when asked for */
	AIO_PAGES_TRANSPARENT = 2, /* huge pages where the kernel finds some, else ordinary ones */
	AIO_PAGES_RESERVED = 3     /* huge pages only, of those the system keeps in reserve */
};

/* Anonymous memory for paged bytes: as contiguous as the machine gives, touched once, and not
 * inherited by forked children. */
struct aio_memory {
	void *address;       /* aligned to huge_bytes when it is not 0, else to a page */
	uint64_t bytes;      /* mapped; >= asked */
	uint64_t huge_bytes; /* size of a huge page of the kind in `pages`; 0 for SMALL */
	uint32_t pages;      /* enum aio_pages, never AUTO */
	int32_t owner;       /* process that mapped it; a forked child leaves it alone */
};

int aio_open(const struct aio_options *options, struct aio **out);
/* Waits until nothing is pending, at most timeout_us (< 0: for ever), then frees everything.
 * Requests still pending then end with -ECANCELED; -ETIME says that there were some. Operations
 * that the kernel is still performing get another second to end, because they use the caller's
 * memory. Threads in aio_wait leave it first; no call may begin once this one has. */
int aio_close(struct aio *aio, int64_t timeout_us);

/* Adds a path and starts its worker. Returns its number. */
int aio_path_add(struct aio *aio);
int aio_path_stats(struct aio *aio, uint32_t path, struct aio_stats *stats);

/* Registers memory with every path's ring, in entries of at most 1 GiB. A refusal is not an error:
 * the path goes on unregistered and its statistics say why. At most one region at a time; bytes 0
 * unregisters. */
int aio_register(struct aio *aio, void *address, uint64_t bytes);

/* Opens an existing file on a path for reading and writing, direct where the file system allows.
 * Returns its number. Closing a file with requests pending on it is -EBUSY. */
int aio_file_open(struct aio *aio, uint32_t path, const char *name, struct aio_file_info *info);
int aio_file_close(struct aio *aio, uint32_t file);
/* fdatasync, on the calling thread. */
int aio_file_sync(struct aio *aio, uint32_t file);

/* Queues all the requests or none. ids[i] names requests[i]; ids are never used twice. A request
 * may name an earlier one of the same call in `after` only by a separate call. Zero bytes is a
 * request that succeeds. */
int aio_submit(struct aio *aio, const struct aio_request *requests, uint32_t count, uint64_t *ids);

/* Waits for one request, at most timeout_us (0: just ask; < 0: for ever). 0: done, result filled;
 * -ETIME: still pending, result says how far; -ENOENT: unknown or forgotten. A request that is
 * waited for becomes urgent, and so does what it waits for in turn: see Order in inbox.c. */
int aio_wait(struct aio *aio, uint64_t id, int64_t timeout_us, struct aio_result *result);
/* Drops a done request's result. -EBUSY while it is pending. */
int aio_forget(struct aio *aio, uint64_t id);
/* Hands over at most max done requests, in the order of their ends, and forgets them. Never waits.
 * How many goes to *count, where also a caller finds it who was interrupted before it saw the
 * return. */
int aio_reap(struct aio *aio, struct aio_result *results, uint32_t max, uint32_t *count);
/* Requests ended since aio_open. Cheap, to be asked often. */
uint64_t aio_ended_count(struct aio *aio);
/* Waits until there are `count`, at most timeout_us (< 0: for ever); nothing becomes urgent by it.
 * 0, or -ETIME. */
int aio_wait_ended(struct aio *aio, uint64_t count, int64_t timeout_us);

/* pages: AIO_PAGES_AUTO or AIO_PAGES_SMALL. All of it is there when this returns: memory that is
 * lacking is an error here and no signal later. */
int aio_memory_map(uint64_t bytes, uint32_t pages, struct aio_memory *out);
int aio_memory_unmap(struct aio_memory *memory);

/* 1: this build has the io_uring backend; 0: it was built with the thread backend alone. */
int aio_has_uring(void);
/* cffi: end */

#endif
