/* How the elements of one tensor, in memory order, are divided over the ranks of a group.
 *
 *   elements              0 ............................. numel
 *   ranks     | 0 .... | 1 .... | 2 .... | 3 .... |          each `step` long, the first beginning at -offset
 *
 * Rank r holds [r * step - offset, (r + 1) * step - offset), cut to [0, numel). So is a parameter divided by
 * the shards of its flat parameter (step = shard_numel, offset = where it lies there), by torch.chunk along
 * its first dimension (step = ceil(rows / world size) * row, offset 0), and when rank 0 holds all of it (step
 * = numel, offset 0).
 *
 * Invariant: numel, offset >= 0 and step >= 1; no sum of them leaves 64 bits. Integers only. */
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
    int64_t rank; /* who holds it */
    int64_t start;
    int64_t end;
};

bool partition_is_valid(const struct partition *partition);

/* What `rank` holds; empty with start 0 where it holds nothing. */
struct partition_range partition_of_rank(const struct partition *partition, int64_t rank);

/* The ranks that hold elements of [start, end): the part of the first one, or one with start == end when
 * there is none. Call again with `start` at the end of what it returned. */
struct partition_range partition_next(const struct partition *partition, int64_t start, int64_t end);

#endif
