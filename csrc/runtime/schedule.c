#include "runtime/schedule.h"

#include "torch/ref.h"

#include "base/check.h"

int schedule_init(struct schedule *schedule, PyObject *device) {
    schedule->unsharded = (struct deferred_free){.streams = &schedule->streams,
                                                 .owner = STREAM_UNSHARD,
                                                 .writer = STREAM_PRE_UNSHARD,
                                                 .user = STREAM_COMPUTE};
    return streams_init(&schedule->streams, device) < 0 ? -1 : pool_init(&schedule->pool, device);
}

void schedule_fini(struct schedule *schedule) {
    struct streams *streams = &schedule->streams;
    stream_event *events[] = {
        &schedule->step_begin,      &schedule->input_made,        &schedule->received,    &schedule->packed,
        &schedule->scattered,       &schedule->reduced,           &schedule->all_reduced, &schedule->joined,
        &schedule->input_allocated, &schedule->unsharded.last_use};
    for (size_t i = 0; i < sizeof events / sizeof *events; i++)
        stream_event_destroy(streams, events[i]);
    limiter_fini(&schedule->limiter, streams);
    Py_CLEAR(schedule->scattered_output);
    Py_CLEAR(schedule->packed_gradients);
    Py_CLEAR(schedule->stepped_gradient);
    streams_fini(streams);
    pool_fini(&schedule->pool);
}

/* Leave the stream that stream_enter entered. Record `*mark`, if given, unless `result` is an error. */
static int leave(struct schedule *schedule, enum stream_role role, stream_event *mark, int result) {
    if (!result && mark)
        result = stream_record(&schedule->streams, role, mark);
    return stream_leave(&schedule->streams) < 0 ? -1 : result;
}

/* ---- unshard ---- */

/* Make both unshard streams wait: PRE_UNSHARD is the first to write memory of UNSHARD. */
static int all_gathers_wait(struct schedule *schedule, stream_event event) {
    struct streams *streams = &schedule->streams;
    return stream_wait(streams, STREAM_PRE_UNSHARD, event) < 0 ? -1
                                                               : stream_wait(streams, STREAM_UNSHARD, event);
}

int schedule_begin_step(struct schedule *schedule) {
    struct streams *streams = &schedule->streams;
    schedule->backward_ended = false;
    if (stream_follow(streams) < 0 || stream_record(streams, STREAM_COMPUTE, &schedule->step_begin) < 0)
        return -1;
    return all_gathers_wait(schedule, schedule->step_begin);
}

int schedule_end_pre_unshard(struct schedule *schedule, bool uploads, int result) {
    struct streams *streams = &schedule->streams;
    if (!result)
        result = stream_record(streams, STREAM_PRE_UNSHARD, &schedule->input_made);
    if (!result)
        result = stream_wait(streams, STREAM_UNSHARD, schedule->input_made);
    if (stream_enter(streams, STREAM_UNSHARD) < 0 || result < 0)
        return -1;
    schedule->uploading = schedule->uploading || (uploads && streams_are_real(streams));
    return 0;
}

int schedule_end_unshard(struct schedule *schedule, struct unshard_mark *mark, int result) {
    result = leave(schedule, STREAM_UNSHARD, &mark->gathered, result);
    mark->pending = !result;
    return result;
}

int schedule_wait_unshard(struct schedule *schedule, struct unshard_mark *mark) {
    bool pending = mark->pending;
    mark->pending = false;
    return pending ? stream_wait(&schedule->streams, STREAM_COMPUTE, mark->gathered) : 0;
}

/* ---- state of the reduction ---- */

static const bool reduction_allowed[REDUCTION_STATES][REDUCTION_STATES] = {
    [REDUCTION_NONE] = {[REDUCTION_NONE] = true, /* an exception */
                        [REDUCTION_PACKED] = true},
    [REDUCTION_PACKED] = {[REDUCTION_ENQUEUED] = true, [REDUCTION_NONE] = true /* an exception */},
    [REDUCTION_ENQUEUED] = {[REDUCTION_NONE] = true}, /* finished, or an exception */
};

static const char *const reduction_names[REDUCTION_STATES] = {"REDUCTION_NONE", "REDUCTION_PACKED",
                                                              "REDUCTION_ENQUEUED"};

int schedule_set_reduction(struct schedule *schedule, enum reduction_state state,
                           const struct flat_param *param) {
    if (!reduction_allowed[schedule->reduction][state])
        return flat_param_refuse(param, reduction_names[schedule->reduction], reduction_names[state], "");
    schedule->reduction = state;
    CHECKED(schedule_check(schedule));
    return 0;
}

/* ---- packing ---- */

/* Release the previous unit's unpacked gradients. COMPUTE waits for their packing, then the memory can be
 * reused. */
static int release_packed(struct schedule *schedule) {
    if (!schedule->packed_gradients)
        return 0;
    int result = stream_wait(&schedule->streams, STREAM_COMPUTE, schedule->packed);
    Py_CLEAR(schedule->packed_gradients);
    return result;
}

