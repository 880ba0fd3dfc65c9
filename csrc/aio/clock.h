/* SPDX-License-Identifier: Apache-2.0
 *
 * clock.h - monotonic time and deadlines. Timeouts are microseconds, < 0 meaning for ever.
 */
#ifndef AIO_CLOCK_H
#define AIO_CLOCK_H

#include <errno.h>
#include <pthread.h>
#include <stdint.h>
#include <time.h>

#define CLOCK_FOREVER UINT64_MAX
#define NS_PER_S UINT64_C(1000000000)

static inline uint64_t clock_now_ns(void)
{
	struct timespec now;

	clock_gettime(CLOCK_MONOTONIC, &now);
	return (uint64_t)now.tv_sec * NS_PER_S + (uint64_t)now.tv_nsec;
}

static inline uint64_t clock_deadline_ns(int64_t timeout_us)
{
	uint64_t now = clock_now_ns();

	if (timeout_us < 0 || (uint64_t)timeout_us > (CLOCK_FOREVER - now) / 1000 - 1)
		return CLOCK_FOREVER;
	return now + (uint64_t)timeout_us * 1000;
}

/* Microseconds left, rounded up; < 0 for ever. */
static inline int64_t clock_left_us(uint64_t deadline_ns)
{
	uint64_t now = clock_now_ns();

	if (deadline_ns == CLOCK_FOREVER)
		return -1;
	return deadline_ns <= now ? 0 : (int64_t)((deadline_ns - now + 999) / 1000);
}

static inline struct timespec clock_timespec(uint64_t ns)
{
	struct timespec spec = {.tv_sec = (time_t)(ns / NS_PER_S),
	                        .tv_nsec = (long)(ns % NS_PER_S)};

	return spec;
}

static inline int clock_cond_init(pthread_cond_t *cond)
{
	pthread_condattr_t attr;
	int rc = pthread_condattr_init(&attr);

	if (rc)
		return -rc;
	pthread_condattr_setclock(&attr, CLOCK_MONOTONIC);
	rc = pthread_cond_init(cond, &attr);
	pthread_condattr_destroy(&attr);
	return -rc;
}

/* 0 when woken, -ETIME when the deadline has passed. */
static inline int clock_cond_wait(pthread_cond_t *cond, pthread_mutex_t *lock, uint64_t deadline_ns)
{
	struct timespec until;

	if (deadline_ns == CLOCK_FOREVER)
		return -pthread_cond_wait(cond, lock);
	until = clock_timespec(deadline_ns);
	return pthread_cond_timedwait(cond, lock, &until) ? -ETIME : 0;
}

#endif
