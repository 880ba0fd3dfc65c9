/* SPDX-License-Identifier: Apache-2.0
 *
 * threads.c - the backend for machines that forbid io_uring: a pool of threads that call pread and
 * pwrite. One call moves one operation; short and interrupted calls are the engine's business.
 *
 * The pool works on copies of the operations and is freed by whoever leaves it last, so that a
 * thread which is stuck in the kernel when the engine is torn down touches nothing of it.
 */
#define _GNU_SOURCE
#include "backend.h"
#include "clock.h"

#include <errno.h>
#include <stdlib.h>
#include <unistd.h>

#define THREADS_DEFAULT_MAX 16

struct job {
	struct job *next;
	struct io *origin; /* the engine's; not touched by the pool's threads */
	struct io io;
};

struct pool {
	pthread_mutex_t lock;
	pthread_cond_t work; /* a job is queued, or stop */
	pthread_cond_t done; /* a job has ended, wake, or a thread has left */
	struct job *free_jobs;
	struct job *first; /* queued */
	struct job *last;
	struct job *ended;
	struct job *jobs; /* queue_depth of them */
	pthread_t *handles;
	uint32_t made;    /* handles */
	uint32_t threads; /* that have not left */
	uint32_t running; /* of them in the kernel */
	bool woken;
	bool stop;
	bool abandoned; /* the last thread frees the pool */
};

struct threads {
	struct backend base;
	struct pool *pool;
};

static struct pool *pool_of(struct backend *backend)
{
	return ((struct threads *)backend)->pool;
}

static int32_t perform(const struct io *io)
{
	ssize_t moved = io->op == AIO_READ
	                        ? pread(io->fd, io->buffer, io->bytes, (off_t)io->offset)
	                        : pwrite(io->fd, io->buffer, io->bytes, (off_t)io->offset);

	return moved < 0 ? -errno : (int32_t)moved;
}

static void pool_free(struct pool *pool)
{
	pthread_cond_destroy(&pool->work);
	pthread_cond_destroy(&pool->done);
	pthread_mutex_destroy(&pool->lock);
	free(pool->handles);
	free(pool->jobs);
	free(pool);
}

static struct job *next_job(struct pool *pool)
{
	struct job *job;

	while (!pool->first && !pool->stop)
		pthread_cond_wait(&pool->work, &pool->lock);
	job = pool->stop ? NULL : pool->first;
	if (job)
		pool->first = job->next;
	return job;
}

static void *pool_thread(void *argument)
{
	struct pool *pool = argument;
	struct job *job;
	bool last;

	pthread_mutex_lock(&pool->lock);
	while ((job = next_job(pool))) {
		pool->running++;
		pthread_mutex_unlock(&pool->lock);
		job->io.result = perform(&job->io);
		pthread_mutex_lock(&pool->lock);
		pool->running--;
		job->next = pool->ended;
		pool->ended = job;
		pthread_cond_signal(&pool->done);
	}
	pool->threads--;
	last = pool->abandoned && !pool->threads;
	pthread_cond_signal(&pool->done);
	pthread_mutex_unlock(&pool->lock);
	if (last)
		pool_free(pool);
	return NULL;
}

static void threads_submit(struct backend *backend, struct io *io)
{
	struct pool *pool = pool_of(backend);
	struct job *job;

	pthread_mutex_lock(&pool->lock);
	job = pool->free_jobs;
	pool->free_jobs = job->next;
	*job = (struct job){.origin = io, .io = *io};
	if (pool->first)
		pool->last->next = job;
	else
		pool->first = job;
	pool->last = job;
	pthread_cond_signal(&pool->work);
	pthread_mutex_unlock(&pool->lock);
}

static int threads_reap(struct backend *backend, struct io **done, uint32_t max, int64_t timeout_us)
{
	struct pool *pool = pool_of(backend);
	uint64_t deadline = clock_deadline_ns(timeout_us);
	int taken = 0;

	pthread_mutex_lock(&pool->lock);
	while (!pool->ended && !pool->woken)
		if (clock_cond_wait(&pool->done, &pool->lock, deadline))
			break;
	pool->woken = false;
	while (pool->ended && (uint32_t)taken < max) {
		struct job *job = pool->ended;

		pool->ended = job->next;
		job->origin->result = job->io.result;
		done[taken++] = job->origin;
		job->next = pool->free_jobs;
		pool->free_jobs = job;
	}
	pthread_mutex_unlock(&pool->lock);
	return taken;
}

