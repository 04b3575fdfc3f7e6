/* Streams of a step, and the order between them; docs/architecture.md draws both. The CPU has no streams: the
 * handle's operations run one after the other.
 *
 * The reduction's input is allocated on the stream that packs, with one exception: the last input of a
 * backward, often the largest, reuses memory that is idle by then, so that the side stream allocates none for
 * it. The pool provides that memory if it has room and no unit is unsharded, and both unshard streams wait
 * for `reduced` (`scattered` under a hybrid strategy). Otherwise COMPUTE provides it, and waits. An input
 * packed on COMPUTE is freed after COMPUTE has waited in the same way, once it has the gradients of the next
 * unit.
 *
 * [Note: memory of streams] The host frees and reuses memory ahead of the device, so events alone order
 * accesses on the device:
 *   - Unsharded parameters, and reduce-scatter outputs that are reduced again, are held until the stream
 *     that allocated them, and the stream that writes them first, wait for the last use ([Note: deferred
 *     frees] in buffer.h).
 *   - Gradients are held until COMPUTE waits for their packing.
 *   - Other memory of a side stream may be freed at any time: only that stream reuses it, after it waits
 *     for `step_begin` or `received` first.
 *   - Reduced shards that become gradients are allocated on COMPUTE, which waits for the reduction before
 *     they are freed.
 *
 * Invariants: without streams nothing is held and nothing waited for. One reduction at most is in flight, and
 * `reduction` is its state. Inputs of the last all-reduce and of the last optimizer step stay alive until
 * COMPUTE waits for them. */
#ifndef FSDP_RUNTIME_SCHEDULE_H
#define FSDP_RUNTIME_SCHEDULE_H

#include "handle/grads.h"
#include "torch/pool.h"
#include "torch/stream.h"

enum { LIMITER_DEPTH = 2 };

/* Rate limiter: the host enqueues an all-gather only while at most LIMITER_DEPTH frees are pending on the
 * device; limiter.c. Without it the host would run ahead and allocate memory long before earlier units free
 * theirs. Without streams the host never waits. */
struct limiter {
    /* owned; frees that the host has not waited for, the oldest at `first` */
    stream_event frees[LIMITER_DEPTH];
    int first, count;
    int64_t num_frees; /* number of frees since lazy init */
};

/* State of the reduction in flight. */
enum reduction_state { REDUCTION_NONE, REDUCTION_PACKED, REDUCTION_ENQUEUED, REDUCTION_STATES };

/* Streams of a root, and their events. */
struct schedule {
    struct streams streams;
    /* owned; end of the script's work before this step, including the optimizer's */
    stream_event step_begin;
    /* owned; last event of each kind */
    stream_event input_made, received, packed, scattered, all_reduced, joined;
    stream_event reduced;           /* owned; end of the last reduction, NULL until it is waited for */
    stream_event input_allocated;   /* owned; allocation of a last reduction's input from the pool */
    struct deferred_free unsharded; /* deferred free of unsharded storage */
    bool backward_ended;            /* true if a backward has ended since the last step began */
    bool uploading;                 /* true if the host has not waited for the last upload */
    enum reduction_state reduction; /* written by schedule_set_reduction() */
    /* true if the last gradients were packed on POST_BACKWARD */
    bool packs_on_side_stream;
    enum stream_role input_owner; /* stream that allocated the reduction's input */
    /* owned, or NULL; source of that packing, alive until `packed`; memory of COMPUTE */
    PyObject *packed_gradients;
    bool reducing;     /* true if COMPUTE has not waited for the end of the last reduction */
    bool all_reducing; /* true if COMPUTE has not waited for `all_reduced` */
    /* owned, or NULL; input of the last all-reduce, unless it became the gradient */
    PyObject *scattered_output;
    /* owned, or NULL; gradient of the last optimizer step, alive until `reduced` or `all_reduced`; memory of
     * COMPUTE */
    PyObject *stepped_gradient;
    struct pool pool;
    struct limiter limiter;
};

/* Event of a unit's last all-gather. */
struct unshard_mark {
    stream_event gathered; /* owned; end of the all-gather */
    bool pending;          /* true if COMPUTE has not waited for the all-gather */
};

void limiter_fini(struct limiter *limiter, struct streams *streams);
/* Call before a unit's all-gather. 0 or -1. */
int limiter_wait(struct limiter *limiter, struct streams *streams);
/* Call after a unit's storage was freed; `last_use` is the event that its deferred free recorded. */
void limiter_add_free(struct limiter *limiter, struct streams *streams, stream_event last_use);

int schedule_init(struct schedule *schedule, PyObject *device); /* 0 or -1 */
void schedule_fini(struct schedule *schedule);

/* Write `reduction`; the only function that does. Return 0, or -1 with RuntimeError that names the unit of
 * `param` and both states. */
int schedule_set_reduction(struct schedule *schedule, enum reduction_state state,
                           const struct flat_param *param);
void schedule_check(const struct schedule *schedule); /* assert the invariant under FSDP_C_CHECK */

/* ---- unshard. Each `end` takes the result of the work since the stream was entered. Return 0, or -1 with an
 * exception ---- */

/* Order the unshards of this step after the script's work. */
int schedule_begin_step(struct schedule *schedule);
/* End the work on PRE_UNSHARD that makes the input of an all-gather, and enter UNSHARD again. */
int schedule_end_pre_unshard(struct schedule *schedule, bool uploads, int result);
int schedule_end_unshard(struct schedule *schedule, struct unshard_mark *mark, int result); /* on UNSHARD */
/* Make COMPUTE wait for the all-gather. */
int schedule_wait_unshard(struct schedule *schedule, struct unshard_mark *mark);

/* ---- reductions. Return 0, or -1 with an exception ---- */

/* Pack the gradients. `owner` is the stream to allocate the input on if another stream than COMPUTE packs:
 * POST_BACKWARD, COMPUTE, or UNSHARD for the pool, in which no unit is unsharded then. */
int schedule_pack(struct schedule *schedule, struct grads *grads, enum stream_role owner);
/* Enqueue the reduction of the packed input. */
int schedule_reduce(struct schedule *schedule, struct grads *grads);
int schedule_finish_reduction(struct schedule *schedule, struct grads *grads);
/* Make COMPUTE wait for all finished reductions. */
int schedule_wait_reduced(struct schedule *schedule);

/* ---- optimizers that step in a backward, on the stream of the finished reduction. `gradient` is theirs, or
 * NULL. Return 0, or -1 with an exception ---- */

int schedule_begin_stepping(struct schedule *schedule, const struct grads *grads);
int schedule_end_stepping(struct schedule *schedule, const struct grads *grads, PyObject *gradient,
                          int result);

/* ---- end of a step. Return 0, or -1 with an exception ---- */

int schedule_synchronize(struct schedule *schedule); /* make the host wait for COMPUTE */
/* End a step: release all held storage, and wait for uploads, so that the host may write their source. */
int schedule_flush(struct schedule *schedule);
/* Flush, and make the stream that waits for the backward wait for COMPUTE. */
int schedule_end_backward(struct schedule *schedule);

#endif
