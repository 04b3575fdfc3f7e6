/* Writeback: user edits of parameters and gradients between steps, applied to the shard and the flat gradient
 * before the next unshard.
 *
 * Invariant: after handle_writeback the exposed Parameters point into the shard and are the objects in
 * `params`. After handle_collect_user_grads the flat gradient contains the parameters' gradients. Replaced
 * Parameters are written back while SHARDED, in-place writes to views while UNSHARDED. */
#ifndef FSDP_HANDLE_WRITEBACK_H
#define FSDP_HANDLE_WRITEBACK_H

#include <stdbool.h>
#include <stdint.h>

struct handle;

struct writeback {
    /* true if the shard was written on the current stream, or replaced, since the last
     * writeback_pop_copied */
    bool copied;
    int64_t next_outside_shard; /* index of the last parameter outside the shard whose data was checked */
    bool forward_writes;        /* true if some forward has written to its parameters in place */
    /* number of forwards with and without gradients: see [Note: writes in a forward] in writeback.c */
    int64_t num_forwards[2];
};

void writeback_mark_copied(struct handle *handle);
bool writeback_pop_copied(struct handle *handle); /* return and clear `copied` */
/* Write replaced Parameters to a new shard: see [Note: another shard]. Return 1 if the shard was replaced, in
 * which case the caller calls handle_follow_flat_param; 0 if not, -1 with an exception. */
int writeback_replace_shard(struct handle *handle);
/* Return the number of visible writes to parameters, in-place writes and replaced Parameters alike; or -1. */
int64_t writeback_count_writes(const struct handle *handle);
/* Raise RuntimeError if a parameter outside this rank's shard was given data. Return 0 or -1. */
int writeback_check_params_outside_shard(struct handle *handle);
/* Raise AssertionError if a view was replaced while the storage stays unsharded. Return 0 or -1. */
int writeback_check_views(struct handle *handle);

#endif
