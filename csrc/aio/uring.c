/* SPDX-License-Identifier: Apache-2.0
 *
 * uring.c - the io_uring backend.
 *
 * The ring belongs to the path's worker: it alone makes it, submits to it, registers with it and
 * reads its completions, so the ring may be set up for a single issuer with deferred task work
 * (completions are then handled when the worker asks, never by an interrupt on its back). Others
 * reach the worker through an eventfd on which a poll operation is always armed.
 *
 * Memory is registered in entries of 1 GiB, the kernel's limit; an operation that lies in one entry
 * uses it. Tables are registered sparse and then filled, which needs Linux 5.19; where that is
 * refused the ring works with plain addresses and descriptors.
 */
#define _GNU_SOURCE
#include "backend.h"

#include <errno.h>

#ifdef AIO_NO_URING

int uring_create(uint32_t queue_depth, uint32_t file_slots, struct backend **out)
{
	(void)queue_depth;
	(void)file_slots;
	*out = NULL;
	return -ENOSYS;
}

int aio_has_uring(void)
{
	return 0;
}

#else

#include "clock.h"

#include <liburing.h>
#include <poll.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <unistd.h>

/* Linux 5.19 and 6.0; asked for and given up where the kernel does not know them. */
#ifndef IORING_SETUP_SINGLE_ISSUER
#define IORING_SETUP_SINGLE_ISSUER (1U << 12)
#endif
#ifndef IORING_SETUP_DEFER_TASKRUN
#define IORING_SETUP_DEFER_TASKRUN (1U << 13)
#endif

/* A ring may be refused for a moment while the kernel still frees earlier ones: 1, 2 ... 32 ms. */
#define SETUP_TRIES 6
/* Failed entries into the kernel in a row, a millisecond apart, after which the ring is given up.
 */
#define ENTER_TRIES 1000
/* The kernel reports on so many operations at most. */
#define PROBED_OPERATIONS 256

struct uring {
	struct backend base;
	struct io_uring ring;
	int wake_fd;
	bool armed; /* the poll on wake_fd is under way */
	uint32_t file_slots;
	char *region;
	uint64_t region_bytes;
	struct io *refused; /* could not be put on the ring */
	uint32_t flying;
	uint32_t failed_enters;
};

static struct uring *uring_of(struct backend *backend)
{
	return (struct uring *)backend;
}

static struct io_uring_sqe *get_sqe(struct uring *uring)
{
	struct io_uring_sqe *sqe = io_uring_get_sqe(&uring->ring);

	if (sqe)
		return sqe;
	io_uring_submit(&uring->ring);
	return io_uring_get_sqe(&uring->ring);
}

/* The registered entry that holds the whole operation, or -1. */
static int entry_of(const struct uring *uring, const struct io *io)
{
	uint64_t first = (uint64_t)((uintptr_t)io->buffer - (uintptr_t)uring->region);
	uint64_t last = first + io->bytes - 1;

	if (!uring->region_bytes || io->buffer < uring->region || last >= uring->region_bytes ||
	    first / AIO_ENTRY_BYTES != last / AIO_ENTRY_BYTES)
		return -1;
	return (int)(first / AIO_ENTRY_BYTES);
}

static void prepare(const struct uring *uring, struct io_uring_sqe *sqe, struct io *io)
{
	int entry = entry_of(uring, io);
	int fd = io->slot >= 0 ? io->slot : io->fd;

	if (io->op == AIO_READ && entry >= 0)
		io_uring_prep_read_fixed(sqe, fd, io->buffer, io->bytes, io->offset, entry);
	else if (io->op == AIO_READ)
		io_uring_prep_read(sqe, fd, io->buffer, io->bytes, io->offset);
	else if (entry >= 0)
		io_uring_prep_write_fixed(sqe, fd, io->buffer, io->bytes, io->offset, entry);
	else
		io_uring_prep_write(sqe, fd, io->buffer, io->bytes, io->offset);
	if (io->slot >= 0)
		sqe->flags |= IOSQE_FIXED_FILE;
	io_uring_sqe_set_data(sqe, io);
}

static void uring_submit(struct backend *backend, struct io *io)
{
	struct uring *uring = uring_of(backend);
	struct io_uring_sqe *sqe = get_sqe(uring);

	if (sqe) {
		prepare(uring, sqe, io);
		uring->flying++;
		return;
	}
	io->result = -EAGAIN;
	io->next = uring->refused;
	uring->refused = io;
}

static void arm(struct uring *uring)
{
	struct io_uring_sqe *sqe;

	if (uring->armed)
		return;
	sqe = get_sqe(uring);
	if (!sqe)
		return;
	io_uring_prep_poll_add(sqe, uring->wake_fd, POLLIN);
	io_uring_sqe_set_data(sqe, uring);
	uring->armed = true;
}

