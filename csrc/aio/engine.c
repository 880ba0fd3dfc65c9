/* SPDX-License-Identifier: Apache-2.0
 *
 * engine.c - the calls of aio.h.
 *
 * A call checks its arguments, takes the lock, changes the tables and wakes the worker of the path
 * concerned; no byte is moved here. Where bytes go is told in worker.c.
 */
#define _GNU_SOURCE
#include "clock.h"
#include "engine.h"

#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define BLOCK_BYTES_MIN 4096
#define BLOCK_BYTES_MAX (UINT64_C(1) << 32)
#define QUEUE_DEPTH_MAX 4096
#define THREADS_MAX 4096
/* Longer than a worker takes to tear down a backend that does not end its operations. */
#define EXIT_US 3000000

static bool is_power_of_two(uint64_t n)
{
	return n && !(n & (n - 1));
}

static int check_options(const struct aio_options *options)
{
	uint32_t align = options->faults.force_alignment_bytes;
	uint32_t memory_align = options->faults.force_memory_alignment_bytes;

	if (!is_power_of_two(options->block_bytes) || options->block_bytes < BLOCK_BYTES_MIN ||
	    options->block_bytes > BLOCK_BYTES_MAX)
		return -EINVAL;
	if (!options->queue_depth || options->queue_depth > QUEUE_DEPTH_MAX)
		return -EINVAL;
	if (options->threads > THREADS_MAX || options->backend > AIO_BACKEND_THREADS)
		return -EINVAL;
	if (!options->max_files || options->max_files > AIO_FILES_MAX)
		return -EINVAL;
	if (options->direct > AIO_DIRECT_OFF)
		return -EINVAL;
	if (memory_align && !is_power_of_two(memory_align))
		return -EINVAL;
	return align && !is_power_of_two(align) ? -EINVAL : 0;
}

static bool is_foreign(const struct aio *aio)
{
	return aio->owner != getpid();
}

int aio_open(const struct aio_options *options, struct aio **out)
{
	struct aio *aio;
	int rc = check_options(options);

	*out = NULL;
	if (rc)
		return rc;
	aio = calloc(1, sizeof(*aio));
	if (!aio)
		return -ENOMEM;
	aio->options = *options;
	aio->owner = getpid();
	rc = clock_cond_init(&aio->done);
	if (rc) {
		free(aio);
		return rc;
	}
	pthread_mutex_init(&aio->lock, NULL);
	*out = aio;
	return 0;
}

/* Waits until no request is pending. With the lock held. */
static int drain(struct aio *aio, uint64_t deadline)
{
	while (aio->pending)
		if (clock_cond_wait(&aio->done, &aio->lock, deadline))
			break;
	return aio->pending ? -ETIME : 0;
}

/* Stops the workers. Returns whether all are gone; one may be stuck in the kernel. */
static bool stop_paths(struct aio *aio)
{
	uint64_t deadline = clock_deadline_ns(EXIT_US);
	bool all = true;

	for (uint32_t i = 0; i < aio->paths_made; i++) {
		aio->paths[i]->stop = true;
		path_wake(aio->paths[i]);
		pthread_cond_broadcast(&aio->paths[i]->answered);
	}
	for (uint32_t i = 0; i < aio->paths_made; i++) {
		struct path *path = aio->paths[i];

		while (!path->exited)
			if (clock_cond_wait(&path->answered, &aio->lock, deadline))
				break;
		all = all && path->exited;
	}
	return all;
}

static void join_path(struct path *path)
{
	if (path->exited)
		pthread_join(path->thread, NULL);
	else
		pthread_detach(path->thread);
}

int aio_close(struct aio *aio, int64_t timeout_us)
{
	uint64_t deadline = clock_deadline_ns(timeout_us);
	bool all;
	int rc;

	if (is_foreign(aio))
		return -ECHILD;
	pthread_mutex_lock(&aio->lock);
	aio->closing = true;
	rc = drain(aio, deadline);
	all = stop_paths(aio);
	requests_cancel_all(aio);
	pthread_cond_broadcast(&aio->done);
	while (aio->waiters)
		pthread_cond_wait(&aio->done, &aio->lock);
	pthread_mutex_unlock(&aio->lock);
	for (uint32_t i = 0; i < aio->paths_made; i++)
		join_path(aio->paths[i]);
	if (!all)
		return rc; /* a stuck worker still looks at it: better lost than freed */
	for (uint32_t i = 0; i < aio->paths_made; i++) {
		path_free(aio->paths[i]);
		free(aio->paths[i]);
	}
	requests_free(aio);
	pthread_cond_destroy(&aio->done);
	pthread_mutex_destroy(&aio->lock);
	free(aio);
	return rc;
}

static int register_with(struct path *path, void *address, uint64_t bytes)
{
	struct command command = {.kind = COMMAND_REGISTER, .address = address, .bytes = bytes};

	return path_command(path, &command);
}

