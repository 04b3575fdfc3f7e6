/* Packing and reduction of one flat parameter after the other, with at most one in flight, and of optional
 * units with their enclosing unit. */
#include "runtime/callbacks.h"
#include "runtime/runtime.h"

/* Return the stream to allocate a reduction's input on: see schedule.h. The last reduction of a backward,
 * usually the root's, uses memory that is idle by then. */
static enum stream_role owner_of_input(const struct runtime *runtime, const struct grads *grads) {
    bool is_any_unsharded = false;
    FOR_EACH_UNIT(unit, runtime) {
        if (!unit->handle)
            continue;
        if (unit->needs_pre_backward_unshard || unit->handle->training_state == USE_BACKWARD_PRE)
            return STREAM_POST_BACKWARD; /* more gradients will follow; the loop ends early, at the root */
        is_any_unsharded = is_any_unsharded || unit->handle->storage.copy->full.allocated;
    }
    bool has_room = pool_arena_fits(&runtime->schedule.pool, grads_reduce_input_nbytes(grads));
    return has_room && !is_any_unsharded ? STREAM_UNSHARD : STREAM_COMPUTE;
}

/* ---- optimizers in a backward ---- */

int unit_wait_step(struct unit *part) {
    bool stepping = part->stepping;
    part->stepping = false;
    return stepping ? schedule_wait_reduced(&part->runtime->schedule) : 0;
}

/* Run the unit's optimizers as soon as its gradient is reduced. */
static int step_in_backward(struct unit *unit) {
    struct schedule *schedule = &unit->runtime->schedule;
    struct grads *grads = &unit->handle->grads;
    int has_autograd_grads = grads_add_from_autograd(grads, NULL);
    if (has_autograd_grads < 0)
        return -1;
    unit->stepping = true;
    if (has_autograd_grads) /* autograd has accumulated gradients on COMPUTE */
        return schedule_wait_reduced(schedule) < 0 || grads_expose(grads) < 0
                   ? -1
                   : callbacks_call(callbacks.step_in_backward, unit->handle_object, NULL);
    OWNED *gradient = Py_XNewRef(grads->saved_shard);
    if (schedule_begin_stepping(schedule, grads) < 0)
        return -1;
    int result = grads_expose(grads);
    if (!result)
        result = callbacks_call(callbacks.step_in_backward, unit->handle_object, NULL);
    return schedule_end_stepping(schedule, grads, gradient, result);
}

/* ---- one reduction ---- */

int runtime_finish_reduction(struct runtime *runtime) {
    struct unit *unit = runtime->reducing;
    runtime->reducing = NULL;
    if (!unit)
        return 0;
    {
        TRACE(TRACED_REDUCTION, unit->name_index);
        if (schedule_finish_reduction(&runtime->schedule, &unit->handle->grads) < 0)
            return unit_explain_failure(unit, TRACED_REDUCTION, true);
    }
    return unit->handle->optimizer_in_backward ? step_in_backward(unit) : 0;
}

int runtime_reduce_part(struct unit *part) {
    struct runtime *runtime = part->runtime;
    struct grads *grads = &part->handle->grads;
    if (runtime_finish_reduction(runtime) < 0 || grads_receive_zeros(grads) < 0)
        return -1;
    if (schedule_pack(&runtime->schedule, grads, owner_of_input(runtime, grads)) < 0)
        return unit_explain_failure(part, TRACED_REDUCTION, false);
    runtime->reducing = part;
    if (schedule_reduce(&runtime->schedule, grads) < 0)
        return unit_explain_failure(part, TRACED_REDUCTION, false);
    return 0;
}

/* ---- optional units ---- */

static int reduce_optional_flat_param(struct unit *part) {
    struct handle *handle = part->handle;
    part->optional.unreduced = false;
    if (handle_set_training_state(handle, USE_BACKWARD_POST) < 0 || grads_begin_backward(&handle->grads) < 0)
        return -1;
    return runtime_reduce_part(part);
}

/* Reduce all trainable optional units, run or not: another rank may have run the unit. */
int optional_reduce(struct unit *enclosing) {
    if (optional_end_backward(enclosing) < 0)
        return -1;
    for (struct unit *unit = enclosing->optional.first; unit; unit = unit->optional.next)
        FOR_EACH_FLAT_PARAM(part, unit) {
            if (!part->optional.trainable)
                continue;
            if (!part->sync_gradients)
                part->optional.unreduced = true;
            else if (reduce_optional_flat_param(part) < 0)
                return -1;
        }
    return 0;
}

int optional_reduce_all(struct runtime *runtime) {
    for (int64_t i = 0; i < runtime->num_units && runtime->callback_queued; i++) {
        struct unit *unit = runtime->units[i];
        if (unit->optional.reached && optional_reduce(unit) < 0)
            return -1;
        /* the backward has not reached the enclosing unit */
        bool unreduced = !runtime->num_in_forward && unit->optional.unreduced && unit->sync_gradients;
        if (unreduced && reduce_optional_flat_param(unit) < 0)
            return -1;
    }
    return runtime_finish_reduction(runtime);
}
