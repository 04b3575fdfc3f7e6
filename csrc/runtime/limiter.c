/* The rate limiter of a schedule. */
#include "runtime/schedule.h"
#include "runtime/trace.h"

void limiter_fini(struct limiter *limiter, struct streams *streams) {
    for (int i = 0; i < LIMITER_DEPTH; i++)
        stream_event_destroy(streams, &limiter->frees[i]);
}

static stream_event take_oldest(struct limiter *limiter) {
    stream_event oldest = limiter->frees[limiter->first];
    limiter->first = (limiter->first + 1) % LIMITER_DEPTH;
    limiter->count--;
    return oldest;
}

int limiter_wait(struct limiter *limiter, struct streams *streams) {
    if (limiter->num_frees < LIMITER_DEPTH)
        return 0;
    /* the range is recorded even if nothing is waited for, as in FSDP1 */
    TRACE(TRACED_RATE_LIMITER, -1);
    return limiter->count < LIMITER_DEPTH ? 0 : stream_synchronize(streams, take_oldest(limiter));
}

void limiter_add_free(struct limiter *limiter, struct streams *streams, stream_event last_use) {
    limiter->num_frees++;
    if (!streams_are_real(streams))
        return;
    /* two frees without an all-gather between them: waiting for the newer one implies the older */
    if (limiter->count == LIMITER_DEPTH)
        take_oldest(limiter);
    int slot = (limiter->first + limiter->count++) % LIMITER_DEPTH;
    stream_event_share(streams, last_use, &limiter->frees[slot]);
}
