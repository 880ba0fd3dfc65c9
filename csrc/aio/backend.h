/* SPDX-License-Identifier: Apache-2.0
 *
 * backend.h - the seam between the engine's worker and whatever performs one operation.
 *
 * The worker turns requests into operations (struct io), gives them to a backend and takes them
 * back when they have ended, in any order. uring.c and threads.c are backends; faulty.c wraps one.
 * Every hook but wake is called by the path's worker thread alone.
 */
#ifndef AIO_BACKEND_H
#define AIO_BACKEND_H

#include "aio.h"

#include <stdbool.h>

/* No kernel transfer and no registered entry is larger. The engine's own test builds with less, to
 * meet the ends of entries often. */
#ifndef AIO_ENTRY_BYTES
#define AIO_ENTRY_BYTES (UINT64_C(1) << 30)
#endif

/* One operation. The engine fills the first part; from submit until reap hands it back, the
 * backend owns all of it. */
struct io {
	char *buffer;
	uint64_t offset;
	uint32_t bytes;
	uint32_t op;          /* enum aio_op */
	uint32_t align;       /* of a direct operation; 1 when it is buffered */
	int32_t fd;           /* always valid */
	int32_t slot;         /* the same file in the table of set_file, or -1 */
	int32_t result;       /* filled by the backend: bytes moved or -errno */
	struct io *next;      /* for whoever owns it now */
	uint64_t due_ns;      /* faulty.c: when a delayed completion may be seen */
	uint32_t asked_bytes; /* faulty.c: bytes before a fault shortened them */
	uint32_t fault;       /* faulty.c: enum aio_fault_action */
	uint64_t fault_value;
};

struct backend;

struct backend_ops {
	/* Takes an operation. Never fails: what cannot start comes back through reap with its
	 * errno. May hold it unstarted until the next reap, so that many start in one system call.
	 */
	void (*submit)(struct backend *backend, struct io *io);

	/* Starts what submit held back, then waits for at least one ended operation, a wake, or
	 * timeout_us (< 0: for ever). Stores at most max of them in done and returns how many; 0 is
	 * ordinary. -errno: the backend cannot go on and what it still held is lost. */
	int (*reap)(struct backend *backend, struct io **done, uint32_t max, int64_t timeout_us);

	/* Makes the current or the next reap return soon. Called from any thread. */
	void (*wake)(struct backend *backend);

	/* Registers memory in entries of AIO_ENTRY_BYTES in place of what was registered before;
	 * bytes 0 only unregisters. All or nothing: on -errno nothing is registered. */
	int (*register_memory)(struct backend *backend, void *address, uint64_t bytes);

	/* Puts fd (-1: nothing) into a slot of the file table. On -errno the slot is not usable and
	 * io.slot must be -1; operations then use io.fd. */
	int (*set_file)(struct backend *backend, uint32_t slot, int fd);

	/* Waits at most grace_us for operations that the kernel still performs, then frees
	 * everything. Operations not handed back are forgotten, never touched again. */
	void (*destroy)(struct backend *backend, int64_t grace_us);
};

/* The head of every backend. */
struct backend {
	const struct backend_ops *ops;
	uint32_t kind;        /* AIO_BACKEND_URING or AIO_BACKEND_THREADS */
	uint32_t fixed_files; /* 1: set_file has a table */
};

/* Counts of the fault rules; outlives the backend it is used with, so that a path which changes
 * its backend goes on counting. */
struct fault_state {
	struct aio_faults faults;
	uint64_t seen[8];
};

/* Each returns 0 and a backend in *out, or -errno. The caller is the thread that will use it. */
int uring_create(uint32_t queue_depth, uint32_t file_slots, struct backend **out);
int threads_create(uint32_t queue_depth, uint32_t threads, struct backend **out);
/* Owns inner from success on. */
int faulty_create(struct fault_state *state, struct backend *inner, struct backend **out);
bool faulty_wanted(const struct aio_faults *faults);

#endif
