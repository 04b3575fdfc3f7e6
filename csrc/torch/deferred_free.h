/* The buffers of one unit, whose last use is enqueued on one stream and may not have run yet: their memory is
 * held back until the stream that took it, and takes it again, waits for that use.
 *
 *   COMPUTE   | forward(i-1) |last use| forward(i) |last use|
 *   UNSHARD          gather(i)        |wait for i-1| gather(i+1), into the memory of i-1
 *
 * Invariant: memory goes back to the allocator only once its owner waits for its last use. In forward one
 * unit's is held: with none, gather(i+1) would wait for forward(i), the last to give memory back, and nothing
 * would overlap. In backward none stays held: each unit's post-backward flushes what it has freed. `last_use`
 * is that of all that is held. */
#ifndef FSDP_TORCH_DEFERRED_FREE_H
#define FSDP_TORCH_DEFERRED_FREE_H

#include "torch/buffer.h"
#include "torch/stream.h"

struct deferred_free {
    struct streams *streams; /* borrowed */
    enum stream_role owner;  /* took the memory */
    enum stream_role writer; /* is the first to write to it, perhaps */
    enum stream_role user;   /* uses it last */
    struct buffer *held;     /* borrowed, the first of a list, or NULL; forgotten before it ends */
    stream_event last_use;   /* destroyed with the streams */
};

/* Free what was held before, and hold `buffer` from now on; beside it, where they are one unit's. 0 or -1. */
int deferred_free_add(struct deferred_free *deferred, struct buffer *buffer, bool beside);
/* Free what is held. 0 or -1. */
int deferred_free_flush(struct deferred_free *deferred);
/* `buffer` is wanted again: its memory is handed over as it is, if it is held. 0 or -1. */
int deferred_free_take_back(struct deferred_free *deferred, struct buffer *buffer);
/* `buffer` ends, or is to be taken anew: its memory goes, if it is held. 0 or -1. */
int deferred_free_forget(struct deferred_free *deferred, struct buffer *buffer);
/* without one: no */
bool deferred_free_holds(const struct deferred_free *deferred, const struct buffer *buffer);

#endif
