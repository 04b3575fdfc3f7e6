/* What the user did to a unit's parameters and gradients between steps, and is taken over before the next
 * gather (C-130 to C-136).
 *
 * Invariant: after handle_writeback the Parameters that modules show lie in the shard, and are the objects in
 * `params`; after writeback_collect_grads the flat parameter's gradient is made of theirs.
 * Both are taken over only while the storage is SHARDED, and what was written to views only while it is
 * UNSHARDED. */
#ifndef FSDP_HANDLE_WRITEBACK_H
#define FSDP_HANDLE_WRITEBACK_H

#include "handle/gradients.h"
#include "handle/param_views.h"

struct writeback {
    const struct flat_param *param;        /* borrowed, as all of these */
    const struct storage *storage;         /* what was edited belongs here */
    const struct param_views *param_views; /* what was edited is found here */
    struct gradients *gradients;
    const enum training_state *use; /* who is using the unit, for messages */

    /* since writeback_take_copied: some were copied, on the stream that was current, or the shard is another
     * one */
    bool copied;
    int64_t unheld_turn; /* the parameter outside the shard that was looked at last */
    bool forward_writes; /* some forward has written in place to parameters */
    /* without gradients and with them: see [Note: writes in a forward] in writeback.c */
    int64_t num_forwards[2];
};

void writeback_check(const struct writeback *writeback); /* the invariant, where FSDP_C_CHECK is defined */

static inline void writeback_note_copied(struct writeback *writeback) {
    writeback->copied = true;
}

/* Were some copied since the last call? */
static inline bool writeback_take_copied(struct writeback *writeback) {
    bool copied = writeback->copied;
    writeback->copied = false;
    return copied;
}

/* writeback.c. 0 or -1 */
/* 1: sharded parameters, or their data, were replaced. An error comes before anything is taken over. */
int writeback_find_replaced(struct writeback *writeback);
/* these go into `shard`, a copy of the shard: see [Note: another shard] in handle.c */
int writeback_take_over_params(struct writeback *writeback, PyObject *shard);
/* so does what was written to the views of what is gathered. 1: something was, `*last` the last parameter */
int writeback_take_over_views(struct writeback *writeback, int64_t *last);
int writeback_take_over_writes(struct writeback *writeback); /* the same, at the end of a forward */
/* in place to parameters, as far as they leave a trace, and those replaced; or -1 */
int64_t writeback_count_writes(const struct writeback *writeback);
/* RuntimeError for data where this rank holds nothing */
int writeback_check_unheld(struct writeback *writeback);
/* AssertionError for a view replaced while the storage stays unsharded */
int writeback_check_views(struct writeback *writeback);

/* what the user zeroed or replaced; a no-op amid a backward */
int writeback_collect_grads(struct writeback *writeback);

#endif
