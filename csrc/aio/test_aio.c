/* SPDX-License-Identifier: Apache-2.0
 *
 * test_aio.c - drives both backends and every fault through aio.h; run by sanitize.sh.
 *
 * Usage: test_aio FOLDER. Prints the name of each test and stops at the first that fails.
 */
#define _GNU_SOURCE
#include "aio.h"

#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#define CHECK(condition)                                                                           \
	do {                                                                                       \
		if (!(condition)) {                                                                \
			fprintf(stderr, "%s:%d: %s\n", __FILE__, __LINE__, #condition);            \
			exit(1);                                                                   \
		}                                                                                  \
	} while (0)

#define BOTH (1u << AIO_READ | 1u << AIO_WRITE)
#define MEMORY_BYTES (UINT64_C(4) << 20)
#define HALF (MEMORY_BYTES / 2)

static const char *folder;
static const uint32_t backends[] = {AIO_BACKEND_THREADS, AIO_BACKEND_URING};

/* An engine, a file and memory: the first half is written, the second read into. */
struct bench {
	struct aio *aio;
	struct aio_memory memory;
	char *bytes;
	char name[4096];
	uint32_t file;
	struct aio_file_info info;
};

static struct aio_options options_of(uint32_t backend)
{
	return (struct aio_options){
	        .block_bytes = 65536, .queue_depth = 8, .backend = backend, .max_files = 16};
}

static void set_up(struct bench *bench, const struct aio_options *options)
{
	int fd;

	memset(bench, 0, sizeof(*bench));
	CHECK(aio_open(options, &bench->aio) == 0);
	CHECK(aio_path_add(bench->aio) == 0);
	CHECK(aio_memory_map(MEMORY_BYTES, AIO_PAGES_AUTO, &bench->memory) == 0);
	bench->bytes = bench->memory.address;
	for (uint64_t i = 0; i < HALF; i++)
		bench->bytes[i] = (char)(i * 2654435761u >> 13);
	snprintf(bench->name, sizeof(bench->name), "%s/test_aio.XXXXXX", folder);
	fd = mkstemp(bench->name);
	CHECK(fd >= 0);
	close(fd);
	CHECK(aio_register(bench->aio, bench->bytes, MEMORY_BYTES) == 0);
	bench->file = (uint32_t)aio_file_open(bench->aio, 0, bench->name, &bench->info);
	CHECK((int)bench->file >= 0);
}

static void tear_down(struct bench *bench)
{
	CHECK(aio_file_close(bench->aio, bench->file) == 0);
	CHECK(aio_close(bench->aio, -1) == 0);
	CHECK(aio_memory_unmap(&bench->memory) == 0);
	CHECK(unlink(bench->name) == 0);
}

static uint64_t submit(struct bench *bench, uint32_t op, uint64_t at, uint64_t bytes,
                       uint64_t offset, uint64_t after)
{
	struct aio_request request = {.op = op,
	                              .file = bench->file,
	                              .buffer = bench->bytes + at,
	                              .bytes = bytes,
	                              .offset = offset,
	                              .after = after,
	                              .tag = 7};
	uint64_t id = 0;

	CHECK(aio_submit(bench->aio, &request, 1, &id) == 0);
	return id;
}

/* Waits, forgets, returns the error. */
static int finish(struct bench *bench, uint64_t id)
{
	struct aio_result result;

	CHECK(aio_wait(bench->aio, id, -1, &result) == 0);
	CHECK(result.error || result.done_bytes == result.asked_bytes);
	CHECK(aio_forget(bench->aio, id) == 0);
	CHECK(aio_forget(bench->aio, id) == -ENOENT);
	return result.error;
}

static struct aio_stats stats_of(struct bench *bench)
{
	struct aio_stats stats;

	CHECK(aio_path_stats(bench->aio, 0, &stats) == 0);
	return stats;
}

/* Writes a piece, reads it back by a request that waits for the write, and compares. */
static void round_trip(struct bench *bench, uint64_t at, uint64_t bytes, uint64_t offset)
{
	uint64_t written;
	uint64_t read;

	memset(bench->bytes + HALF + at, 0, bytes);
	written = submit(bench, AIO_WRITE, at, bytes, offset, 0);
	read = submit(bench, AIO_READ, HALF + at, bytes, offset, written);
	CHECK(finish(bench, read) == 0);
	CHECK(finish(bench, written) == 0);
	CHECK(!memcmp(bench->bytes + at, bench->bytes + HALF + at, bytes));
}

static void round_trips(struct bench *bench)
{
	static const uint64_t sizes[] = {0, 1, 511, 4096, 65536, 65537, 3 * 65536 + 517, 1 << 20};
	static const uint64_t starts[] = {0, 1, 512, 4096, 61440};

	for (size_t s = 0; s < sizeof(sizes) / sizeof(*sizes); s++)
		for (size_t a = 0; a < 5; a++)
			for (size_t o = 0; o < 5; o++)
				round_trip(bench, starts[a], sizes[s], starts[o]);
}

static void run(struct aio_options options)
{
	struct bench bench;

	set_up(&bench, &options);
	round_trips(&bench);
	tear_down(&bench);
}

static void test_round_trips(uint32_t backend)
{
	run(options_of(backend));
}

static void test_depths(uint32_t backend)
{
	static const uint32_t depths[] = {1, 2, 4096};

	for (size_t i = 0; i < sizeof(depths) / sizeof(*depths); i++) {
		struct aio_options options = options_of(backend);
		uint64_t ids[500];
		struct bench bench;

		options.queue_depth = depths[i];
		set_up(&bench, &options);
		for (int n = 0; n < 500; n++)
			ids[n] = submit(&bench, AIO_WRITE, (uint64_t)n * 4096, 4096,
			                (uint64_t)n * 4096, 0);
		for (int n = 0; n < 500; n++)
			CHECK(finish(&bench, ids[n]) == 0);
		round_trip(&bench, 0, 1 << 20, 0);
		CHECK(stats_of(&bench).pending_requests == 0);
		tear_down(&bench);
	}
}

static void test_transient_errors(uint32_t backend)
{
	struct aio_options options = options_of(backend);

	options.faults.rules[0] = (struct aio_fault_rule){AIO_FAULT_ERRNO, BOTH, 3, 3, EAGAIN};
	options.faults.rules[1] = (struct aio_fault_rule){AIO_FAULT_ERRNO, BOTH, 5, 5, EINTR};
	run(options);
}

static void test_short_transfers(uint32_t backend)
{
	struct aio_options options = options_of(backend);

	options.faults.rules[0] = (struct aio_fault_rule){AIO_FAULT_SHORT, BOTH, 2, 2, 4096 + 100};
	options.faults.max_transfer_bytes = 20000;
	run(options);
}

static void test_delays_and_alignments(uint32_t backend)
{
	static const uint32_t aligns[] = {512, 4096, 65536, 131072};

	for (size_t i = 0; i < sizeof(aligns) / sizeof(*aligns); i++) {
		struct aio_options options = options_of(backend);

		options.faults.force_alignment_bytes = aligns[i];
		options.faults.force_memory_alignment_bytes = i % 2 ? 512 : 0;
		options.faults.rules[0] = (struct aio_fault_rule){AIO_FAULT_DELAY, BOTH, 1, 3, 200};
		run(options);
	}
}

static void test_refusals(uint32_t backend)
{
	struct aio_options options = options_of(backend);
	struct bench bench;

	options.faults.refuse_direct_errno = EINVAL;
	options.faults.refuse_register_errno = ENOMEM;
	set_up(&bench, &options);
	CHECK(!bench.info.direct && bench.info.direct_errno == EINVAL);
	CHECK(stats_of(&bench).registered_bytes == 0 && stats_of(&bench).register_errno == ENOMEM);
	round_trips(&bench);
	tear_down(&bench);
}

/* Through the page cache by choice is no refusal. */
static void test_direct_off(uint32_t backend)
{
	struct aio_options options = options_of(backend);
	struct bench bench;

	options.direct = AIO_DIRECT_OFF;
	set_up(&bench, &options);
	CHECK(!bench.info.direct && !bench.info.direct_errno);
	CHECK(bench.info.memory_align_bytes == 1 && bench.info.offset_align_bytes == 1);
	round_trips(&bench);
	CHECK(stats_of(&bench).buffered_blocks ==
	      stats_of(&bench).read_blocks + stats_of(&bench).written_blocks);
	tear_down(&bench);
}

static void test_no_progress(uint32_t backend)
{
	struct aio_options options = options_of(backend);
	struct bench bench;

	options.faults.rules[0] = (struct aio_fault_rule){AIO_FAULT_SHORT, BOTH, 1, 1, 100};
	set_up(&bench, &options);
	CHECK(finish(&bench, submit(&bench, AIO_WRITE, 0, 65536, 0, 0)) == -EIO);
	tear_down(&bench);
}

static void test_persistent_refusal(uint32_t backend)
{
	struct aio_options options = options_of(backend);
	struct bench bench;

	options.faults.rules[0] =
	        (struct aio_fault_rule){AIO_FAULT_ERRNO, 1u << AIO_WRITE, 1, 1, EAGAIN};
	set_up(&bench, &options);
	CHECK(finish(&bench, submit(&bench, AIO_WRITE, 0, 4096, 0, 0)) == -EAGAIN);
	tear_down(&bench);
}

static void test_end_of_file(uint32_t backend)
{
	struct aio_options options = options_of(backend);
	struct aio_result result;
	struct bench bench;
	uint64_t id;

	set_up(&bench, &options);
	round_trip(&bench, 0, 70000, 0);
	id = submit(&bench, AIO_READ, HALF, 1 << 20, 0, 0);
	CHECK(aio_wait(bench.aio, id, -1, &result) == 0);
	CHECK(result.error == -ENODATA && result.error_offset == 70000);
	CHECK(result.done_bytes == 70000 && result.asked_bytes == 1 << 20);
	tear_down(&bench);
}

/* A failure ends everything that waits for it, however long the chain, and nothing else. */
static void test_cascade(uint32_t backend)
{
	struct aio_options options = options_of(backend);
	uint64_t ids[2000];
	struct bench bench;

	options.faults.rules[0] =
	        (struct aio_fault_rule){AIO_FAULT_ERRNO, 1u << AIO_WRITE, 1, 0, EIO};
	set_up(&bench, &options);
	ids[0] = submit(&bench, AIO_WRITE, 0, 4096, 0, 0);
	for (int i = 1; i < 2000; i++)
		ids[i] = submit(&bench, AIO_WRITE, 0, i % 2 ? 0 : 4096, 0, ids[i - 1]);
	CHECK(finish(&bench, ids[1999]) == -ECANCELED);
	CHECK(finish(&bench, ids[0]) == -EIO);
	CHECK(finish(&bench, submit(&bench, AIO_WRITE, 0, 4096, 0, ids[1])) == -ECANCELED);
	CHECK(finish(&bench, submit(&bench, AIO_WRITE, 0, 4096, 0, ids[0])) == 0);
	tear_down(&bench);
}

/* Which of the requests have ended, in that order. */
static void reap_all(struct bench *bench, uint64_t *ids, uint32_t count)
{
	struct aio_result results[16];
	uint32_t reaped = 0;
	uint32_t n;

	while (reaped < count) {
		int rc = aio_wait_ended(bench->aio, reaped + 1, 10000000);

		CHECK(rc == 0);
		CHECK(aio_reap(bench->aio, results, count - reaped, &n) == 0);
		for (uint32_t i = 0; i < n; i++) {
			CHECK(results[i].error == 0 && results[i].tag == 7);
			CHECK(results[i].done_bytes == results[i].asked_bytes);
			ids[reaped++] = results[i].id;
		}
	}
	CHECK(aio_ended_count(bench->aio) == count);
	CHECK(aio_wait_ended(bench->aio, count + 1, 0) == -ETIME);
}

/* Urgent before others, also when it waits for another; reads and writes in turn. */
static void test_order(uint32_t backend)
{
	struct aio_options options = options_of(backend);
	struct aio_result result;
	struct bench bench;
	uint64_t ids[7];
	uint64_t ended[7];

	options.queue_depth = 1;
	options.faults.rules[0] = (struct aio_fault_rule){
	        .action = AIO_FAULT_DELAY, .op = BOTH, .first = 1, .value = 300000};
	set_up(&bench, &options);
	ids[0] = submit(&bench, AIO_WRITE, 0, 4096, 0, 0); /* holds all others up */
	ids[1] = submit(&bench, AIO_WRITE, 0, 4096, 0, ids[0]);
	ids[2] = submit(&bench, AIO_WRITE, 0, 4096, 0, ids[0]);
	ids[3] = submit(&bench, AIO_READ, HALF, 4096, 0, ids[0]);
	ids[4] = submit(&bench, AIO_READ, HALF, 4096, 0, ids[0]);
	ids[5] = submit(&bench, AIO_WRITE, 0, 4096, 0, ids[0]);
	ids[6] = submit(&bench, AIO_READ, HALF, 4096, 0, ids[5]);
	CHECK(aio_wait(bench.aio, ids[6], 1, &result) == -ETIME);
	CHECK(aio_wait(bench.aio, ids[4], 1, &result) == -ETIME);
	reap_all(&bench, ended, 7);
	CHECK(ended[0] == ids[0]);
	CHECK(ended[1] == ids[4]); /* a write was last, so it is a read's turn */
	CHECK(ended[2] == ids[5]);
	CHECK(ended[3] == ids[6]);
	CHECK(ended[4] == ids[1]);
	CHECK(ended[5] == ids[3]);
	CHECK(ended[6] == ids[2]);
	CHECK(stats_of(&bench).ended_requests == 7 && stats_of(&bench).waits == 2);
	tear_down(&bench);
}

static void test_bad_arguments(uint32_t backend)
{
	struct aio_options options = options_of(backend);
	struct aio_request request = {.op = AIO_READ};
	struct aio_file_info info;
	struct aio *none;
	struct bench bench;
	uint64_t id;

	options.queue_depth = 0;
	CHECK(aio_open(&options, &none) == -EINVAL);
	options = options_of(backend);
	options.block_bytes = 5000;
	CHECK(aio_open(&options, &none) == -EINVAL);
	options = options_of(backend);
	options.direct = AIO_DIRECT_OFF + 1;
	CHECK(aio_open(&options, &none) == -EINVAL);
	options = options_of(backend);
	set_up(&bench, &options);
	request.file = bench.file + 1;
	CHECK(aio_submit(bench.aio, &request, 1, &id) == -EBADF);
	request = (struct aio_request){.file = bench.file, .bytes = 1};
	CHECK(aio_submit(bench.aio, &request, 1, &id) == -EFAULT);
	request = (struct aio_request){
	        .file = bench.file, .buffer = bench.bytes, .bytes = 1, .offset = UINT64_MAX};
	CHECK(aio_submit(bench.aio, &request, 1, &id) == -EOVERFLOW);
	request = (struct aio_request){.file = bench.file, .after = 77};
	CHECK(aio_submit(bench.aio, &request, 1, &id) == -ENOENT);
	CHECK(aio_file_open(bench.aio, 0, "/nonexistent", &info) == -ENOENT);
	CHECK(aio_file_open(bench.aio, 0, folder, &info) == -EISDIR);
	CHECK(aio_file_open(bench.aio, 9, bench.name, &info) == -EINVAL);
	tear_down(&bench);
}

/* A completion that never comes: the wait and the close end by their time. */
static void test_swallowed(uint32_t backend)
{
	struct aio_options options = options_of(backend);
	struct aio_result result;
	struct bench bench;
	uint64_t id;

	options.faults.rules[0] =
	        (struct aio_fault_rule){AIO_FAULT_SWALLOW, 1u << AIO_READ, 1, 0, 0};
	set_up(&bench, &options);
	CHECK(finish(&bench, submit(&bench, AIO_WRITE, 0, 1 << 20, 0, 0)) == 0);
	id = submit(&bench, AIO_READ, HALF, 1 << 20, 0, 0);
	CHECK(aio_wait(bench.aio, id, 20000, &result) == -ETIME);
	CHECK(aio_wait(bench.aio, id, 0, &result) == -ETIME);
	CHECK(aio_forget(bench.aio, id) == -EBUSY);
	CHECK(aio_file_close(bench.aio, bench.file) == -EBUSY);
	CHECK(aio_close(bench.aio, 20000) == -ETIME);
	CHECK(aio_memory_unmap(&bench.memory) == 0);
	CHECK(unlink(bench.name) == 0);
}

struct waiter {
	struct bench *bench;
	uint64_t id;
	int rc;
	int error;
};

static void *wait_for(void *argument)
{
	struct waiter *waiter = argument;
	struct aio_result result = {.error = 1};

	waiter->rc = aio_wait(waiter->bench->aio, waiter->id, -1, &result);
	waiter->error = result.error;
	return NULL;
}

/* Threads that wait while the engine is closed leave it with -ECANCELED. */
static void test_close_under_waiters(uint32_t backend)
{
	struct aio_options options = options_of(backend);
	struct waiter waiters[4];
	pthread_t threads[4];
	struct aio_result result;
	struct bench bench;
	uint64_t id;

	options.faults.rules[0] = (struct aio_fault_rule){AIO_FAULT_SWALLOW, BOTH, 1, 1, 0};
	set_up(&bench, &options);
	id = submit(&bench, AIO_WRITE, 0, 4096, 0, 0);
	for (int i = 0; i < 4; i++) {
		waiters[i] = (struct waiter){.bench = &bench, .id = id};
		CHECK(!pthread_create(&threads[i], NULL, wait_for, &waiters[i]));
	}
	/* Not a proof that all of them wait by now; -ENOENT cannot come of it, since the id lives.
	 */
	CHECK(aio_wait(bench.aio, id, 50000, &result) == -ETIME);
	CHECK(aio_close(bench.aio, 0) == -ETIME);
	for (int i = 0; i < 4; i++) {
		pthread_join(threads[i], NULL);
		CHECK(waiters[i].rc == 0 && waiters[i].error == -ECANCELED);
	}
	CHECK(aio_memory_unmap(&bench.memory) == 0);
	CHECK(unlink(bench.name) == 0);
}

struct user {
	struct bench *bench;
	uint64_t number;
};

static void *use(void *argument)
{
	struct user *user = argument;
	uint64_t room = HALF / 4;

	for (uint64_t i = 0; i < 50; i++)
		round_trip(user->bench, user->number * room, 1 + i * 2711, user->number * room);
	return NULL;
}

static void test_many_threads(uint32_t backend)
{
	struct aio_options options = options_of(backend);
	struct user users[4];
	pthread_t threads[4];
	struct bench bench;

	set_up(&bench, &options);
	for (uint64_t i = 0; i < 4; i++) {
		users[i] = (struct user){&bench, i};
		CHECK(!pthread_create(&threads[i], NULL, use, &users[i]));
	}
	for (int i = 0; i < 10; i++)
		CHECK(aio_register(bench.aio, bench.bytes, i % 2 ? MEMORY_BYTES : 0) == 0);
	for (int i = 0; i < 4; i++)
		pthread_join(threads[i], NULL);
	tear_down(&bench);
}

/* Files come and go; their numbers and places in the table are used again. */
static void test_files(uint32_t backend)
{
	struct aio_options options = options_of(backend);
	struct aio_file_info info;
	int numbers[16];
	struct bench bench;

	set_up(&bench, &options);
	for (int round = 0; round < 3; round++) {
		for (int i = 0; i < 15; i++) {
			numbers[i] = aio_file_open(bench.aio, 0, bench.name, &info);
			CHECK(numbers[i] >= 0);
		}
		CHECK(aio_file_open(bench.aio, 0, bench.name, &info) == -EMFILE);
		for (int i = 0; i < 15; i++) {
			CHECK(aio_file_sync(bench.aio, (uint32_t)numbers[i]) == 0);
			CHECK(aio_file_close(bench.aio, (uint32_t)numbers[i]) == 0);
			CHECK(aio_file_close(bench.aio, (uint32_t)numbers[i]) == -EBADF);
		}
	}
	round_trip(&bench, 0, 1 << 20, 0);
	tear_down(&bench);
}

/* Two paths, and a request on one that waits for a request on the other. */
static void test_two_paths(uint32_t backend)
{
	struct aio_options options = options_of(backend);
	struct aio_request request = {.op = AIO_READ, .bytes = 1 << 20};
	struct aio_file_info info;
	struct bench bench;
	uint64_t id;

	set_up(&bench, &options);
	CHECK(aio_path_add(bench.aio) == 1);
	request.file = (uint32_t)aio_file_open(bench.aio, 1, bench.name, &info);
	request.buffer = bench.bytes + HALF;
	request.after = submit(&bench, AIO_WRITE, 0, 1 << 20, 0, 0);
	CHECK(aio_submit(bench.aio, &request, 1, &id) == 0);
	CHECK(finish(&bench, id) == 0);
	CHECK(!memcmp(bench.bytes, bench.bytes + HALF, 1 << 20));
	tear_down(&bench);
}

static void test_fork(uint32_t backend)
{
	struct aio_options options = options_of(backend);
	struct aio_result result;
	struct bench bench;
	int status;
	pid_t child;

	set_up(&bench, &options);
	child = fork();
	if (!child) {
		bool refused = aio_wait(bench.aio, 1, 0, &result) == -ECHILD &&
		               aio_memory_unmap(&bench.memory) == -ECHILD &&
		               aio_close(bench.aio, -1) == -ECHILD;

		_exit(refused ? 0 : 1);
	}
	CHECK(waitpid(child, &status, 0) == child && status == 0);
	round_trips(&bench);
	tear_down(&bench);
}

/* A ring that does not know an operation is left for threads, once, in the middle of work. */
static void test_fallback_at_work(void)
{
	struct aio_options options = options_of(AIO_BACKEND_AUTO);
	struct bench bench;

	options.faults.rules[0] = (struct aio_fault_rule){AIO_FAULT_ERRNO, BOTH, 40, 0, EOPNOTSUPP};
	set_up(&bench, &options);
	round_trips(&bench);
	CHECK(stats_of(&bench).backend == AIO_BACKEND_THREADS);
	CHECK(stats_of(&bench).backend_errno == EOPNOTSUPP);
	tear_down(&bench);
}

static void test_fallback_at_start(void)
{
	struct aio_options options = options_of(AIO_BACKEND_AUTO);
	struct bench bench;

	options.faults.refuse_uring_errno = EPERM;
	set_up(&bench, &options);
	CHECK(stats_of(&bench).backend == AIO_BACKEND_THREADS);
	CHECK(stats_of(&bench).backend_errno == EPERM);
	round_trips(&bench);
	tear_down(&bench);
}

static void test_explicit_refusal(void)
{
	struct aio_options options = options_of(AIO_BACKEND_URING);
	struct aio *aio;

	options.faults.refuse_uring_errno = EPERM;
	CHECK(aio_open(&options, &aio) == 0);
	CHECK(aio_path_add(aio) == -EPERM);
	CHECK(aio_close(aio, -1) == 0);
}

/* Memory that can be had is there, zeroed, and made of what it says. */
static void check_memory(uint64_t bytes, uint32_t pages)
{
	struct aio_memory memory;
	uint64_t unit;

	CHECK(aio_memory_map(bytes, pages, &memory) == 0);
	unit = memory.huge_bytes ? memory.huge_bytes : 4096;
	CHECK((memory.pages == AIO_PAGES_SMALL) == !memory.huge_bytes);
	CHECK(pages == AIO_PAGES_AUTO || memory.pages == AIO_PAGES_SMALL);
	CHECK((uintptr_t)memory.address % unit == 0);
	CHECK(memory.bytes >= bytes && memory.bytes % unit == 0);
	for (uint64_t at = 0; at < memory.bytes; at += 4096)
		CHECK(!((char *)memory.address)[at]);
	memset(memory.address, 1, memory.bytes);
	CHECK(aio_memory_unmap(&memory) == 0);
	CHECK(aio_memory_unmap(&memory) == 0);
}

static void test_memory(void)
{
	static const uint64_t sizes[] = {1, 4097, 2 << 20, (5 << 20) + 1, 64 << 20};
	struct aio_memory memory;

	CHECK(aio_memory_map(0, AIO_PAGES_AUTO, &memory) == -EINVAL);
	CHECK(aio_memory_map(1, AIO_PAGES_TRANSPARENT, &memory) == -EINVAL);
	CHECK(aio_memory_map(UINT64_C(1) << 60, AIO_PAGES_AUTO, &memory) == -ENOMEM);
	CHECK(aio_memory_map(UINT64_C(1) << 60, AIO_PAGES_SMALL, &memory) == -ENOMEM);
	for (size_t i = 0; i < sizeof(sizes) / sizeof(*sizes); i++) {
		check_memory(sizes[i], AIO_PAGES_AUTO);
		check_memory(sizes[i], AIO_PAGES_SMALL);
	}
}

#define TEST(name) {#name, test_##name}

static const struct {
	const char *name;
	void (*run)(uint32_t backend);
} tests[] = {
        TEST(round_trips),
        TEST(depths),
        TEST(transient_errors),
        TEST(short_transfers),
        TEST(delays_and_alignments),
        TEST(refusals),
        TEST(direct_off),
        TEST(no_progress),
        TEST(persistent_refusal),
        TEST(end_of_file),
        TEST(cascade),
        TEST(order),
        TEST(bad_arguments),
        TEST(swallowed),
        TEST(close_under_waiters),
        TEST(many_threads),
        TEST(files),
        TEST(two_paths),
        TEST(fork),
};

int main(int argc, char **argv)
{
	size_t kinds = aio_has_uring() ? 2 : 1;

	CHECK(argc == 2);
	folder = argv[1];
	for (size_t i = 0; i < sizeof(tests) / sizeof(*tests); i++)
		for (size_t kind = 0; kind < kinds; kind++) {
			printf("%s %s\n", kind ? "uring  " : "threads", tests[i].name);
			fflush(stdout);
			tests[i].run(backends[kind]);
		}
	if (aio_has_uring())
		test_fallback_at_work();
	test_fallback_at_start();
	test_explicit_refusal();
	test_memory();
	printf("ok\n");
	return 0;
}
