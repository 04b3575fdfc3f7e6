#include "layout/partition.h"

static int64_t clamp(int64_t value, int64_t low, int64_t high) {
    return value < low ? low : value > high ? high : value;
}

bool partition_is_valid(const struct partition *partition) {
    return partition->numel >= 0 && partition->offset >= 0 && partition->step >= 1 &&
           partition->numel <= INT64_MAX - partition->offset &&
           partition->numel + partition->offset <= INT64_MAX - partition->step;
}

/* Return the first element of `rank`, clamped to [0, numel]. The rank is clamped too: the product could
 * overflow. */
static int64_t rank_start(const struct partition *partition, int64_t rank) {
    const int64_t last = (partition->numel + partition->offset) / partition->step + 1;
    return clamp(clamp(rank, 0, last) * partition->step - partition->offset, 0, partition->numel);
}

struct partition_range partition_of_rank(const struct partition *partition, int64_t rank) {
    const struct partition_range range = {rank, rank_start(partition, rank), rank_start(partition, rank + 1)};
    return range.start < range.end ? range : (struct partition_range){rank, 0, 0};
}

struct partition_range partition_next(const struct partition *partition, int64_t start, int64_t end) {
    start = clamp(start, 0, partition->numel);
    end = clamp(end, start, partition->numel);
    const int64_t rank = (start + partition->offset) / partition->step;
    if (start == end)
        return (struct partition_range){rank, start, start};
    const int64_t next = rank_start(partition, rank + 1);
    return (struct partition_range){rank, start, next < end ? next : end};
}
