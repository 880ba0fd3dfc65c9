/* SPDX-License-Identifier: Apache-2.0
 *
 * split.c - where a request is cut into blocks; see split.h.
 */
#include "split.h"

static uint64_t min_u64(uint64_t a, uint64_t b)
{
	return a < b ? a : b;
}

/* Bytes from address to the next end of a registered entry. */
static uint64_t entry_left(const struct split_rules *rules, uint64_t address)
{
	uint64_t at = address - rules->region;

	if (!rules->region_bytes)
		return UINT64_MAX;
	if (address < rules->region)
		return rules->region - address;
	if (at >= rules->region_bytes)
		return UINT64_MAX;
	return min_u64(rules->region_bytes - at, rules->entry_bytes - at % rules->entry_bytes);
}

struct piece split_next(const struct split_rules *rules, uint64_t address, uint64_t offset,
                        uint64_t bytes)
{
	uint64_t in_unit = offset % rules->align;

	bytes = min_u64(bytes, rules->block_bytes - offset % rules->block_bytes);
	bytes = min_u64(bytes, entry_left(rules, address));
	if (in_unit)
		bytes = min_u64(bytes, rules->align - in_unit);
	else if (bytes >= rules->align)
		bytes -= bytes % rules->align;
	return (struct piece){.bytes = bytes,
	                      .direct = rules->align > 1 && !in_unit && bytes % rules->align == 0 &&
	                                address % rules->memory_align == 0};
}