/* Numbers are given by show_path; until then this one serves as a name. */
static int take_place(struct aio *aio, struct path *path)
{
	int rc = 0;

	pthread_mutex_lock(&aio->lock);
	if (aio->closing)
		rc = -ESHUTDOWN;
	else if (aio->paths_taken == AIO_PATHS_MAX)
		rc = -EMFILE;
	else
		path->number = aio->paths_taken++;
	pthread_mutex_unlock(&aio->lock);
	return rc;
}

static int show_path(struct aio *aio, struct path *path)
{
	pthread_mutex_lock(&aio->lock);
	path->number = aio->paths_made;
	aio->paths[aio->paths_made++] = path;
	if (aio->region_bytes)
		register_with(path, aio->region, aio->region_bytes);
	pthread_mutex_unlock(&aio->lock);
	return (int)path->number;
}

int aio_path_add(struct aio *aio)
{
	struct path *path;
	int rc;

	if (is_foreign(aio))
		return -ECHILD;
	path = calloc(1, sizeof(*path));
	if (!path)
		return -ENOMEM;
	rc = take_place(aio, path);
	if (!rc)
		rc = path_start(aio, path);
	if (rc) {
		free(path);
		return rc;
	}
	return show_path(aio, path);
}

int aio_path_stats(struct aio *aio, uint32_t path, struct aio_stats *stats)
{
	const struct path *of;

	if (is_foreign(aio))
		return -ECHILD;
	pthread_mutex_lock(&aio->lock);
	if (path >= aio->paths_made) {
		pthread_mutex_unlock(&aio->lock);
		return -EINVAL;
	}
	of = aio->paths[path];
	*stats = of->stats;
	if (of->used_blocks[AIO_READ] || of->used_blocks[AIO_WRITE])
		stats->busy_ns += clock_now_ns() - of->busy_since_ns;
	pthread_mutex_unlock(&aio->lock);
	return 0;
}

int aio_register(struct aio *aio, void *address, uint64_t bytes)
{
	int rc = 0;

	if (is_foreign(aio))
		return -ECHILD;
	if (bytes && (!address || (uintptr_t)address > UINTPTR_MAX - bytes))
		return -EINVAL;
	pthread_mutex_lock(&aio->lock);
	aio->region = address;
	aio->region_bytes = bytes;
	for (uint32_t i = 0; i < aio->paths_made && !rc; i++)
		rc = register_with(aio->paths[i], address, bytes);
	pthread_mutex_unlock(&aio->lock);
	return rc;
}

int aio_file_open(struct aio *aio, uint32_t path, const char *name, struct aio_file_info *info)
{
	struct path *of = NULL;

	if (is_foreign(aio))
		return -ECHILD;
	pthread_mutex_lock(&aio->lock);
	if (path < aio->paths_made)
		of = aio->paths[path];
	pthread_mutex_unlock(&aio->lock);
	return of ? file_open(of, name, info) : -EINVAL;
}

int aio_file_close(struct aio *aio, uint32_t file)
{
	struct file *of;
	int rc;

	if (is_foreign(aio))
		return -ECHILD;
	pthread_mutex_lock(&aio->lock);
	of = file_find(aio, file);
	rc = of ? file_close(of) : -EBADF;
	pthread_mutex_unlock(&aio->lock);
	return rc;
}

/* The descriptor is duplicated, so that a close meanwhile does no harm. */
int aio_file_sync(struct aio *aio, uint32_t file)
{
	struct file *of;
	int fd;
	int rc;

	if (is_foreign(aio))
		return -ECHILD;
	pthread_mutex_lock(&aio->lock);
	of = file_find(aio, file);
	fd = of ? fcntl(of->fds[0], F_DUPFD_CLOEXEC, 0) : -1;
	rc = of ? -errno : -EBADF;
	pthread_mutex_unlock(&aio->lock);
	if (fd < 0)
		return rc;
	do
		rc = fdatasync(fd) ? -errno : 0;
	while (rc == -EINTR);
	close(fd);
	return rc;
}

static int check_request(struct aio *aio, const struct aio_request *request)
{
	if (request->op != AIO_READ && request->op != AIO_WRITE)
		return -EINVAL;
	if (!file_find(aio, request->file))
		return -EBADF;
	if (request->bytes && !request->buffer)
		return -EFAULT;
	if (request->offset > INT64_MAX || request->bytes > INT64_MAX - request->offset)
		return -EOVERFLOW;
	if (request->after && !requests_issued(aio, request->after))
		return -ENOENT;
	return 0;
}

static uint64_t submit_one(struct aio *aio, const struct aio_request *wanted)
{
	struct request *request = requests_take(aio);
	struct request *after = requests_find(aio, wanted->after);

	request->op = wanted->op;
	request->file = file_find(aio, wanted->file);
	request->buffer = wanted->buffer;
	request->bytes = wanted->bytes;
	request->offset = wanted->offset;
	request->tag = wanted->tag;
	requests_begin(aio, request, after);
	return request->id;
}

