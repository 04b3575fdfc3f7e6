/* Steps of a tree without its tensors, its modules and its device: what the runtime would gather, and what
 * memory it would take and give back, in which order. For whoever plans a model that may not even fit.
 *
 * The runtime decides, by its own functions (lifetime.c, gather.c, runtime.c), on units whose memory is a
 * size alone: no all-gather is enqueued, and what resizes a storage is told. In the place of a model and of
 * autograd stands this: each unit runs once; it computes with its own parameters, then runs the units inside,
 * in the order in which their modules are registered, and returns what the last of them returned; nothing is
 * recomputed, and the backward passes through all of it. So the post-backward of a unit comes after those of
 * the units inside.
 *
 * Invariant: nothing of the process is touched: no counter of live bytes, no table of operations, nobody's
 * units. */
#ifndef FSDP_RUNTIME_DRY_RUN_H
#define FSDP_RUNTIME_DRY_RUN_H

#include "runtime/runtime.h"

struct dry_unit {
    /* index of the unit around it, or whose segment it is; less than its own; -1 for the root, the first */
    int64_t parent;
    /* of its unsharded parameters; 0 under NO_SHARD where the shard itself is computed with */
    int64_t nbytes;
    /* of what the rank keeps of these for the backward; 0 where that gathers over all ranks */
    int64_t node_nbytes;
    enum sharding_strategy strategy;
    enum backward_prefetch backward_prefetch;
    bool forward_prefetch, has_params, is_trainable, is_segment;
    bool is_optional;      /* it is gathered with the unit around it that is not; it runs as all do */
    int64_t reduce_nbytes; /* of its gradients before they are reduced to a shard; 0 where none are */
};

struct dry_tree {
    const struct dry_unit *units; /* borrowed */
    int64_t num_units;            /* at least one */
    int64_t backward_prefetch_limit, forward_prefetch_limit;
    bool has_streams; /* the ranks will compute on a GPU */
    bool inputs_require_grad;
};

enum dry_event {
    /* the unit's all-gather; where nothing is taken for it, into memory that was held back for it */
    DRY_RUN_GATHER,
    DRY_RUN_TAKE,           /* memory for the unit */
    DRY_RUN_GIVE_BACK,      /* which other units may take from now on */
    DRY_RUN_GROW,           /* memory that is taken in one piece and given back at once: the root's */
    DRY_RUN_GATHER_IN_NODE, /* the unit's all-gather of what the ranks of the node keep */
    DRY_RUN_KEEP,           /* the unit's part of that */
    DRY_RUN_FORGET,
};

/* Lazy initialisation and one step for each of `sync_gradients`, false where it runs under no_sync(). New
 * reference to a list of lists of (enum dry_event, index of the unit, bytes): what is reserved, then for each
 * step a forward, a backward and its end. NULL with an exception. */
PyObject *dry_run_steps(const struct dry_tree *tree, const bool *sync_gradients, int64_t num_steps);

#endif
