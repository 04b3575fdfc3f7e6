/* What one rank sends, receives and puts together to bring many tensors from one partition to another.
 *
 * All is counted in bytes. A rank sends each peer its ranges one behind the other, in the order of the
 * tensors. What arrives lies in one buffer, by peer: one behind the other, or, where all ranks gather the
 * same, in rows as long as the longest. What stays on a rank is never sent; it is taken from where it is.
 *
 * Invariant: the arrays are owned by the plan, which exchange_free empties. Integers only. */
#ifndef FSDP_LAYOUT_EXCHANGE_H
#define FSDP_LAYOUT_EXCHANGE_H

#include <stdbool.h>
#include <stddef.h>

#include "base/status.h"
#include "layout/partition.h"

struct exchange_tensor {
    struct partition source;
    struct partition target;
    int64_t element_nbytes;
};

/* the source of a part that arrives; this rank's piece of tensor i is source i + 1 */
enum { EXCHANGE_RECEIVED = 0 };

struct exchange_range {
    int64_t source;
    int64_t start;
    int64_t nbytes;
};

struct exchange_ranges {
    struct exchange_range *items; /* owned */
    size_t count;
    size_t capacity;
};

struct exchange {
    struct exchange_ranges sent;  /* by peer; the source is the tensor */
    struct exchange_ranges parts; /* of the new pieces, tensor by tensor */
    int64_t *part_counts;         /* by tensor */
    int64_t *source_nbytes;       /* by tensor: this rank's piece before */
    int64_t *target_nbytes;       /* by tensor: its piece after */
    int64_t *sent_nbytes;         /* by peer */
    int64_t *received_nbytes;     /* by peer */
};

/* The plan of `rank`. `gathered`: its own parts arrive as those of the others do, in rows. STATUS_INVALID for
 * partitions of different tensors, sizes beyond 64 bits, or elements behind the last rank; nothing is left to
 * free then. */
enum status exchange_init(struct exchange *plan, const struct exchange_tensor *tensors, size_t count,
                          int64_t rank, int64_t world_size, bool gathered);
void exchange_free(struct exchange *plan);

#endif
