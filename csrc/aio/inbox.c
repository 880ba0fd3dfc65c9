/* SPDX-License-Identifier: Apache-2.0
 *
 * inbox.c - what others leave for a path's worker: requests in its queues, commands, a wake.
 *
 * Order: two levels, and in each a queue of reads and one of writes, first in first out. What
 * somebody waits for (urgent) goes before what nobody waits for: a demand read before those read
 * ahead, and before writes. Within a level, whichever of reads and writes holds fewer of the
 * blocks goes next (the other kind than last time, when they hold as many), so that with both under
 * way each has half of the drive's queue: writes cannot starve reads, and a drive that can do both
 * at once does. A request that becomes urgent when part of it is under way goes on in its new
 * place.
 */
#include "engine.h"

#include <errno.h>

void list_append(struct request_list *list, struct request *request)
{
	request->next = NULL;
	request->prev = list->last;
	*(list->last ? &list->last->next : &list->first) = request;
	list->last = request;
}

void list_remove(struct request_list *list, struct request *request)
{
	*(request->prev ? &request->prev->next : &list->first) = request->next;
	*(request->next ? &request->next->prev : &list->last) = request->prev;
}

void path_wake(struct path *path)
{
	if (!path->asleep || path->woken)
		return;
	path->woken = true;
	path->backend->ops->wake(path->backend);
}

void path_queue(struct path *path, struct request *request)
{
	list_append(&path->queues[request->urgent][request->op], request);
	request->queued = true;
	path_wake(path);
}

void path_dequeue(struct path *path, struct request *request)
{
	list_remove(&path->queues[request->urgent][request->op], request);
	request->queued = false;
}

static bool is_reads_turn(const struct path *path)
{
	if (path->used_blocks[AIO_READ] == path->used_blocks[AIO_WRITE])
		return path->last_op == AIO_WRITE;
	return path->used_blocks[AIO_READ] < path->used_blocks[AIO_WRITE];
}

struct request *path_next(const struct path *path)
{
	for (int urgent = 1; urgent >= 0; urgent--) {
		struct request *read = path->queues[urgent][AIO_READ].first;
		struct request *write = path->queues[urgent][AIO_WRITE].first;

		if (read && (!write || is_reads_turn(path)))
			return read;
		if (write)
			return write;
	}
	return NULL;
}

int path_command(struct path *path, struct command *command)
{
	struct command **last = &path->commands;

	if (path->exited || path->broken)
		return -ESHUTDOWN;
	while (*last)
		last = &(*last)->next;
	*last = command;
	path_wake(path);
	while (!command->done)
		pthread_cond_wait(&path->answered, &path->aio->lock);
	return command->result;
}

void path_refuse_commands(struct path *path)
{
	while (path->commands) {
		struct command *command = path->commands;

		path->commands = command->next;
		command->result = -ESHUTDOWN;
		command->done = true;
	}
	pthread_cond_broadcast(&path->answered);
}
