/* What the user did to a unit's parameters and gradients between steps, and is taken over before the next
 * gather (C-130 to C-136).
 *
 * Invariant: after handle_writeback the Parameters that modules show lie in the shard, and are the objects in
 * `params`; after handle_collect_user_grads the flat parameter's gradient is made of theirs.
 * Both are taken over only while the storage is SHARDED, and what was written to views only while it is
 * UNSHARDED. */
#ifndef FSDP_HANDLE_WRITEBACK_H
#define FSDP_HANDLE_WRITEBACK_H

#include <stdbool.h>
#include <stdint.h>

struct handle;

struct writeback {
    /* since writeback_pop_copied: some were copied, on the stream that was current, or the shard is another
     * one */
    bool copied;
    int64_t next_outside_shard; /* the parameter outside the shard that was looked at last */
    bool forward_writes;        /* some forward has written in place to parameters */
    /* without gradients and with them: see [Note: writes in a forward] in writeback.c */
    int64_t num_forwards[2];
};

void writeback_check(const struct handle *handle); /* the invariant, where FSDP_C_CHECK is defined */

void writeback_mark_copied(struct handle *handle);
bool writeback_pop_copied(struct handle *handle); /* were some copied since the last call? */
/* see [Note: another shard]. 1: there is another, which the handle does not follow yet. 0 or -1 */
int writeback_replace_shard(struct handle *handle);
/* in place to parameters, as far as they leave a trace, and those replaced; or -1 */
int64_t writeback_count_writes(const struct handle *handle);
/* RuntimeError for data where this rank holds nothing. 0 or -1 */
int writeback_check_params_outside_shard(struct handle *handle);
/* AssertionError for a view replaced while the storage stays unsharded. 0 or -1 */
int writeback_check_views(struct handle *handle);

#endif
