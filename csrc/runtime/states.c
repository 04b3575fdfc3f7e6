/* The states of a unit and of a reduction: for each the table of legal transitions and its only writer. What
 * holds of a root between steps. */
#include "handle/unit_error.h"
#include "runtime/operations.h"
#include "runtime/runtime.h"
#include "runtime/schedule.h"

#include "base/check.h"

/* ---- what errors name ---- */

const struct handle *unit_handle_or_first(const struct unit *unit) {
    if (unit->handle)
        return unit->handle;
    for (int64_t i = 0; unit->runtime && i < unit->runtime->num_units; i++)
        if (unit->runtime->units[i]->handle)
            return unit->runtime->units[i]->handle;
    return NULL;
}

long long unit_rank(const struct unit *unit) {
    const struct handle *handle = unit_handle_or_first(unit);
    return handle ? (long long)handle->param.layout.rank : -1;
}

/* ---- whether a unit is in a step ---- */

static const bool phase_allowed[UNIT_PHASES][UNIT_PHASES] = {
    [PHASE_IDLE] = {[PHASE_IDLE] = true, [PHASE_IN_STEP] = true, [PHASE_SUMMON_FULL_PARAMS] = true},
    [PHASE_IN_STEP] = {[PHASE_IN_STEP] = true, /* forward of an earlier backward's unit, or its backward */
                       [PHASE_IDLE] = true},
    [PHASE_SUMMON_FULL_PARAMS] = {[PHASE_IDLE] = true},
};

static const char *const phase_names[UNIT_PHASES] = {"IDLE", "IN_STEP", "SUMMON_FULL_PARAMS"};

int unit_set_phase(struct unit *unit, enum unit_phase phase) {
    if (!phase_allowed[unit->phase][phase])
        return unit_error(PyExc_RuntimeError, unit_rank(unit), unit->name, "illegal transition from %s to %s",
                          phase_names[unit->phase], phase_names[phase]);
    unit->phase = phase;
    return 0;
}

/* ---- how far a reduction has come ---- */

static const bool reduction_allowed[REDUCTION_STATES][REDUCTION_STATES] = {
    [REDUCTION_NONE] = {[REDUCTION_NONE] = true, /* after an exception */
                        [REDUCTION_PACKED] = true},
    [REDUCTION_PACKED] = {[REDUCTION_ENQUEUED] = true, [REDUCTION_NONE] = true /* after an exception */},
    [REDUCTION_ENQUEUED] = {[REDUCTION_NONE] = true}, /* finished, or after an exception */
};

static const char *const reduction_names[REDUCTION_STATES] = {"REDUCTION_NONE", "REDUCTION_PACKED",
                                                              "REDUCTION_ENQUEUED"};

int schedule_set_reduction(struct schedule *schedule, enum reduction_state state,
                           const struct flat_param *param) {
    if (!reduction_allowed[schedule->reduction][state])
        return unit_error(PyExc_RuntimeError, param->layout.rank, param->name,
                          "illegal transition from %s to %s", reduction_names[schedule->reduction],
                          reduction_names[state]);
    schedule->reduction = state;
    CHECKED(schedule_check(schedule));
    return 0;
}

bool schedule_is_flushed(const struct schedule *schedule) {
    return schedule->reduction == REDUCTION_NONE && !schedule->packed_gradients && !schedule->reducing &&
           !schedule->all_reducing && !schedule->scattered_output && !schedule->stepped_gradient &&
           !schedule->uploading && !schedule->unsharded.held;
}

void schedule_check(const struct schedule *schedule) {
    INVARIANT(streams_are_real(&schedule->streams) ||
              (!schedule->limiter_count && !schedule->packs_beside && !schedule->packed_gradients &&
               !schedule->reducing && !schedule->all_reducing && !schedule->stepping &&
               !schedule->uploading && !schedule->unsharded.held));
    INVARIANT(schedule->limiter_count >= 0 && schedule->limiter_count <= LIMITER_DEPTH);
    INVARIANT(schedule->limiter_count <= schedule->num_frees);
    INVARIANT(schedule->all_reducing || !schedule->scattered_output);
}

/* ---- a root between steps ---- */

static void check_unit(const struct unit *unit) {
    const struct handle *handle = unit->handle;
    INVARIANT(unit->phase != PHASE_IN_STEP && !unit->ran_pre_backward && !unit->needs_pre_backward_unshard);
    INVARIANT(!unit->place.prefetched && !unit->gather.pending);
    INVARIANT(!unit->reshard_hook && !unit->stepping);
    INVARIANT(!unit->optional.open && !unit->optional.reached);
    INVARIANT(!unit->optional.enclosing || !unit->optional.first);
    order_check_place(&unit->runtime->order, &unit->place);
    INVARIANT(!handle || handle->training_state == USE_IDLE ||
              handle->training_state == USE_SUMMON_FULL_PARAMS);
    INVARIANT(!handle ||
              (!handle->gradients.in_backward && !handle->gradients.pending && !handle->gradients.work));
    INVARIANT(!handle || handle->storage.param_state != PARAM_UNSHARDING);
    if (handle && handle->ready)
        handle_check(handle);
}

void runtime_check(const struct runtime *runtime) {
    INVARIANT(!runtime->callback_queued && !runtime->reducing && !runtime->resetting &&
              !runtime->num_in_forward);
    order_check(&runtime->order);
    INVARIANT(runtime->order.num_post == 0);
    schedule_check(&runtime->schedule);
    operations_check(&operations);
    INVARIANT(schedule_is_flushed(&runtime->schedule));
    for (int64_t i = 0; i < runtime->num_units; i++)
        check_unit(runtime->units[i]);
}