static int record_received(struct schedule *schedule, struct grads *grads) {
    if (grads_alloc_output(grads) < 0 ||
        stream_record(&schedule->streams, STREAM_COMPUTE, &schedule->received) < 0)
        return -1;
    return stream_wait(&schedule->streams, STREAM_POST_BACKWARD, schedule->received);
}

/* Allocate the reduction's input on UNSHARD, in the pool. Torch fills new memory in deterministic mode: the
 * packing waits for that. */
static int alloc_input_from_pool(struct schedule *schedule, struct grads *grads) {
    struct streams *streams = &schedule->streams;
    if (stream_enter(streams, STREAM_UNSHARD) < 0)
        return -1;
    int result = pool_enter(&schedule->pool) < 0 ? -1 : grads_alloc_reduce_input(grads);
    if (pool_leave(&schedule->pool) < 0)
        result = -1;
    if (leave(schedule, STREAM_UNSHARD, &schedule->input_allocated, result) < 0)
        return -1;
    return stream_wait(streams, STREAM_POST_BACKWARD, schedule->input_allocated);
}

static int pack_on_side_stream(struct schedule *schedule, struct grads *grads) {
    if (release_packed(schedule) < 0)
        return -1;
    /* The pool may fail: torch's allocator before 2.13 releases no cached memory of other pools there; then
     * COMPUTE allocates. */
    if (schedule->input_owner == STREAM_UNSHARD && alloc_input_from_pool(schedule, grads) < 0) {
        if (!PyErr_ExceptionMatches(PyExc_RuntimeError))
            return -1;
        PyErr_Clear();
        schedule->input_owner = STREAM_COMPUTE;
    }
    if (schedule->input_owner == STREAM_COMPUTE && grads_alloc_reduce_input(grads) < 0)
        return -1;
    if (record_received(schedule, grads) < 0 || stream_enter(&schedule->streams, STREAM_POST_BACKWARD) < 0)
        return -1;
    int result = grads_pack_on_side_stream(grads, &schedule->packed_gradients);
    return leave(schedule, STREAM_POST_BACKWARD, &schedule->packed, result);
}

int schedule_pack(struct schedule *schedule, struct grads *grads, enum stream_role owner) {
    /* COMPUTE adds up several contributions */
    schedule->packs_on_side_stream =
        streams_are_real(&schedule->streams) && grads->param->sharded && !grads->unsharded && !grads->sum;
    schedule->input_owner = schedule->packs_on_side_stream ? owner : STREAM_COMPUTE;
    if ((schedule->packs_on_side_stream ? pack_on_side_stream(schedule, grads) : grads_pack(grads)) < 0)
        return -1;
    return schedule_set_reduction(schedule, REDUCTION_PACKED, grads->param);
}

/* ---- reduction ---- */

int schedule_reduce(struct schedule *schedule, struct grads *grads) {
    if ((!schedule->packs_on_side_stream && record_received(schedule, grads) < 0) ||
        stream_enter(&schedule->streams, STREAM_POST_BACKWARD) < 0)
        return -1;
    int result = grads_reduce(grads);
    stream_event *scattered = grads_reduce_twice(grads) ? &schedule->scattered : NULL;
    if (schedule->input_owner == STREAM_POST_BACKWARD) /* the memory is reused on the same stream */
        grads_release_reduce_input(grads);
    if (leave(schedule, STREAM_POST_BACKWARD, scattered, result) < 0)
        return -1;
    return schedule_set_reduction(schedule, REDUCTION_ENQUEUED, grads->param);
}

/* Free the previous output once the stream that allocated it waits for the all-reduce. */
static int release_scattered_output(struct schedule *schedule) {
    if (!schedule->scattered_output)
        return 0;
    int result = stream_wait(&schedule->streams, STREAM_POST_BACKWARD, schedule->all_reduced);
    Py_CLEAR(schedule->scattered_output);
    return result;
}

/* Record the end of the last reduction on POST_BACKWARD, unless recorded: most reductions are not waited
 * for. */
static int record_reduced(struct schedule *schedule) {
    return schedule->reduced ? 0
                             : stream_record(&schedule->streams, STREAM_POST_BACKWARD, &schedule->reduced);
}

static int wait_for_reduction(struct schedule *schedule) {
    bool reducing = schedule->reducing;
    schedule->reducing = false;
    if (release_packed(schedule) < 0 || (reducing && record_reduced(schedule) < 0))
        return -1;
    return reducing ? stream_wait(&schedule->streams, STREAM_COMPUTE, schedule->reduced) : 0;
}

/* Return the stream of the reduction's last step. */
static enum stream_role finishes_on(const struct schedule *schedule, const struct grads *grads) {
    bool is_hybrid = streams_are_real(&schedule->streams) && grads_reduce_twice(grads);
    return is_hybrid ? STREAM_ALL_REDUCE : STREAM_POST_BACKWARD;
}