static void disarm(struct uring *uring)
{
	uint64_t count;
	ssize_t got = read(uring->wake_fd, &count, sizeof(count));

	(void)got;
	uring->armed = false;
}

static int enter(struct uring *uring, int64_t timeout_us)
{
	struct __kernel_timespec spec = {.tv_sec = timeout_us / 1000000,
	                                 .tv_nsec = timeout_us % 1000000 * 1000};
	struct io_uring_cqe *cqe;

	if (timeout_us < 0)
		return io_uring_submit_and_wait(&uring->ring, 1);
	return io_uring_submit_and_wait_timeout(&uring->ring, &cqe, 1, &spec, NULL);
}

static uint32_t take(struct uring *uring, struct io **done, uint32_t max)
{
	struct io_uring_cqe *cqe;
	uint32_t taken = 0;
	unsigned seen = 0;
	unsigned head;

	io_uring_for_each_cqe(&uring->ring, head, cqe)
	{
		void *data = io_uring_cqe_get_data(cqe);

		if (data != uring && data != (void *)LIBURING_UDATA_TIMEOUT) {
			if (taken == max)
				break;
			done[taken] = data;
			done[taken++]->result = cqe->res;
			uring->flying--;
		} else if (data == uring) {
			disarm(uring);
		}
		seen++;
	}
	io_uring_cq_advance(&uring->ring, seen);
	return taken;
}

static uint32_t take_refused(struct uring *uring, struct io **done, uint32_t max)
{
	uint32_t taken = 0;

	while (uring->refused && taken < max) {
		done[taken++] = uring->refused;
		uring->refused = uring->refused->next;
	}
	return taken;
}

static bool is_passing(int rc)
{
	return rc == -EAGAIN || rc == -EBUSY || rc == -EINTR || rc == -ENOMEM;
}

static int uring_reap(struct backend *backend, struct io **done, uint32_t max, int64_t timeout_us)
{
	struct uring *uring = uring_of(backend);
	uint32_t refused = take_refused(uring, done, max);
	uint32_t taken;
	int rc;

	arm(uring);
	rc = enter(uring, refused ? 0 : timeout_us);
	taken = refused + take(uring, done + refused, max - refused);
	if (rc >= 0 || rc == -ETIME || taken) {
		uring->failed_enters = 0;
	} else if (!is_passing(rc) || ++uring->failed_enters == ENTER_TRIES) {
		return rc;
	} else {
		usleep(1000);
	}
	return (int)taken;
}

static void uring_wake(struct backend *backend)
{
	uint64_t one = 1;
	ssize_t put = write(uring_of(backend)->wake_fd, &one, sizeof(one));

	(void)put;
}

static int fill_entries(struct uring *uring, char *address, uint64_t bytes)
{
	unsigned index = 0;

	for (uint64_t at = 0; at < bytes; at += AIO_ENTRY_BYTES, index++) {
		uint64_t left = bytes - at;
		struct iovec entry = {.iov_base = address + at,
		                      .iov_len = left < AIO_ENTRY_BYTES ? left : AIO_ENTRY_BYTES};
		__u64 tag = 0;
		int rc = io_uring_register_buffers_update_tag(&uring->ring, index, &entry, &tag, 1);

		if (rc < 0)
			return rc;
	}
	return 0;
}

static int uring_register_memory(struct backend *backend, void *address, uint64_t bytes)
{
	struct uring *uring = uring_of(backend);
	uint64_t entries = (bytes + AIO_ENTRY_BYTES - 1) / AIO_ENTRY_BYTES;
	int rc;

	io_uring_submit(&uring->ring); /* what is held back names the old entries */
	if (uring->region_bytes)
		io_uring_unregister_buffers(&uring->ring);
	uring->region_bytes = 0;
	if (!bytes)
		return 0;
	rc = io_uring_register_buffers_sparse(&uring->ring, (unsigned)entries);
	if (rc < 0)
		return rc;
	rc = fill_entries(uring, address, bytes);
	if (rc < 0) {
		io_uring_unregister_buffers(&uring->ring);
		return rc;
	}
	uring->region = address;
	uring->region_bytes = bytes;
	return 0;
}

static int uring_set_file(struct backend *backend, uint32_t slot, int fd)
{
	struct uring *uring = uring_of(backend);
	int rc;

	if (slot >= uring->file_slots)
		return -ENOSPC;
	io_uring_submit(&uring->ring); /* what is held back names the old file */
	rc = io_uring_register_files_update(&uring->ring, slot, &fd, 1);
	return rc < 0 ? rc : 0;
}

