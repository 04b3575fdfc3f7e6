/* One buffer whose last use is enqueued on one stream and may not have run yet: its memory is held back until the stream that took
 * it, and takes it again, waits for that use.
 *
 *   COMPUTE   | forward(i-1) |last use| forward(i) |last use|
 *   UNSHARD          gather(i)        |wait for i-1| gather(i+1), into the memory of i-1
 *
 * Invariant: memory goes back to the allocator only once its owner waits for its last use. In forward one buffer is held: with none,
 * gather(i+1) would wait for forward(i), the last to give memory back, and nothing would overlap. In backward none stays held: each
 * unit's post-backward settles what it has freed. */
#ifndef FSDP_TORCH_DEFERRED_FREE_H
#define FSDP_TORCH_DEFERRED_FREE_H

#include "torch/buffer.h"
#include "torch/stream.h"

struct deferred_free {
    struct streams *streams; /* borrowed */
    enum stream_role owner;  /* took the memory */
    enum stream_role writer; /* is the first to write to it, perhaps */
    enum stream_role user;   /* uses it last */
    struct buffer *held;     /* borrowed, or NULL; forgotten before it ends */
    stream_event last_use;   /* of what is held; destroyed with the streams */
};

/* Free what was held before, and hold `buffer` from now on. 0 or -1. */
int deferred_free_add(struct deferred_free *deferred, struct buffer *buffer);
/* Free what is held. 0 or -1. */
int deferred_free_settle(struct deferred_free *deferred);
/* `buffer` is wanted again: its memory is handed over as it is, if it is the one held. 0 or -1. */
int deferred_free_take_back(struct deferred_free *deferred, const struct buffer *buffer);
/* `buffer` ends, or is to be taken anew: its memory goes, if it is the one held; without one nothing is. 0 or -1. */
int deferred_free_forget(struct deferred_free *deferred, const struct buffer *buffer);

static inline bool deferred_free_holds(const struct deferred_free *deferred, const struct buffer *buffer) {
    return deferred && deferred->held == buffer;
}

#endif
