/* The rate limiter: the host enqueues an all-gather while at most LIMITER_DEPTH frees have not happened yet
 * (D-034), as it would else take memory for what it enqueues long before the device gives any back.
 *
 * Invariant: without streams nothing waits. */
#ifndef FSDP_RUNTIME_LIMITER_H
#define FSDP_RUNTIME_LIMITER_H

#include "torch/stream.h"

enum { LIMITER_DEPTH = 2 };

struct limiter {
    /* owned; frees that the host has not waited for, oldest at `first` */
    stream_event frees[LIMITER_DEPTH];
    int first, count;
    int64_t num_frees; /* since lazy init */
};

void limiter_fini(struct limiter *limiter, struct streams *streams);
int limiter_wait(struct limiter *limiter, struct streams *streams); /* before a unit's all-gather. 0 or -1 */
int limiter_record_free(struct limiter *limiter, struct streams *streams); /* of a unit's storage. 0 or -1 */
void limiter_check(const struct limiter *limiter); /* the invariant, where FSDP_C_CHECK is defined */

#endif
