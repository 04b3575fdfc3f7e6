/* The plan of one rank to move many tensors from one partition to another: byte ranges to send, to receive
 * and to join.
 *
 *   source pieces --ranges by peer--> all-to-all --> receive buffer --parts, joined--> target pieces
 *
 * All sizes are in bytes. A rank sends each peer its ranges back to back, in the order of the tensors. The
 * receive buffer holds the bytes of each peer back to back or, after an all-gather, in rows as long as the
 * longest one. Bytes that stay on a rank are not sent: their parts refer to the rank's source piece.
 *
 * Invariant: the plan owns its arrays, exchange_free empties it. Integers only. */
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

/* The source of a received part. Source i + 1 is this rank's piece of tensor i. */
enum { EXCHANGE_RECEIVED = 0 };

struct exchange_range {
    int64_t source; /* in `sent`: index of a tensor; in `parts`: EXCHANGE_RECEIVED, or that index + 1 */
    int64_t start;
    int64_t nbytes;
};

struct exchange_ranges {
    struct exchange_range *items; /* owned */
    size_t count;
    size_t capacity;
};

struct exchange {
    struct exchange_ranges sent;  /* ordered by peer */
    struct exchange_ranges parts; /* parts of the target pieces, ordered by tensor */
    int64_t *part_counts;         /* per tensor */
    int64_t *source_nbytes;       /* per tensor: size of this rank's source piece */
    int64_t *target_nbytes;       /* per tensor: size of this rank's target piece */
    int64_t *sent_nbytes;         /* per peer */
    int64_t *received_nbytes;     /* per peer */
};

/* Make the plan of `rank`. `gathered` plans an all-gather: the rank's own parts are in the receive buffer
 * too, whose rows have one length. STATUS_INVALID for two partitions of different numel, sizes beyond 64
 * bits, or elements beyond the last rank; nothing needs freeing after a failure. */
enum status exchange_init(struct exchange *plan, const struct exchange_tensor *tensors, size_t count,
                          int64_t rank, int64_t world_size, bool gathered);
void exchange_free(struct exchange *plan);

#endif
