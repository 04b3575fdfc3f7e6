/* The gradients of one unit are packed and reduced: at most one reduction is on its way. */
#include "runtime/callbacks.h"
#include "runtime/runtime.h"

/* Mostly the root is found at once, which is the first of the units and the last in backward: its gradients
 * are still to come. */
static bool is_last(const struct runtime *runtime) {
    for (int64_t i = 0; i < runtime->num_units; i++) {
        const struct unit *unit = runtime->units[i];
        if (unit->handle &&
            (unit->needs_pre_backward_unshard || unit->handle->training_state == USE_BACKWARD_PRE))
            return false;
    }
    return true;
}

static bool is_anything_gathered(const struct runtime *runtime) {
    for (int64_t i = 0; i < runtime->num_units; i++)
        if (runtime->units[i]->handle && runtime->units[i]->handle->storage.copy->full.allocated)
            return true;
    return false;
}

/* See schedule.h: the last reduction of a backward reads memory that lies idle then. */
static enum stream_role owner_of_input(const struct runtime *runtime, const struct gradients *gradients) {
    if (!is_last(runtime))
        return STREAM_POST_BACKWARD;
    bool has_room = pool_has_room(&runtime->schedule.pool, gradients_reduce_input_nbytes(gradients));
    return has_room && !is_anything_gathered(runtime) ? STREAM_UNSHARD : STREAM_COMPUTE;
}

/* Optimizers of the unit step as soon as its gradients are there (D-089). */
static int step_in_backward(struct unit *unit) {
    struct schedule *schedule = &unit->runtime->schedule;
    struct gradients *gradients = &unit->handle->gradients;
    int have_late = unit_await_step(unit) < 0 ? -1 : gradients_add_late(gradients, NULL);
    if (have_late < 0 || (have_late && schedule_wait_reduced(schedule) < 0))
        return -1;
    PyObject *gradient = Py_XNewRef(gradients->saved_shard);
    /* what autograd has added was made by computation, and so is the sum */
    int result = have_late ? gradients_hand_over(gradients) : 0;
    if (result < 0 || schedule_begin_stepping(schedule, have_late) < 0) {
        Py_XDECREF(gradient);
        return -1;
    }
    unit_note_stepping(unit);
    if (!have_late)
        result = gradients_hand_over(gradients);
    if (!result)
        result = callbacks_tell(callbacks.step_in_backward, unit->handle_object, NULL);
    return schedule_end_stepping(schedule, gradient, result);
}

int runtime_finish_reduction(struct runtime *runtime) {
    struct unit *unit = runtime->reducing;
    runtime->reducing = NULL;
    if (!unit)
        return 0;
    {
        TRACE(TRACED_REDUCTION, unit->recorder_index);
        if (schedule_finish_reduction(&runtime->schedule, &unit->handle->gradients) < 0)
            return unit_explain_failure(unit, TRACED_REDUCTION, true);
    }
    return unit->handle->optimizer_in_backward ? step_in_backward(unit) : 0;
}

int runtime_reduce_part(struct unit *part) {
    struct runtime *runtime = part->runtime;
    struct gradients *gradients = &part->handle->gradients;
    if (runtime_finish_reduction(runtime) < 0 || gradients_receive_nothing(gradients) < 0 ||
        callbacks_watch(part, Py_None) < 0)
        return -1;
    if (schedule_pack(&runtime->schedule, gradients, owner_of_input(runtime, gradients)) < 0)
        return unit_explain_failure(part, TRACED_REDUCTION, false);
    runtime->reducing = part;
    if (schedule_reduce(&runtime->schedule, gradients) < 0)
        return unit_explain_failure(part, TRACED_REDUCTION, false);
    return 0;
}

int runtime_drop_reduction(struct runtime *runtime) {
    runtime->reducing = NULL;
    /* which is legal from everywhere */
    return schedule_set_reduction(&runtime->schedule, REDUCTION_NONE, NULL);
}

/* ---- optional units ---- */

static int reduce_part(struct unit *part) {
    struct handle *handle = part->handle;
    optional_set_owes(part, false);
    if (handle_set_training_state(handle, USE_BACKWARD_POST) < 0 || gradients_prepare(&handle->gradients) < 0)
        return -1;
    return runtime_reduce_part(part);
}

/* Whether a unit ran, or has gradients, is not asked. */
int runtime_reduce_optional(struct unit *enclosing) {
    if (unit_reshard_optional(enclosing) < 0)
        return -1;
    for (struct unit *unit = enclosing->optional.first; unit; unit = unit->optional.next)
        FOR_PARTS(part, unit) {
            if (!part->optional.trains)
                continue;
            if (!part->sync_gradients)
                optional_set_owes(part, true);
            else if (reduce_part(part) < 0)
                return -1;
        }
    return 0;
}

int runtime_reduce_all_optional(struct runtime *runtime) {
    for (int64_t i = 0; i < runtime->num_units && runtime->callback_queued; i++) {
        struct unit *unit = runtime->units[i];
        if (unit->optional.reached && runtime_reduce_optional(unit) < 0)
            return -1;
        /* the backward has not come to the unit around it */
        bool owes = !runtime->num_in_forward && unit->optional.owes && unit->sync_gradients;
        if (owes && reduce_part(unit) < 0)
            return -1;
    }
    return runtime_finish_reduction(runtime);
}
