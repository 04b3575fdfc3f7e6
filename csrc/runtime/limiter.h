/* Rate limiter: the host enqueues an all-gather only while at most LIMITER_DEPTH frees are pending on the
 * device. Without it the host would run ahead and allocate memory long before earlier units free theirs.
 *
 * Invariant: without streams the host never waits. */
#ifndef FSDP_RUNTIME_LIMITER_H
#define FSDP_RUNTIME_LIMITER_H

#include "torch/stream.h"

enum { LIMITER_DEPTH = 2 };

struct limiter {
    /* owned; frees that the host has not waited for, the oldest at `first` */
    stream_event frees[LIMITER_DEPTH];
    int first, count;
    int64_t num_frees; /* number of frees since lazy init */
};

void limiter_fini(struct limiter *limiter, struct streams *streams);
/* Call before a unit's all-gather. 0 or -1. */
int limiter_wait(struct limiter *limiter, struct streams *streams);
/* Call after a unit's storage was freed; `last_use` is the event that its deferred free recorded. */
void limiter_add_free(struct limiter *limiter, struct streams *streams, stream_event last_use);

#endif
