/* A flat range of a contiguous n-D tensor, cut into boxes: n-D blocks that are contiguous in the range.
 *
 *   start                                                                  end
 *     | rest of a row | rest of a plane | whole planes | rows | part of a row |
 *
 * A range of an n-D tensor has at most 2n - 1 boxes.
 *
 * Checkpoints describe shards as boxes: a rank saves its part of a flat parameter without a copy. */
#ifndef FSDP_LAYOUT_BOXES_H
#define FSDP_LAYOUT_BOXES_H

#include <stdint.h>

#define BOXES_MAX_DIM 64

struct box {
    int64_t offsets[BOXES_MAX_DIM];
    int64_t sizes[BOXES_MAX_DIM];
};

/* Fill `box` with the largest box that begins at `start` and ends at or before `end`, and return its number
 * of elements. The next box begins that many elements later. Requires 0 <= start < end <= numel of `shape`
 * and ndim <= BOXES_MAX_DIM. */
int64_t box_at(const int64_t *shape, int ndim, int64_t start, int64_t end, struct box *box);

#endif
