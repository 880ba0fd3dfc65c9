/* SPDX-License-Identifier: Apache-2.0
 *
 * worker.c - one thread a path: requests -> blocks -> operations -> ends.
 *
 * Bytes go from the caller's buffer to the file or back; nothing is copied here. The worker cuts
 * blocks off the first request in its queue only while it has free blocks, so a request of any
 * length costs queue_depth blocks. Where it cuts is told in split.h. A block whose address, offset
 * and length are all aligned goes through the O_DIRECT descriptor, any other through the page
 * cache. That is the only rule; a file without direct I/O has alignment 1 and no second descriptor.
 *
 * Every result is read. Less than asked continues where it stopped, a direct block at the last
 * aligned offset below; two attempts in a row that gain nothing are an error. EAGAIN and EINTR
 * start the block again, at once at first, then after a pause, and at last they are an error.
 */
#define _GNU_SOURCE
#include "clock.h"
#include "engine.h"
#include "split.h"

#include <errno.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/resource.h>

/* Transient refusals of one block in a row: so many start again at once, so many in all (with
 * pauses of 1, 2, 4 ... 64 ms, about a second and a half), then it fails. */
#define TRIES_AT_ONCE 8
#define TRIES_MAX 36
#define PAUSE_SHIFT_MAX 6
#define STALLS_MAX 2
/* How long a backend that is torn down may wait for operations the kernel still performs. */
#define GRACE_US 1000000

static uint64_t min_u64(uint64_t a, uint64_t b)
{
	return a < b ? a : b;
}

static struct piece next_piece(const struct path *path, const struct request *request)
{
	const struct file *file = request->file;
	struct split_rules rules = {.block_bytes = file->block_bytes,
	                            .align = file->fds[1] >= 0 ? file->align : 1,
	                            .memory_align = file->memory_align,
	                            .entry_bytes = AIO_ENTRY_BYTES,
	                            .region = (uintptr_t)path->region,
	                            .region_bytes = path->region_bytes};

	return split_next(&rules, (uintptr_t)request->buffer + request->carved_bytes,
	                  request->offset + request->carved_bytes,
	                  request->bytes - request->carved_bytes);
}

static bool is_idle(const struct path *path)
{
	return !path->used_blocks[AIO_READ] && !path->used_blocks[AIO_WRITE];
}

static struct block *take_block(struct path *path, struct request *request)
{
	struct block *block = path->free_blocks;

	path->free_blocks = block->next;
	if (is_idle(path))
		path->busy_since_ns = clock_now_ns();
	path->used_blocks[request->op]++;
	path->last_op = request->op;
	return block;
}

static void give_block(struct path *path, struct block *block)
{
	block->next = path->free_blocks;
	path->free_blocks = block;
	path->used_blocks[block->request->op]--;
	if (is_idle(path))
		path->stats.busy_ns += clock_now_ns() - path->busy_since_ns;
}

static struct block *carve(struct path *path, struct request *request)
{
	struct piece piece = next_piece(path, request);
	struct block *block = take_block(path, request);

	if (!request->started_ns)
		request->started_ns = clock_now_ns();
	*block = (struct block){.request = request,
	                        .buffer = request->buffer + request->carved_bytes,
	                        .offset = request->offset + request->carved_bytes,
	                        .bytes = piece.bytes,
	                        .align = piece.direct ? request->file->align : 1};
	if (block->align == 1)
		path->stats.buffered_blocks++;
	request->blocks++;
	request->carved_bytes += block->bytes;
	if (request->carved_bytes == request->bytes)
		path_dequeue(path, request);
	return block;
}

/* The most bytes of one operation of a block, a multiple of its alignment. */
static uint64_t transfer_bytes_max(const struct path *path, uint32_t align)
{
	uint64_t cap = path->faults.faults.max_transfer_bytes;

	if (!cap || cap > AIO_ENTRY_BYTES)
		cap = AIO_ENTRY_BYTES;
	return cap < align ? align : cap - cap % align;
}

static void start_block(struct path *path, struct block *block)
{
	const struct file *file = block->request->file;
	uint64_t at = block->done_bytes - block->done_bytes % block->align;
	int direct = block->align > 1;

	block->io = (struct io){
	        .buffer = block->buffer + at,
	        .offset = block->offset + at,
	        .bytes = (uint32_t)min_u64(block->bytes - at,
		                           transfer_bytes_max(path, block->align)),
	        .op = block->request->op,
	        .align = block->align,
	        .fd = file->fds[direct],
	        .slot = file->slots[direct],
	};
	block->flying = true;
	path->flying++;
	path->backend->ops->submit(path->backend, &block->io);
}