int aio_submit(struct aio *aio, const struct aio_request *requests, uint32_t count, uint64_t *ids)
{
	int rc = 0;

	if (is_foreign(aio))
		return -ECHILD;
	pthread_mutex_lock(&aio->lock);
	if (aio->closing)
		rc = -ESHUTDOWN;
	for (uint32_t i = 0; i < count && !rc; i++)
		rc = check_request(aio, &requests[i]);
	if (!rc)
		rc = requests_reserve(aio, count);
	for (uint32_t i = 0; i < count && !rc; i++)
		ids[i] = submit_one(aio, &requests[i]);
	pthread_mutex_unlock(&aio->lock);
	return rc;
}

static void fill_result(const struct request *request, struct aio_result *result)
{
	bool done = request->state == REQUEST_DONE;

	*result = (struct aio_result){.id = request->id,
	                              .tag = request->tag,
	                              .done_bytes = request->done_bytes,
	                              .asked_bytes = request->bytes,
	                              .error_offset = request->error_offset};
	if (done) {
		result->error = request->error;
		result->backend = request->backend;
		result->queue_ns = request->started_ns - request->ready_ns;
		result->device_ns = request->ended_ns - request->started_ns;
	}
}

/* A thread stops waiting; the last one lets aio_close go on. */
static void leave(struct aio *aio)
{
	aio->waiters--;
	if (aio->closing && !aio->waiters)
		pthread_cond_broadcast(&aio->done);
}

/* Sleeps until the request has ended; NULL when it is unknown or was forgotten meanwhile. */
static struct request *await(struct aio *aio, uint64_t id, uint64_t deadline)
{
	struct request *request = requests_find(aio, id);
	struct aio_stats *stats;
	uint64_t began_ns;
	int rc = 0;

	if (!request || request->state == REQUEST_DONE)
		return request;
	stats = &request->file->path->stats;
	began_ns = clock_now_ns();
	requests_hurry(request);
	aio->waiters++;
	while (request && request->state != REQUEST_DONE && !rc) {
		rc = clock_cond_wait(&aio->done, &aio->lock, deadline);
		request = requests_find(aio, id);
	}
	stats->waits++;
	stats->waited_ns += clock_now_ns() - began_ns;
	leave(aio);
	return request;
}

int aio_wait(struct aio *aio, uint64_t id, int64_t timeout_us, struct aio_result *result)
{
	const struct request *request;
	int rc = -ENOENT;

	if (is_foreign(aio))
		return -ECHILD;
	pthread_mutex_lock(&aio->lock);
	if (timeout_us)
		request = await(aio, id, clock_deadline_ns(timeout_us));
	else
		request = requests_find(aio, id);
	if (request) {
		fill_result(request, result);
		rc = request->state == REQUEST_DONE ? 0 : -ETIME;
	}
	pthread_mutex_unlock(&aio->lock);
	return rc;
}

int aio_forget(struct aio *aio, uint64_t id)
{
	struct request *request;
	int rc = 0;

	if (is_foreign(aio))
		return -ECHILD;
	pthread_mutex_lock(&aio->lock);
	request = requests_find(aio, id);
	if (!request)
		rc = -ENOENT;
	else if (request->state != REQUEST_DONE)
		rc = -EBUSY;
	else
		requests_give(aio, request);
	pthread_mutex_unlock(&aio->lock);
	return rc;
}

int aio_reap(struct aio *aio, struct aio_result *results, uint32_t max, uint32_t *count)
{
	*count = 0;
	if (is_foreign(aio))
		return -ECHILD;
	pthread_mutex_lock(&aio->lock);
	while (*count < max && aio->done_requests.first) {
		struct request *request = aio->done_requests.first;

		fill_result(request, &results[*count]);
		requests_give(aio, request);
		++*count;
	}
	pthread_mutex_unlock(&aio->lock);
	return 0;
}

uint64_t aio_ended_count(struct aio *aio)
{
	return __atomic_load_n(&aio->ended_count, __ATOMIC_ACQUIRE);
}

int aio_wait_ended(struct aio *aio, uint64_t count, int64_t timeout_us)
{
	uint64_t deadline = clock_deadline_ns(timeout_us);
	int rc = 0;

	if (is_foreign(aio))
		return -ECHILD;
	pthread_mutex_lock(&aio->lock);
	aio->waiters++;
	while (aio->ended_count < count && !rc)
		rc = clock_cond_wait(&aio->done, &aio->lock, deadline);
	leave(aio);
	rc = aio->ended_count < count ? -ETIME : 0;
	pthread_mutex_unlock(&aio->lock);
	return rc;
}
