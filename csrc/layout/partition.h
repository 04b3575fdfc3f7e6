/* The division of one tensor's elements, in memory order, over the ranks of a group.
 *
 *   elements         0 ......................... numel
 *   ranks     | 0 ..... | 1 ..... | 2 ..... | 3 ..... |
 *             ^ -offset           each rank `step` long
 *
 * Rank r holds [r * step - offset, (r + 1) * step - offset), clamped to [0, numel). Three cases: the shards
 * of a flat parameter divide a parameter (step = shard_numel, offset = the parameter's offset in the flat
 * parameter); torch.chunk divides it along dimension 0 (step = ceil(rows / world size) * row numel, offset
 * 0); rank 0 holds all of it (step = numel, offset 0).
 *
 * Invariant: numel, offset >= 0 and step >= 1; sums of them fit into 64 bits. Integers only. */
#ifndef FSDP_LAYOUT_PARTITION_H
#define FSDP_LAYOUT_PARTITION_H

#include <stdbool.h>
#include <stdint.h>

struct partition {
    int64_t numel;
    int64_t step;
    int64_t offset;
};

struct partition_range {
    int64_t rank; /* holder of the range */
    int64_t start;
    int64_t end;
};

bool partition_is_valid(const struct partition *partition);

/* Return the range that `rank` holds; [0, 0) when it holds no element. */
struct partition_range partition_of_rank(const struct partition *partition, int64_t rank);

/* Return the part of [start, end) that the holder of `start` holds; start == end in the result when the range
 * is empty. The next call begins at the `end` of the result. */
struct partition_range partition_next(const struct partition *partition, int64_t start, int64_t end);

#endif