/* The kernel may still write to the caller's memory: give it a moment to finish. */
static void drain(struct uring *uring, int64_t grace_us)
{
	uint64_t deadline = clock_deadline_ns(grace_us);
	struct io *done[16];

	while (uring->flying && clock_left_us(deadline)) {
		int rc = enter(uring, clock_left_us(deadline));

		take(uring, done, 16);
		if (rc < 0 && !is_passing(rc))
			return;
	}
}

/* A forked child may still hold the ring's descriptor, so everything is given back one by one. */
static void uring_destroy(struct backend *backend, int64_t grace_us)
{
	struct uring *uring = uring_of(backend);

	drain(uring, grace_us);
	if (uring->region_bytes)
		io_uring_unregister_buffers(&uring->ring);
	if (uring->file_slots)
		io_uring_unregister_files(&uring->ring);
	io_uring_queue_exit(&uring->ring);
	close(uring->wake_fd);
	free(uring);
}

static const struct backend_ops uring_ops = {
        .submit = uring_submit,
        .reap = uring_reap,
        .wake = uring_wake,
        .register_memory = uring_register_memory,
        .set_file = uring_set_file,
        .destroy = uring_destroy,
};

static int setup_once(struct io_uring *ring, uint32_t entries)
{
	static const unsigned flags[] = {
	        IORING_SETUP_SINGLE_ISSUER | IORING_SETUP_DEFER_TASKRUN | IORING_SETUP_SUBMIT_ALL,
	        IORING_SETUP_COOP_TASKRUN | IORING_SETUP_SUBMIT_ALL,
	        0,
	};
	int rc = -EINVAL;

	for (size_t i = 0; i < sizeof(flags) / sizeof(*flags) && rc == -EINVAL; i++) {
		struct io_uring_params params = {.flags = flags[i]};

		rc = io_uring_queue_init_params(entries, ring, &params);
	}
	return rc;
}

static int setup(struct io_uring *ring, uint32_t entries)
{
	int rc = setup_once(ring, entries);

	for (unsigned i = 0; i < SETUP_TRIES && (rc == -ENOMEM || rc == -EAGAIN); i++) {
		usleep(1000u << i);
		rc = setup_once(ring, entries);
	}
	return rc;
}

static int check_operations(struct io_uring *ring)
{
	static const unsigned needed[] = {IORING_OP_READ, IORING_OP_WRITE, IORING_OP_READ_FIXED,
	                                  IORING_OP_WRITE_FIXED, IORING_OP_POLL_ADD};
	struct io_uring_probe *probe =
	        calloc(1, sizeof(*probe) + PROBED_OPERATIONS * sizeof(struct io_uring_probe_op));
	int rc;

	if (!probe)
		return -ENOMEM;
	rc = io_uring_register_probe(ring, probe, PROBED_OPERATIONS);
	for (size_t i = 0; i < sizeof(needed) / sizeof(*needed) && !rc; i++)
		if (!io_uring_opcode_supported(probe, (int)needed[i]))
			rc = -EOPNOTSUPP;
	free(probe);
	return rc;
}

/* A filter may allow the ring and forbid entering it. */
static int check_enter(struct io_uring *ring)
{
	struct io_uring_cqe *cqe;
	int rc;

	io_uring_prep_nop(io_uring_get_sqe(ring));
	rc = io_uring_submit_and_wait(ring, 1);
	if (rc < 0)
		return rc;
	rc = io_uring_peek_cqe(ring, &cqe);
	if (rc < 0)
		return rc;
	rc = cqe->res;
	io_uring_cqe_seen(ring, cqe);
	return rc;
}

static int make_ring(struct uring *uring, uint32_t queue_depth)
{
	int rc = setup(&uring->ring, queue_depth + 1);

	if (rc < 0)
		return rc;
	rc = check_operations(&uring->ring);
	if (!rc)
		rc = check_enter(&uring->ring);
	if (!rc)
		io_uring_ring_dontfork(&uring->ring);
	else
		io_uring_queue_exit(&uring->ring);
	return rc;
}

int uring_create(uint32_t queue_depth, uint32_t file_slots, struct backend **out)
{
	struct uring *uring = calloc(1, sizeof(*uring));
	int rc;

	if (!uring)
		return -ENOMEM;
	uring->base.ops = &uring_ops;
	uring->base.kind = AIO_BACKEND_URING;
	uring->wake_fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
	rc = uring->wake_fd < 0 ? -errno : make_ring(uring, queue_depth);
	if (rc) {
		if (uring->wake_fd >= 0)
			close(uring->wake_fd);
		free(uring);
		return rc;
	}
	if (!io_uring_register_files_sparse(&uring->ring, file_slots))
		uring->file_slots = file_slots;
	uring->base.fixed_files = uring->file_slots > 0;
	*out = &uring->base;
	return 0;
}

int aio_has_uring(void)
{
	return 1;
}

#endif
