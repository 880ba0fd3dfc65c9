/* SPDX-License-Identifier: Apache-2.0
 *
 * engine.h - what the engine's files share.
 *
 * One mutex, aio->lock, guards everything here that more than one thread sees; the worker drops it
 * while it waits in reap. Order of life: a request waits for another (WAITING), stands in its
 * path's queue until its last byte is carved into blocks (QUEUED), has blocks in flight, and is
 * DONE until it is forgotten.
 */
#ifndef AIO_ENGINE_H
#define AIO_ENGINE_H

#include "aio.h"
#include "backend.h"

#include <pthread.h>
#include <sys/types.h>

#define AIO_PATHS_MAX 64
#define AIO_FILES_MAX 65536

/* A request's id is its slot and how often the slot was used; a slot whose count is used up is
 * retired, so no id comes twice. */
#define AIO_SLOT_BITS 24
#define AIO_SLOTS_MAX (UINT64_C(1) << AIO_SLOT_BITS)
#define AIO_CHUNK_SLOTS 4096

struct path;

struct file {
	struct path *path;
	int32_t fds[2];   /* buffered, direct (-1: none) */
	int32_t slots[2]; /* the same in the registered table, or -1 */
	uint32_t align;   /* of direct offsets and lengths; 1: no direct I/O */
	uint32_t memory_align;
	uint64_t block_bytes;
	uint64_t pending; /* requests not done */
	uint32_t next_free;
	bool open;
};

enum request_state { REQUEST_FREE, REQUEST_WAITING, REQUEST_QUEUED, REQUEST_DONE };

struct request {
	uint64_t id;
	uint64_t tag;
	struct request *next;    /* in its queue, the list of done ones or the free list */
	struct request *prev;    /* in its queue or the list of done ones */
	struct request *after;   /* the pending one it waits for */
	struct request *waiters; /* requests that named this one in `after` */
	struct request *next_waiter;
	struct file *file;
	char *buffer;
	uint64_t bytes;
	uint64_t offset;
	uint64_t carved_bytes; /* already cut into blocks */
	uint64_t done_bytes;
	uint64_t error_offset;
	uint64_t ready_ns;   /* when it could start */
	uint64_t started_ns; /* when its first block did; 0: not yet */
	uint64_t ended_ns;
	int32_t error;
	uint32_t op;
	uint32_t backend;
	uint32_t blocks; /* cut and not ended */
	enum request_state state;
	bool urgent; /* somebody waits for it */
	bool queued; /* it stands in a queue of its path */
};

/* Requests in order, linked both ways. */
struct request_list {
	struct request *first;
	struct request *last;
};

/* A piece of a request that is transferred by one operation, or by several when one is short. */
struct block {
	struct io io; /* the operation under way; first, so that a block can be found from it */
	struct request *request;
	struct block *next; /* free, or to be started again */
	char *buffer;
	uint64_t offset;
	uint64_t bytes;
	uint64_t done_bytes;
	uint64_t resume_ns; /* not to be started again before */
	uint32_t align;     /* 1 when it is buffered */
	uint32_t tries;     /* transient refusals in a row */
	uint32_t stalls;    /* attempts without progress in a row */
	bool flying;        /* the backend has it */
};

enum command_kind { COMMAND_REGISTER, COMMAND_SET_FILE };

/* Work that only the worker may do, because the ring has one issuer. Lives on the caller's stack.
 */
struct command {
	struct command *next;
	enum command_kind kind;
	void *address;
	uint64_t bytes;
	uint32_t slot;
	int32_t fd;
	int32_t result;
	bool done;
};

struct path {
	struct aio *aio;
	uint32_t number;
	pthread_t thread;
	pthread_cond_t answered; /* started, exited, or a command is done */
	struct backend *backend;
	struct fault_state faults;
	/* Those with bytes left to carve: [urgent][op]; see Order in inbox.c. */
	struct request_list queues[2][2];
	struct block *blocks; /* queue_depth of them */
	struct block *free_blocks;
	struct block *again;     /* blocks to be started again */
	struct io **ended;       /* room for one reap */
	uint32_t used_blocks[2]; /* by op */
	uint32_t last_op;        /* of the last block cut */
	uint32_t flying;
	struct command *commands;
	struct file *files; /* max_files of them */
	uint32_t files_made;
	uint32_t free_file; /* index + 1; 0: none */
	char *region;       /* registered memory */
	uint64_t region_bytes;
	struct aio_stats stats;
	uint64_t busy_since_ns;
	int32_t start_error;
	int32_t broken; /* -errno: no backend is left */
	int32_t switch_errno;
	bool switching; /* nothing new starts until the backend is exchanged */
	bool proven;    /* the backend has moved bytes */
	bool started;
	bool exited;
	bool stop;
	bool asleep; /* in reap, or about to be */
	bool woken;
};

struct aio {
	struct aio_options options;
	pid_t owner;
	pthread_mutex_t lock;
	pthread_cond_t done; /* some request ended, or a waiter has left */
	uint32_t waiters;    /* threads in aio_wait */
	struct path *paths[AIO_PATHS_MAX];
	uint32_t paths_made;
	uint32_t paths_taken; /* made or being made */
	struct request *chunks[AIO_SLOTS_MAX / AIO_CHUNK_SLOTS];
	uint64_t slots_made;
	struct request *free_requests;
	struct request_list done_requests; /* by their ends */
	uint64_t ended_count;              /* atomic, because it is read without the lock */
	uint64_t free_made;                /* in the free list */
	uint64_t pending;                  /* requests not done */
	void *region;
	uint64_t region_bytes;
	bool closing;
};

/* inbox.c; all with the lock held */
void list_append(struct request_list *list, struct request *request);
void list_remove(struct request_list *list, struct request *request);
/* Has the worker look again. */
void path_wake(struct path *path);
void path_queue(struct path *path, struct request *request);
void path_dequeue(struct path *path, struct request *request);
/* The request whose turn it is, or NULL. */
struct request *path_next(const struct path *path);
/* Has the worker carry the command out, and waits for that. */
int path_command(struct path *path, struct command *command);
/* Ends the commands that no worker will carry out. */
void path_refuse_commands(struct path *path);

/* requests.c; all with the lock held */
int requests_reserve(struct aio *aio, uint32_t count);
struct request *requests_find(struct aio *aio, uint64_t id);
/* Whether the id was ever given out. */
bool requests_issued(const struct aio *aio, uint64_t id);
struct request *requests_take(struct aio *aio);
void requests_give(struct aio *aio, struct request *request);
/* Starts it at once or when `after` has ended. */
void requests_begin(struct aio *aio, struct request *request, struct request *after);
/* Lets it and what it waits for go first. */
void requests_hurry(struct request *request);
/* Ends it with request->error and starts or cancels those that wait for it. */
void requests_end(struct aio *aio, struct request *request);
void requests_cancel_all(struct aio *aio);
void requests_free(struct aio *aio);

/* worker.c */
int path_start(struct aio *aio, struct path *path);
/* Frees what path_start made; the worker has exited. Without the lock. */
void path_free(struct path *path);

/* file.c */
int file_open(struct path *path, const char *name, struct aio_file_info *info);
struct file *file_find(struct aio *aio, uint32_t number);
void file_close_fds(struct file *file);
/* With the lock held. */
int file_close(struct file *file);

#endif