static void threads_wake(struct backend *backend)
{
	struct pool *pool = pool_of(backend);

	pthread_mutex_lock(&pool->lock);
	pool->woken = true;
	pthread_cond_signal(&pool->done);
	pthread_mutex_unlock(&pool->lock);
}

static int threads_register_memory(struct backend *backend, void *address, uint64_t bytes)
{
	(void)backend;
	(void)address;
	return bytes ? -EOPNOTSUPP : 0;
}

static int threads_set_file(struct backend *backend, uint32_t slot, int fd)
{
	(void)backend;
	(void)slot;
	(void)fd;
	return -EOPNOTSUPP;
}

static void threads_destroy(struct backend *backend, int64_t grace_us)
{
	struct pool *pool = pool_of(backend);
	uint64_t deadline = clock_deadline_ns(grace_us);
	bool empty;

	pthread_mutex_lock(&pool->lock);
	pool->stop = true;
	pthread_cond_broadcast(&pool->work);
	while (pool->threads) {
		/* idle threads always leave; only those in the kernel may be late */
		uint64_t until = pool->threads > pool->running ? CLOCK_FOREVER : deadline;

		if (clock_cond_wait(&pool->done, &pool->lock, until))
			break;
	}
	empty = !pool->threads;
	pool->abandoned = !empty;
	for (uint32_t i = 0; i < pool->made && !empty; i++)
		pthread_detach(pool->handles[i]);
	pthread_mutex_unlock(&pool->lock);
	for (uint32_t i = 0; i < pool->made && empty; i++)
		pthread_join(pool->handles[i], NULL);
	if (empty)
		pool_free(pool);
	free(backend);
}

static const struct backend_ops threads_ops = {
        .submit = threads_submit,
        .reap = threads_reap,
        .wake = threads_wake,
        .register_memory = threads_register_memory,
        .set_file = threads_set_file,
        .destroy = threads_destroy,
};

/* Starts as many as the machine lets it; one is enough. */
static int start_threads(struct pool *pool, uint32_t count)
{
	int rc = 0;

	pool->handles = calloc(count, sizeof(*pool->handles));
	if (!pool->handles)
		return -ENOMEM;
	pthread_mutex_lock(&pool->lock);
	while (pool->made < count && !rc) {
		rc = pthread_create(&pool->handles[pool->made], NULL, pool_thread, pool);
		if (!rc)
			pthread_setname_np(pool->handles[pool->made++], "aio-pool");
	}
	pool->threads = pool->made;
	pthread_mutex_unlock(&pool->lock);
	return pool->made ? 0 : -rc;
}

static struct pool *pool_new(uint32_t queue_depth)
{
	struct pool *pool = calloc(1, sizeof(*pool));

	if (!pool)
		return NULL;
	pool->jobs = calloc(queue_depth, sizeof(*pool->jobs));
	if (!pool->jobs) {
		free(pool);
		return NULL;
	}
	for (uint32_t i = queue_depth; i-- > 0;) {
		pool->jobs[i].next = pool->free_jobs;
		pool->free_jobs = &pool->jobs[i];
	}
	pthread_mutex_init(&pool->lock, NULL);
	pthread_cond_init(&pool->work, NULL);
	clock_cond_init(&pool->done);
	return pool;
}

int threads_create(uint32_t queue_depth, uint32_t threads, struct backend **out)
{
	struct threads *self = calloc(1, sizeof(*self));
	struct pool *pool = self ? pool_new(queue_depth) : NULL;
	int rc;

	if (!pool) {
		free(self);
		return -ENOMEM;
	}
	if (!threads)
		threads = queue_depth < THREADS_DEFAULT_MAX ? queue_depth : THREADS_DEFAULT_MAX;
	rc = start_threads(pool, threads);
	if (rc) {
		pool_free(pool);
		free(self);
		return rc;
	}
	self->base.ops = &threads_ops;
	self->base.kind = AIO_BACKEND_THREADS;
	self->pool = pool;
	*out = &self->base;
	return 0;
}
