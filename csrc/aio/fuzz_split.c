/* SPDX-License-Identifier: Apache-2.0
 *
 * fuzz_split.c - feeds split.c with arbitrary requests and checks every block; run by sanitize.sh.
 *
 * Usage: fuzz_split COUNT [SEED]. With -DFUZZ_ENTRY_ONLY and -fsanitize=fuzzer a coverage-guided
 * fuzzer may take the place of main.
 */
#include "split.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define CHECK(condition)                                                                           \
	do {                                                                                       \
		if (!(condition)) {                                                                \
			fprintf(stderr, "%s:%d: %s\n", __FILE__, __LINE__, #condition);            \
			abort();                                                                   \
		}                                                                                  \
	} while (0)

/* A request of more pieces than this is not walked to its end. */
#define PIECES_MAX 128

struct input {
	uint64_t address;
	uint64_t offset;
	uint64_t bytes;
	uint64_t region;
	uint64_t region_bytes;
	uint8_t block_shift;
	uint8_t align_shift;
	uint8_t memory_shift;
	uint8_t entry_shift;
	uint8_t address_shift; /* how many low bits of the numbers above are zero: */
	uint8_t offset_shift;  /* ends and boundaries are met often that way */
	uint8_t bytes_shift;
	uint8_t region_shift;
};

static struct split_rules rules_of(const struct input *in)
{
	uint32_t align = 1u << in->align_shift % 17;
	uint64_t block = UINT64_C(4096) << in->block_shift % 21;

	return (struct split_rules){.block_bytes = block < align ? align : block,
	                            .align = align,
	                            .memory_align = 1u << in->memory_shift % 13,
	                            .entry_bytes = UINT64_C(4096) << in->entry_shift % 19,
	                            .region = in->region % (UINT64_C(1) << 46) >>
	                                      in->region_shift % 40 << in->region_shift % 40,
	                            .region_bytes = in->region_bytes % (UINT64_C(1) << 40)};
}

static void check_piece(const struct split_rules *rules, uint64_t address, uint64_t offset,
                        uint64_t bytes, struct piece piece)
{
	uint64_t at = address - rules->region;
	uint64_t last = offset + piece.bytes - 1;
	bool inside = address >= rules->region && at < rules->region_bytes;
	bool aligned = address % rules->memory_align == 0 && offset % rules->align == 0 &&
	               piece.bytes % rules->align == 0;

	CHECK(piece.bytes > 0 && piece.bytes <= bytes);
	CHECK(offset / rules->block_bytes == last / rules->block_bytes);
	CHECK(piece.direct == (rules->align > 1 && aligned));
	/* A piece lies in one entry, or outside of all. */
	if (inside)
		CHECK(at / rules->entry_bytes == (at + piece.bytes - 1) / rules->entry_bytes &&
		      at + piece.bytes <= rules->region_bytes);
	else if (rules->region_bytes && address < rules->region)
		CHECK(address + piece.bytes <= rules->region);
	/* A buffered piece shares no unit of the alignment with a direct one: it ends at a
	 * multiple, or lies in one unit, or its address is what keeps it from going direct. */
	if (!piece.direct && offset % rules->align)
		CHECK(offset / rules->align == last / rules->align);
	/* No piece is smaller than it must be. */
	CHECK(piece.bytes == bytes || (offset + piece.bytes) % rules->align == 0 ||
	      (inside && ((at + piece.bytes) % rules->entry_bytes == 0 ||
	                  at + piece.bytes == rules->region_bytes)) ||
	      address + piece.bytes == rules->region);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
	struct input in;
	struct split_rules rules;
	uint64_t done = 0;

	if (size < sizeof(in))
		return 0;
	memcpy(&in, data, sizeof(in));
	rules = rules_of(&in);
	in.address = in.address % (UINT64_C(1) << 46) >> in.address_shift % 40
	                                                         << in.address_shift % 40;
	in.offset = in.offset % (UINT64_C(1) << 60) >> in.offset_shift % 50 << in.offset_shift % 50;
	in.bytes = in.bytes % (UINT64_C(1) << 36) >> in.bytes_shift % 34;
	for (int i = 0; i < PIECES_MAX && done < in.bytes; i++) {
		struct piece piece =
		        split_next(&rules, in.address + done, in.offset + done, in.bytes - done);

		check_piece(&rules, in.address + done, in.offset + done, in.bytes - done, piece);
		done += piece.bytes;
	}
	CHECK(done <= in.bytes);
	return 0;
}

#ifndef FUZZ_ENTRY_ONLY

/* splitmix64 */
static uint64_t next_random(uint64_t *state)
{
	uint64_t z = *state += UINT64_C(0x9e3779b97f4a7c15);

	z = (z ^ z >> 30) * UINT64_C(0xbf58476d1ce4e5b9);
	z = (z ^ z >> 27) * UINT64_C(0x94d049bb133111eb);
	return z ^ z >> 31;
}

int main(int argc, char **argv)
{
	uint64_t count = argc > 1 ? strtoull(argv[1], NULL, 10) : 0;
	uint64_t state = argc > 2 ? strtoull(argv[2], NULL, 10) : 1;
	uint64_t words[(sizeof(struct input) + 7) / 8];

	for (uint64_t i = 0; i < count; i++) {
		for (size_t w = 0; w < sizeof(words) / sizeof(*words); w++)
			words[w] = next_random(&state);
		/* Half of the requests begin near the registered memory. */
		if (words[0] & 1)
			words[0] = words[3] + words[0] % 65536 - 32768;
		LLVMFuzzerTestOneInput((const uint8_t *)words, sizeof(words));
	}
	printf("%llu requests split\n", (unsigned long long)count);
	return 0;
}

#endif