static void end_block(struct path *path, struct block *block)
{
	struct request *request = block->request;

	give_block(path, block);
	request->blocks--;
	if (!request->blocks && (request->error || request->carved_bytes == request->bytes))
		requests_end(path->aio, request);
}

static void fail_block(struct path *path, struct block *block, int error)
{
	struct request *request = block->request;
	uint64_t at = block->offset + block->done_bytes;

	if (request->queued)
		path_dequeue(path, request);
	if (!request->error || at < request->error_offset) {
		request->error = error;
		request->error_offset = at;
	}
	end_block(path, block);
}

static void start_again(struct path *path, struct block *block)
{
	block->next = path->again;
	path->again = block;
}

static void retry_block(struct path *path, struct block *block, int error)
{
	path->stats.retries++;
	if (++block->tries > TRIES_MAX) {
		fail_block(path, block, error);
		return;
	}
	if (block->tries > TRIES_AT_ONCE) {
		uint32_t shift = block->tries - TRIES_AT_ONCE - 1;
		uint64_t pause_ms = 1u << (shift < PAUSE_SHIFT_MAX ? shift : PAUSE_SHIFT_MAX);

		block->resume_ns = clock_now_ns() + pause_ms * 1000000;
	}
	start_again(path, block);
}

static void progress_block(struct path *path, struct block *block)
{
	struct io *io = &block->io;
	uint64_t reached = (uint64_t)(io->buffer - block->buffer) + (uint64_t)io->result;
	uint64_t gained = reached > block->done_bytes ? reached - block->done_bytes : 0;
	bool reads = io->op == AIO_READ;

	block->tries = 0;
	block->resume_ns = 0;
	block->stalls = gained ? 0 : block->stalls + 1;
	block->done_bytes += gained;
	block->request->done_bytes += gained;
	*(reads ? &path->stats.read_bytes : &path->stats.written_bytes) += gained;
	if ((uint32_t)io->result < io->bytes)
		path->stats.short_transfers++;
	if (block->done_bytes == block->bytes) {
		++*(reads ? &path->stats.read_blocks : &path->stats.written_blocks);
		end_block(path, block);
	} else if (block->stalls == STALLS_MAX) {
		fail_block(path, block, reads ? -ENODATA : -EIO);
	} else {
		start_again(path, block);
	}
}

/* Whether the ring itself cannot do this, so that the path should change its backend. */
static bool is_unsupported(const struct path *path, int error)
{
	if (path->backend->kind != AIO_BACKEND_URING ||
	    path->aio->options.backend != AIO_BACKEND_AUTO)
		return false;
	return error == -EOPNOTSUPP || (!path->proven && (error == -EINVAL || error == -ENOSYS));
}

static void switch_backend_soon(struct path *path, int error)
{
	path->switching = true;
	path->switch_errno = -error;
}

static void account(struct path *path, struct io *io)
{
	struct block *block = (struct block *)io;

	block->flying = false;
	path->flying--;
	if (io->result == -EAGAIN || io->result == -EINTR) {
		retry_block(path, block, io->result);
	} else if (io->result >= 0) {
		path->proven = true;
		progress_block(path, block);
	} else if (is_unsupported(path, io->result)) {
		switch_backend_soon(path, io->result);
		start_again(path, block);
	} else {
		fail_block(path, block, io->result);
	}
}

/* Starts the blocks whose pause is over. Returns when the next one's is. Of a request that has
 * failed only what lies before the failure goes on, so that the first failing offset is the one
 * reported. */
static uint64_t fill_again(struct path *path)
{
	struct block *block = path->again;
	uint64_t now = clock_now_ns();
	uint64_t next_ns = CLOCK_FOREVER;

	path->again = NULL;
	while (block) {
		struct block *next = block->next;

		if (block->request->error && block->offset > block->request->error_offset) {
			end_block(path, block);
		} else if (block->resume_ns > now) {
			next_ns = min_u64(next_ns, block->resume_ns);
			start_again(path, block);
		} else {
			start_block(path, block);
		}
		block = next;
	}
	return next_ns;
}

/* Gives the backend all it may have. Returns when to look again. */
static uint64_t fill(struct path *path)
{
	uint64_t next_ns = CLOCK_FOREVER;
	struct request *request;

	if (path->switching)
		return next_ns;
	if (path->again)
		next_ns = fill_again(path);
	while (path->free_blocks && (request = path_next(path)))
		start_block(path, carve(path, request));
	return next_ns;
}

