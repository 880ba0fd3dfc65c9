/* SPDX-License-Identifier: Apache-2.0
 *
 * requests.c - the table of requests: ids, who waits for whom, and what an end sets off.
 *
 * Requests live in chunks that never move, so the worker may keep pointers to them. A request that
 * ends starts those that named it in `after`, or ends them with -ECANCELED; the cascade is a list,
 * not a recursion, since a chain may be as long as the table.
 */
#define _GNU_SOURCE
#include "clock.h"
#include "engine.h"

#include <errno.h>
#include <stdlib.h>

static struct request *slot_of(const struct aio *aio, uint64_t slot)
{
	return &aio->chunks[slot / AIO_CHUNK_SLOTS][slot % AIO_CHUNK_SLOTS];
}

static int add_chunk(struct aio *aio)
{
	struct request *chunk;

	if (aio->slots_made == AIO_SLOTS_MAX)
		return -ENOSPC;
	chunk = calloc(AIO_CHUNK_SLOTS, sizeof(*chunk));
	if (!chunk)
		return -ENOMEM;
	aio->chunks[aio->slots_made / AIO_CHUNK_SLOTS] = chunk;
	for (uint64_t i = AIO_CHUNK_SLOTS; i-- > 0;) {
		chunk[i].id = aio->slots_made + i;
		chunk[i].next = aio->free_requests;
		aio->free_requests = &chunk[i];
	}
	aio->slots_made += AIO_CHUNK_SLOTS;
	aio->free_made += AIO_CHUNK_SLOTS;
	return 0;
}

int requests_reserve(struct aio *aio, uint32_t count)
{
	while (aio->free_made < count) {
		int rc = add_chunk(aio);

		if (rc)
			return rc;
	}
	return 0;
}

struct request *requests_find(struct aio *aio, uint64_t id)
{
	uint64_t slot = id & (AIO_SLOTS_MAX - 1);
	struct request *request;

	if (slot >= aio->slots_made)
		return NULL;
	request = slot_of(aio, slot);
	return request->id == id && request->state != REQUEST_FREE ? request : NULL;
}

bool requests_issued(const struct aio *aio, uint64_t id)
{
	uint64_t slot = id & (AIO_SLOTS_MAX - 1);

	return id >= AIO_SLOTS_MAX && slot < aio->slots_made && id <= slot_of(aio, slot)->id;
}

struct request *requests_take(struct aio *aio)
{
	struct request *request = aio->free_requests;
	uint64_t id = request->id + AIO_SLOTS_MAX;

	aio->free_requests = request->next;
	aio->free_made--;
	*request = (struct request){.id = id, .state = REQUEST_WAITING};
	return request;
}

/* Enters a request among the done ones. */
static void set_done(struct aio *aio, struct request *request)
{
	request->ended_ns = clock_now_ns();
	if (!request->ready_ns)
		request->ready_ns = request->ended_ns;
	if (!request->started_ns)
		request->started_ns = request->ended_ns;
	request->state = REQUEST_DONE;
	list_append(&aio->done_requests, request);
	__atomic_store_n(&aio->ended_count, aio->ended_count + 1, __ATOMIC_RELEASE);
}

void requests_give(struct aio *aio, struct request *request)
{
	list_remove(&aio->done_requests, request);
	request->state = REQUEST_FREE;
	if (request->id > UINT64_MAX - AIO_SLOTS_MAX)
		return; /* retired */
	request->next = aio->free_requests;
	aio->free_requests = request;
	aio->free_made++;
}

/* Hands the request to its path, or adds it to the ended ones when nothing is to be moved. */
static struct request *start(struct request *request, struct request *ended)
{
	request->after = NULL;
	request->ready_ns = clock_now_ns();
	if (request->bytes) {
		request->state = REQUEST_QUEUED;
		path_queue(request->file->path, request);
		return ended;
	}
	request->next = ended;
	return request;
}

void requests_begin(struct aio *aio, struct request *request, struct request *after)
{
	aio->pending++;
	request->file->pending++;
	request->file->path->stats.pending_requests++;
	if (after && after->state != REQUEST_DONE) {
		request->after = after;
		request->next_waiter = after->waiters;
		after->waiters = request;
		return;
	}
	if (after && after->error) {
		request->error = -ECANCELED;
		requests_end(aio, request);
	} else if (start(request, NULL)) {
		requests_end(aio, request);
	}
}

/* The waiters of an ended request, oldest first. */
static struct request *take_waiters(struct request *request)
{
	struct request *in_order = NULL;

	while (request->waiters) {
		struct request *waiter = request->waiters;

		request->waiters = waiter->next_waiter;
		waiter->next_waiter = in_order;
		in_order = waiter;
	}
	return in_order;
}

void requests_hurry(struct request *request)
{
	for (; request && !request->urgent; request = request->after) {
		bool queued = request->queued;

		if (queued)
			path_dequeue(request->file->path, request);
		request->urgent = true;
		if (queued)
			path_queue(request->file->path, request);
	}
}

/* Closes the books on a request. */
static void settle(struct aio *aio, struct request *request)
{
	struct aio_stats *stats = &request->file->path->stats;

	set_done(aio, request);
	request->backend = stats->backend;
	aio->pending--;
	request->file->pending--;
	stats->pending_requests--;
	stats->ended_requests++;
	stats->queue_ns += request->started_ns - request->ready_ns;
	stats->device_ns += request->ended_ns - request->started_ns;
}

void requests_end(struct aio *aio, struct request *request)
{
	struct request *ended = request;

	request->next = NULL;
	while (ended) {
		struct request *one = ended;

		ended = one->next;
		settle(aio, one);
		for (struct request *waiter = take_waiters(one); waiter;) {
			struct request *next = waiter->next_waiter;

			if (one->error) {
				waiter->after = NULL;
				waiter->error = -ECANCELED;
				waiter->error_offset = waiter->offset;
				waiter->next = ended;
				ended = waiter;
			} else {
				ended = start(waiter, ended);
			}
			waiter = next;
		}
	}
	if (aio->waiters || aio->closing)
		pthread_cond_broadcast(&aio->done);
}

void requests_cancel_all(struct aio *aio)
{
	for (uint64_t slot = 0; slot < aio->slots_made; slot++) {
		struct request *request = slot_of(aio, slot);

		if (request->state == REQUEST_WAITING || request->state == REQUEST_QUEUED) {
			request->error = -ECANCELED;
			set_done(aio, request);
		}
	}
	aio->pending = 0;
}

void requests_free(struct aio *aio)
{
	for (uint64_t i = 0; i < aio->slots_made / AIO_CHUNK_SLOTS; i++)
		free(aio->chunks[i]);
}
