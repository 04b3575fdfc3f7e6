/* The position of each parameter in the flat parameter of its unit, and the part of it in each rank's shard.
 *
 *   segments   | p0 ......... |pad| p1 .... |pad| p2 ............ |pad|  numel
 *   chunks     | rank 0 .......... | rank 1 .......... | rank 2 ....##|  shard_numel each, ## = right padding
 *
 * Invariant: immutable after layout_init. All quantities are element counts; no pointers to data. Pads
 * between parameters align each one to `aligned_numel` elements; the last pad makes the total divisible by
 * the world size. Right padding (##) exists only in the last chunks, when the total is not divisible. */
#ifndef FSDP_LAYOUT_LAYOUT_H
#define FSDP_LAYOUT_LAYOUT_H

#include <stdbool.h>
#include <stdint.h>

#include "base/status.h"

#define LAYOUT_PADDING (-1)

struct layout_segment {
    int64_t offset; /* first element in the flat parameter */
    int64_t numel;
    int64_t param; /* index of the parameter, or LAYOUT_PADDING */
};

/* The part of one parameter that one rank's shard holds; numel 0 and in_shard false when there is none. */
struct layout_shard_range {
    bool in_shard;
    int64_t offset_in_shard; /* first element of the part in the shard */
    int64_t numel_in_shard;  /* elements of the parameter in the shard */
    int64_t offset_in_param; /* first element of the part in the parameter */
};

struct layout_spec {
    const int64_t *param_numels; /* borrowed for the call; in flatten order, each >= 0 */
    int64_t num_params;
    int64_t aligned_numel; /* 0 packs the parameters without alignment and without divisibility padding */
    int64_t world_size;
    int64_t rank;
    bool sharded; /* false for NO_SHARD: every rank holds the whole flat parameter */
};

struct flat_layout {
    int64_t num_params;
    int64_t num_segments;
    struct layout_segment *segments;         /* owned; parameters and padding in flat order */
    int64_t *param_segments;                 /* owned; parameter -> index of its segment */
    struct layout_shard_range *shard_ranges; /* owned; parameter -> its part in this rank's shard */
    int64_t world_size;
    int64_t rank;
    bool sharded;
    int64_t numel;              /* includes alignment and divisibility padding, excludes right padding */
    int64_t shard_numel;        /* elements of one chunk, the same on all ranks; numel when not sharded */
    int64_t padded_numel;       /* shard_numel * world_size; numel when not sharded */
    int64_t shard_start;        /* shard_numel * rank; may exceed numel */
    int64_t shard_numel_valid;  /* elements of this rank's chunk without right padding */
    int64_t shard_numel_padded; /* right padding in this rank's chunk: shard_numel - shard_numel_valid */
};

/* Fill `layout`. A failure leaves it zeroed, and nothing needs freeing. */
enum status layout_init(struct flat_layout *layout, const struct layout_spec *spec);
void layout_fini(struct flat_layout *layout); /* legal on a zeroed layout, and twice */

/* Return the part of parameter `param` in the shard of `rank`, which may be any rank. */
struct layout_shard_range layout_shard_range(const struct flat_layout *layout, int64_t param, int64_t rank);

static inline int64_t layout_param_offset(const struct flat_layout *layout, int64_t param) {
    return layout->segments[layout->param_segments[param]].offset;
}
static inline int64_t layout_param_numel(const struct flat_layout *layout, int64_t param) {
    return layout->segments[layout->param_segments[param]].numel;
}

#endif