static void register_region(struct path *path, void *address, uint64_t bytes)
{
	int rc = path->backend->ops->register_memory(path->backend, address, bytes);

	path->region = rc ? NULL : address;
	path->region_bytes = rc ? 0 : bytes;
	path->stats.registered_bytes = path->region_bytes;
	path->stats.register_errno = -rc;
}

static void run_commands(struct path *path)
{
	struct backend *backend = path->backend;

	while (path->commands) {
		struct command *command = path->commands;

		path->commands = command->next;
		if (command->kind == COMMAND_REGISTER)
			register_region(path, command->address, command->bytes);
		else
			command->result =
			        backend->ops->set_file(backend, command->slot, command->fd);
		command->done = true;
		pthread_cond_broadcast(&path->answered);
	}
}

/* Slots of the registered table: two a file, but no more than the process may have open. */
static uint32_t file_slots(const struct aio *aio)
{
	uint32_t slots = 2 * aio->options.max_files;
	struct rlimit limit;

	if (getrlimit(RLIMIT_NOFILE, &limit) || limit.rlim_cur >= slots)
		return slots;
	return (uint32_t)limit.rlim_cur;
}

static int make_backend(struct path *path, uint32_t kind)
{
	const struct aio_options *options = &path->aio->options;
	struct backend *backend;
	int rc;

	if (kind == AIO_BACKEND_URING && path->faults.faults.refuse_uring_errno)
		return -path->faults.faults.refuse_uring_errno;
	if (kind == AIO_BACKEND_URING)
		rc = uring_create(options->queue_depth, file_slots(path->aio), &backend);
	else
		rc = threads_create(options->queue_depth, options->threads, &backend);
	if (rc)
		return rc;
	path->backend = backend;
	if (faulty_wanted(&path->faults.faults)) {
		rc = faulty_create(&path->faults, backend, &path->backend);
		if (rc)
			backend->ops->destroy(backend, 0);
	}
	if (rc)
		path->backend = NULL;
	else
		path->stats.fixed_files = path->backend->fixed_files;
	path->stats.backend = kind;
	return rc;
}

static int make_first_backend(struct path *path)
{
	uint32_t wanted = path->aio->options.backend;
	int rc = make_backend(path, wanted == AIO_BACKEND_AUTO ? AIO_BACKEND_URING : wanted);

	if (!rc || wanted != AIO_BACKEND_AUTO)
		return rc;
	path->stats.backend_errno = -rc;
	return make_backend(path, AIO_BACKEND_THREADS);
}

/* The backend is gone and could not be replaced: what is queued fails, now and later. */
static void fail_queued(struct path *path)
{
	struct request *request;

	for (struct block *block = path->again; block;) {
		struct block *next = block->next;

		fail_block(path, block, path->broken);
		block = next;
	}
	path->again = NULL;
	while ((request = path_next(path))) {
		path_dequeue(path, request);
		request->error = path->broken;
		request->error_offset = request->offset + request->carved_bytes;
		if (!request->blocks)
			requests_end(path->aio, request);
	}
}

/* Exchanges the ring for the thread backend, once nothing is in flight. Drops the lock meanwhile;
 * path->asleep is false, so that nobody wakes the backend that goes. */
static void switch_backend(struct path *path)
{
	struct backend *old = path->backend;
	int rc;

	pthread_mutex_unlock(&path->aio->lock);
	old->ops->destroy(old, GRACE_US);
	pthread_mutex_lock(&path->aio->lock);
	rc = make_backend(path, AIO_BACKEND_THREADS);
	path->stats.backend_errno = path->switch_errno;
	path->switching = false;
	if (rc) {
		path->broken = rc;
		return;
	}
	if (path->region_bytes)
		register_region(path, path->region, path->region_bytes);
}

/* Takes the backend down for good. Drops the lock meanwhile. */
static void drop_backend(struct path *path, int error)
{
	struct backend *old = path->backend;

	path->backend = NULL;
	path->broken = error;
	pthread_mutex_unlock(&path->aio->lock);
	old->ops->destroy(old, GRACE_US);
	pthread_mutex_lock(&path->aio->lock);
}

/* reap failed: what was in flight is lost. The backend goes first, because a block's memory is its
 * owner's again as soon as its request ends, and until then the kernel may write to it. */
static void lose_backend(struct path *path, int error)
{
	if (path->aio->options.backend == AIO_BACKEND_AUTO &&
	    path->backend->kind == AIO_BACKEND_URING) {
		switch_backend_soon(path, error);
		switch_backend(path);
	} else {
		drop_backend(path, error);
	}
	for (uint32_t i = 0; i < path->aio->options.queue_depth; i++) {
		struct block *block = &path->blocks[i];

		if (!block->flying)
			continue;
		block->flying = false;
		path->flying--;
		fail_block(path, block, error);
	}
}