int schedule_finish_reduction(struct schedule *schedule, struct grads *grads) {
    struct streams *streams = &schedule->streams;
    enum stream_role role = finishes_on(schedule, grads);
    bool is_hybrid = role == STREAM_ALL_REDUCE;
    if (schedule->stepped_gradient && schedule_wait_reduced(schedule) < 0)
        return -1; /* the wait must precede this reduction, which overwrites the events */
    if (is_hybrid && (release_scattered_output(schedule) < 0 ||
                      stream_wait(streams, STREAM_ALL_REDUCE, schedule->scattered) < 0))
        return -1;
    if (stream_enter(streams, role) < 0)
        return -1;
    int result = 0;
    if (grads->work)
        result = grads_wait_reduce(grads) < 0 ? -1 : grads_save_reduced(grads);
    if (result < 0)
        grads_reduce_release(grads);
    if (leave(schedule, role, is_hybrid ? &schedule->all_reduced : NULL, result) < 0)
        return -1;
    if (is_hybrid) {
        schedule->all_reducing = true;
        schedule->scattered_output = grads_take_reduce_output(grads);
    } else {
        schedule->reducing = streams_are_real(streams);
        stream_event_destroy(streams, &schedule->reduced);
    }
    /* make the streams that allocated the input wait for its readers */
    if (schedule->input_owner == STREAM_UNSHARD) {
        if ((!is_hybrid && record_reduced(schedule) < 0) ||
            all_gathers_wait(schedule, is_hybrid ? schedule->scattered : schedule->reduced) < 0)
            return -1;
    } else if (schedule->input_owner == STREAM_COMPUTE) {
        if ((is_hybrid ? stream_wait(streams, STREAM_COMPUTE, schedule->scattered)
                       : wait_for_reduction(schedule)) < 0)
            return -1;
    }
    grads_reduce_release(grads);
    return schedule_set_reduction(schedule, REDUCTION_NONE, grads->param);
}

/* The input of the last all-reduce is freed even if the wait fails. */
int schedule_wait_reduced(struct schedule *schedule) {
    if (wait_for_reduction(schedule) < 0)
        return -1;
    int result =
        schedule->all_reducing ? stream_wait(&schedule->streams, STREAM_COMPUTE, schedule->all_reduced) : 0;
    if (release_scattered_output(schedule) < 0)
        result = -1;
    schedule->all_reducing = false;
    Py_CLEAR(schedule->stepped_gradient);
    return result;
}

/* ---- optimizer steps in a backward ---- */

int schedule_begin_stepping(struct schedule *schedule, const struct grads *grads) {
    return stream_enter(&schedule->streams, finishes_on(schedule, grads));
}

int schedule_end_stepping(struct schedule *schedule, const struct grads *grads, PyObject *gradient,
                          int result) {
    enum stream_role role = finishes_on(schedule, grads);
    bool is_hybrid = role == STREAM_ALL_REDUCE;
    if (streams_are_real(&schedule->streams)) {
        *(is_hybrid ? &schedule->all_reducing : &schedule->reducing) = true;
        ref_set(&schedule->stepped_gradient, Py_XNewRef(gradient));
    }
    return leave(schedule, role, is_hybrid ? &schedule->all_reduced : &schedule->reduced, result);
}

/* ---- end of a step ---- */

/* Waiting for COMPUTE suffices, as COMPUTE has waited for all all-gathers, and each all-gather for its
 * input. */
int schedule_synchronize(struct schedule *schedule) {
    struct streams *streams = &schedule->streams;
    schedule->uploading = false;
    if (stream_record(streams, STREAM_COMPUTE, &schedule->joined) < 0)
        return -1;
    return stream_synchronize(streams, schedule->joined);
}

int schedule_flush(struct schedule *schedule) {
    int result = schedule_wait_reduced(schedule);
    if (!result && schedule->uploading) {
        schedule->uploading = false;
        result = stream_synchronize(&schedule->streams, schedule->input_made);
    }
    return deferred_free_flush(&schedule->unsharded) < 0 ? -1 : result;
}

/* The script may call a backward under another stream than the forward. */
int schedule_end_backward(struct schedule *schedule) {
    struct streams *streams = &schedule->streams;
    if (schedule_flush(schedule) < 0 || stream_follow(streams) < 0 || stream_join_former(streams) < 0 ||
        stream_end_backward(streams) < 0)
        return -1;
    schedule->backward_ended = true;
    return 0;
}

/* ---- the invariant ---- */

void schedule_check(const struct schedule *schedule) {
    INVARIANT(streams_are_real(&schedule->streams) ||
              (!schedule->limiter.count && !schedule->packs_on_side_stream && !schedule->packed_gradients &&
               !schedule->reducing && !schedule->all_reducing && !schedule->stepped_gradient &&
               !schedule->uploading && !schedule->unsharded.held));
    INVARIANT(schedule->limiter.count >= 0 && schedule->limiter.count <= LIMITER_DEPTH);
    INVARIANT(schedule->all_reducing || !schedule->scattered_output);
}
