/* SPDX-License-Identifier: Apache-2.0
 *
 * faulty.c - a backend that wraps another and spoils chosen operations. For tests.
 *
 * Bytes move as in the backend inside, except that an operation with ERRNO never reaches it and
 * one with SHORT reaches it shortened. A delayed completion is kept until its time has come while
 * others pass it; a swallowed one is kept for ever.
 */
#define _GNU_SOURCE
#include "backend.h"
#include "clock.h"

#include <errno.h>
#include <stdlib.h>

struct faulty {
	struct backend base;
	struct backend *inner;
	struct fault_state *state;
	struct io *held; /* ended, to be seen at their due_ns */
};

static struct faulty *faulty_of(struct backend *backend)
{
	return (struct faulty *)backend;
}

bool faulty_wanted(const struct aio_faults *faults)
{
	bool wanted = faults->refuse_register_errno;

	for (int i = 0; i < 8; i++)
		wanted = wanted || faults->rules[i].action;
	return wanted;
}

static bool is_hit(const struct aio_fault_rule *rule, uint64_t number)
{
	if (number < rule->first || !rule->action)
		return false;
	return number == rule->first || (rule->every && (number - rule->first) % rule->every == 0);
}

/* Counts the operation under every rule and returns the first that acts. */
static const struct aio_fault_rule *choose(struct fault_state *state, const struct io *io)
{
	const struct aio_fault_rule *chosen = NULL;

	for (int i = 0; i < 8; i++) {
		const struct aio_fault_rule *rule = &state->faults.rules[i];

		if (!(rule->op & (1u << io->op)))
			continue;
		state->seen[i]++;
		if (!chosen && is_hit(rule, state->seen[i]))
			chosen = rule;
	}
	return chosen;
}

static void hold(struct faulty *faulty, struct io *io, uint64_t due_ns)
{
	io->due_ns = due_ns;
	io->next = faulty->held;
	faulty->held = io;
}

/* A direct operation moves the aligned part of what it may and reports all of it: whoever goes on
 * from the reported end instead of the aligned offset below loses bytes. */
static void shorten(struct faulty *faulty, struct io *io)
{
	uint32_t moved;

	if (io->fault_value < io->bytes)
		io->bytes = (uint32_t)io->fault_value;
	io->fault_value = io->bytes;
	moved = io->bytes - io->bytes % io->align;
	io->bytes = moved;
	if (moved) {
		faulty->inner->ops->submit(faulty->inner, io);
		return;
	}
	io->bytes = io->asked_bytes;
	io->result = (int32_t)io->fault_value;
	hold(faulty, io, 0);
}

static void faulty_submit(struct backend *backend, struct io *io)
{
	struct faulty *faulty = faulty_of(backend);
	const struct aio_fault_rule *rule = choose(faulty->state, io);

	io->asked_bytes = io->bytes;
	io->fault = rule ? rule->action : AIO_FAULT_NONE;
	io->fault_value = rule ? rule->value : 0;
	if (io->fault == AIO_FAULT_ERRNO) {
		io->result = -(int32_t)io->fault_value;
		hold(faulty, io, 0);
	} else if (io->fault == AIO_FAULT_SHORT) {
		shorten(faulty, io);
	} else {
		faulty->inner->ops->submit(faulty->inner, io);
	}
}

static uint32_t take_due(struct faulty *faulty, struct io **done, uint32_t max)
{
	uint64_t now = clock_now_ns();
	struct io **link = &faulty->held;
	uint32_t taken = 0;

	while (*link && taken < max) {
		struct io *io = *link;

		if (io->due_ns > now) {
			link = &io->next;
			continue;
		}
		*link = io->next;
		done[taken++] = io;
	}
	return taken;
}

static int64_t wait_us(const struct faulty *faulty, int64_t timeout_us)
{
	uint64_t deadline = clock_deadline_ns(timeout_us);

	for (const struct io *io = faulty->held; io; io = io->next)
		if (io->due_ns < deadline)
			deadline = io->due_ns;
	return clock_left_us(deadline);
}

/* Whether the completion may be seen now. */
static bool pass(struct faulty *faulty, struct io *io)
{
	bool whole = io->result == (int32_t)io->bytes;

	io->bytes = io->asked_bytes;
	if (io->fault == AIO_FAULT_SHORT && whole)
		io->result = (int32_t)io->fault_value;
	if (io->fault == AIO_FAULT_DELAY)
		hold(faulty, io, clock_deadline_ns((int64_t)io->fault_value));
	return io->fault != AIO_FAULT_DELAY && io->fault != AIO_FAULT_SWALLOW;
}

static int faulty_reap(struct backend *backend, struct io **done, uint32_t max, int64_t timeout_us)
{
	struct faulty *faulty = faulty_of(backend);
	struct backend *inner = faulty->inner;
	int due = (int)take_due(faulty, done, max);
	int kept = due;
	int n;

	n = inner->ops->reap(inner, done + due, max - (uint32_t)due,
	                     due ? 0 : wait_us(faulty, timeout_us));
	for (int i = 0; i < n; i++)
		if (pass(faulty, done[due + i]))
			done[kept++] = done[due + i];
	return n < 0 ? n : kept;
}

static void faulty_wake(struct backend *backend)
{
	struct backend *inner = faulty_of(backend)->inner;

	inner->ops->wake(inner);
}

static int faulty_register_memory(struct backend *backend, void *address, uint64_t bytes)
{
	struct faulty *faulty = faulty_of(backend);
	struct backend *inner = faulty->inner;
	int refused = faulty->state->faults.refuse_register_errno;

	if (!bytes || !refused)
		return inner->ops->register_memory(inner, address, bytes);
	inner->ops->register_memory(inner, NULL, 0);
	return -refused;
}

static int faulty_set_file(struct backend *backend, uint32_t slot, int fd)
{
	struct backend *inner = faulty_of(backend)->inner;

	return inner->ops->set_file(inner, slot, fd);
}

static void faulty_destroy(struct backend *backend, int64_t grace_us)
{
	struct backend *inner = faulty_of(backend)->inner;

	inner->ops->destroy(inner, grace_us);
	free(backend);
}

static const struct backend_ops faulty_ops = {
        .submit = faulty_submit,
        .reap = faulty_reap,
        .wake = faulty_wake,
        .register_memory = faulty_register_memory,
        .set_file = faulty_set_file,
        .destroy = faulty_destroy,
};

int faulty_create(struct fault_state *state, struct backend *inner, struct backend **out)
{
	struct faulty *faulty = calloc(1, sizeof(*faulty));

	if (!faulty)
		return -ENOMEM;
	faulty->base = (struct backend){
	        .ops = &faulty_ops, .kind = inner->kind, .fixed_files = inner->fixed_files};
	faulty->inner = inner;
	faulty->state = state;
	*out = &faulty->base;
	return 0;
}