/* Waits for ends, without the lock. */
static int reap(struct path *path, uint64_t until_ns)
{
	int n;

	path->asleep = true;
	pthread_mutex_unlock(&path->aio->lock);
	n = path->backend->ops->reap(path->backend, path->ended, path->aio->options.queue_depth,
	                             clock_left_us(until_ns));
	pthread_mutex_lock(&path->aio->lock);
	path->asleep = false;
	path->woken = false;
	return n;
}

/* One round. With the lock held. */
static void turn(struct path *path)
{
	int n;

	run_commands(path);
	if (path->switching && !path->flying)
		switch_backend(path);
	if (path->stop)
		return;
	n = path->broken ? path->broken : reap(path, fill(path));
	if (path->stop)
		return;
	if (n < 0 && !path->broken)
		lose_backend(path, n);
	if (path->broken)
		fail_queued(path);
	for (int i = 0; i < n; i++)
		account(path, path->ended[i]);
}

/* Without a backend there is nothing to sleep in but a condition. */
static void idle_broken(struct path *path)
{
	path_refuse_commands(path);
	while (!path->stop && !path_next(path))
		clock_cond_wait(&path->answered, &path->aio->lock, clock_deadline_ns(10000));
}

static void *worker(void *argument)
{
	struct path *path = argument;
	struct aio *aio = path->aio;
	struct backend *backend;

	path->start_error = make_first_backend(path);
	pthread_mutex_lock(&aio->lock);
	path->started = true;
	pthread_cond_broadcast(&path->answered);
	while (!path->start_error && !path->stop) {
		turn(path);
		if (path->broken)
			idle_broken(path);
	}
	backend = path->backend;
	path->backend = NULL;
	pthread_mutex_unlock(&aio->lock);
	if (backend)
		backend->ops->destroy(backend, GRACE_US);
	pthread_mutex_lock(&aio->lock);
	path->exited = true;
	path_refuse_commands(path);
	pthread_mutex_unlock(&aio->lock);
	return NULL;
}

/* The worker and all threads it starts take no signals. */
static int spawn(struct path *path)
{
	sigset_t all;
	sigset_t before;
	char name[16];
	int rc;

	sigfillset(&all);
	pthread_sigmask(SIG_SETMASK, &all, &before);
	rc = pthread_create(&path->thread, NULL, worker, path);
	pthread_sigmask(SIG_SETMASK, &before, NULL);
	if (rc)
		return -rc;
	snprintf(name, sizeof(name), "aio-path-%u", path->number % 1000);
	pthread_setname_np(path->thread, name);
	return 0;
}

static int allocate(struct aio *aio, struct path *path)
{
	uint32_t depth = aio->options.queue_depth;

	path->blocks = calloc(depth, sizeof(*path->blocks));
	path->ended = calloc(depth, sizeof(struct io *));
	path->files = calloc(aio->options.max_files, sizeof(*path->files));
	if (!path->blocks || !path->ended || !path->files)
		return -ENOMEM;
	for (uint32_t i = depth; i-- > 0;) {
		path->blocks[i].next = path->free_blocks;
		path->free_blocks = &path->blocks[i];
	}
	return clock_cond_init(&path->answered);
}

int path_start(struct aio *aio, struct path *path)
{
	int rc;

	path->aio = aio;
	path->last_op = AIO_WRITE; /* so that a read is first */
	path->faults.faults = aio->options.faults;
	rc = allocate(aio, path);
	if (!rc) {
		rc = spawn(path);
		if (rc)
			pthread_cond_destroy(&path->answered);
	}
	if (rc) {
		free(path->blocks);
		free(path->ended);
		free(path->files);
		return rc;
	}
	pthread_mutex_lock(&aio->lock);
	while (!path->started)
		pthread_cond_wait(&path->answered, &aio->lock);
	pthread_mutex_unlock(&aio->lock);
	if (path->start_error) {
		rc = path->start_error;
		pthread_join(path->thread, NULL);
		path_free(path);
	}
	return rc;
}

void path_free(struct path *path)
{
	for (uint32_t i = 0; i < path->files_made; i++)
		if (path->files[i].open)
			file_close_fds(&path->files[i]);
	pthread_cond_destroy(&path->answered);
	free(path->blocks);
	free(path->ended);
	free(path->files);
}
