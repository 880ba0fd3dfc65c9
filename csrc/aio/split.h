/* SPDX-License-Identifier: Apache-2.0
 *
 * split.h - where a request is cut into blocks. A pure function, so that it can be fuzzed alone.
 */
#ifndef AIO_SPLIT_H
#define AIO_SPLIT_H

#include <stdbool.h>
#include <stdint.h>

/* What the cuts depend on, beside the request itself. */
struct split_rules {
	uint64_t block_bytes;  /* a power of two, at least align */
	uint32_t align;        /* of direct offsets and lengths, a power of two; 1: no direct I/O */
	uint32_t memory_align; /* of direct addresses, a power of two */
	uint64_t entry_bytes;  /* of a registered entry */
	uint64_t region;       /* address of the registered memory */
	uint64_t region_bytes; /* 0: none is registered */
};

struct piece {
	uint64_t bytes;
	bool direct;
};

/* The first block of what is left of a request: bytes (more than 0) from address to offset. It is
 * cut
 *   - at multiples of block_bytes of the file offset,
 *   - at the first and last multiple of align of the file offset, and
 *   - at the ends of registered entries of the address,
 * whichever comes first, and goes direct if address, offset and length are all aligned. */
struct piece split_next(const struct split_rules *rules, uint64_t address, uint64_t offset,
                        uint64_t bytes);

#endif
