/* Which stream does what, and in which order. On the CPU there are no streams, and only the handle's verbs
 * remain. A stream waits for an event at |wait event|, and records it at |event|.
 *
 *   PRE_UNSHARD    |wait step_begin| upload, cast |input_made|
 *   UNSHARD        |wait step_begin, input_made| all-gather |gathered|
 *   COMPUTE        |wait gathered| forward ... backward |received| backward of the next |wait packed| free
 *   POST_BACKWARD  |wait received| pack |packed| reduce, post-divide |reduced|
 *
 * Computation waits for `reduced` at the end of the backward. Gradients that are a sum over several
 * contributions, and those that are not sharded, are packed on the compute stream, which records `received`
 * after that. Once it has the gradients of the next unit, the compute stream waits for `reduced` (`scattered`
 * below), and the input of the reduction is released. The input of a backward's last reduction, often the
 * largest, is memory that is free by then, so that the side stream never needs any for it: of the pool, if
 * nothing gathered is left in it and it has room, and both streams of the gathers wait for `reduced` (or
 * `scattered`); else of the compute stream, which waits.
 *
 * Optimizers that step in a backward do so on the stream of the unit's reduction, which is over after that.
 *
 * The first and the second half of a hybrid strategy's reduction pass each other:
 *
 *   POST_BACKWARD  |wait received| pack |packed| reduce-scatter |scattered|
 *   ALL_REDUCE     |wait scattered| all-reduce, post-divide |all_reduced|
 *   COMPUTE        ... |wait all_reduced| at the end
 *
 * Memory is given back and taken again by the host, which runs ahead, so the order on the device is kept by
 * events alone: what is gathered is held until the stream that took the memory, and the one that first writes
 * to it, wait for its last use ([Note: deferred frees] in buffer.h), and so is the output of a reduce-scatter
 * that is reduced again; gradients are held until the compute stream waits for their packing; what a side
 * stream allocated is freed by anybody, as it is taken again on that stream alone, which waits for step_begin
 * or received first. Reduced shards that end as gradients are the compute stream's, which waits for them
 * before anybody frees them.
 *
 * Invariants: without streams nothing is held and nothing waited for. At most one reduction is on its way,
 * and `reduction` says how far it has come. What the last all-reduce was of is kept until computation waits
 * for it, and so is what the last step was with. */
#ifndef FSDP_RUNTIME_SCHEDULE_H
#define FSDP_RUNTIME_SCHEDULE_H

#include "handle/grads.h"
#include "runtime/limiter.h"
#include "torch/pool.h"
#include "torch/stream.h"

/* How far the one reduction has come that is on its way. */
enum reduction_state { REDUCTION_NONE, REDUCTION_PACKED, REDUCTION_ENQUEUED, REDUCTION_STATES };

/* One root's streams and the points that others wait for. */
struct schedule {
    struct streams streams;
    /* owned; what the script enqueued before this step, the optimizer's work included */
    stream_event step_begin;
    /* owned; the last of each */
    stream_event input_made, received, packed, scattered, reduced, all_reduced, joined;
    stream_event input_taken;       /* owned; of a last reduction, from the pool */
    struct deferred_free unsharded; /* of gathers */
    bool backward_ended;            /* a backward has ended since the last of them began */
    bool uploading;                 /* the host has not waited for what reads its memory */
    enum reduction_state reduction; /* written by schedule_set_reduction() */
    /* the last unit's gradients were packed on the stream that reduces them */
    bool packs_on_side_stream;
    enum stream_role input_owner; /* whose memory is what they were packed into */
    /* owned; what is packed there up to `packed`, memory of the compute stream; or NULL */
    PyObject *packed_gradients;
    bool reducing;     /* the compute stream has not waited for `reduced` */
    bool all_reducing; /* nor for `all_reduced` */
    /* owned; what the all-reduce before `all_reduced` was of, unless it is kept; or NULL */
    PyObject *scattered_output;
    /* owned; the gradient that optimizers step with up to `reduced` or `all_reduced`, memory of the compute
     * stream; or NULL */
    PyObject *stepped_gradient;
    struct pool pool;
    struct limiter limiter;
};

/* What is kept of a unit's last all-gather. */
struct unshard_mark {
    stream_event gathered; /* owned; its end */
    bool pending;          /* computation has not waited for it */
};

int schedule_init(struct schedule *schedule, PyObject *device); /* 0 or -1 */
void schedule_fini(struct schedule *schedule);

/* The only writer of `reduction`. 0, or -1 with RuntimeError naming the unit, which is `param`'s,
 * and both states. */
int schedule_set_reduction(struct schedule *schedule, enum reduction_state state,
                           const struct flat_param *param);
void schedule_check(const struct schedule *schedule); /* the invariant, where FSDP_C_CHECK is defined */
/* nothing is on its way, and nothing is held back */
bool schedule_is_flushed(const struct schedule *schedule);

/* ---- gathers. 0 or -1; what `begin` began is ended by `end`, with the result of what was enqueued between
 * them ---- */

/* a gather of this step sees what the script did before it */
int schedule_begin_step(struct schedule *schedule);
int schedule_begin_pre_unshard(struct schedule *schedule); /* amid a gather: what it reads */
int schedule_end_pre_unshard(struct schedule *schedule, bool uploads, int result);
int schedule_begin_unshard(struct schedule *schedule); /* an all-gather */
int schedule_end_unshard(struct schedule *schedule, struct unshard_mark *mark, int result);
/* computation waits for it */
int schedule_wait_unshard(struct schedule *schedule, struct unshard_mark *mark);
/* In backward: what was freed last is the next gather's, which waits for its last use. A forward's gather
 * does not: it would wait for the forward before it. */
int schedule_release_deferred(struct schedule *schedule);

void schedule_drop_mark(struct schedule *schedule, struct unshard_mark *mark); /* the unit leaves its root */

/* ---- reductions. 0 or -1 ---- */

/* What they are packed into is memory of the stream that packs, or where that is another one, of `owner`: of
 * the compute stream, or of what is gathered, none of which is in use then. */
int schedule_pack(struct schedule *schedule, struct grads *grads, enum stream_role owner);
int schedule_reduce(struct schedule *schedule, struct grads *grads); /* enqueue what was packed */
int schedule_finish_reduction(struct schedule *schedule, struct grads *grads);
/* computation waits for all that was finished */
int schedule_wait_reduced(struct schedule *schedule);

/* ---- a unit's optimizers step on the stream that has finished its reduction. `gradient` is what they step
 * with, or NULL. 0 or -1 ---- */

int schedule_begin_stepping(struct schedule *schedule, const struct grads *grads);
int schedule_end_stepping(struct schedule *schedule, const struct grads *grads, PyObject *gradient,
                          int result);

/* ---- ends. 0 or -1 ---- */

int schedule_synchronize(struct schedule *schedule); /* the host waits for all computation enqueued */
/* The step is over: no storage is held back, and the host may write what was gathered from its memory. */
int schedule_flush(struct schedule *schedule);
/* the same, and the stream that waits for the backward sees it all */
int schedule_end_backward(struct schedule *schedule);
/* after an exception: computation comes after whatever was enqueued */
int schedule_join(struct schedule *schedule);

#endif
