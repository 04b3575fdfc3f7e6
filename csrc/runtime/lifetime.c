/* When the unsharded parameters of a unit come and go in a step. Whoever brings a unit into its forward or backward calls these, and
 * so does a dry run (dry_run.h), which has neither tensors nor modules. */
#include "runtime/operations.h"
#include "runtime/runtime.h"

/* ---- forward ---- */

int unit_unshard_for_forward(struct unit *unit) {
    order_record_pre_forward(&unit->runtime->order, &unit->place);
    if (unit_begin_step_alone(unit) < 0 || unit_gather_and_wait(unit) < 0)
        return -1;
    order_place_set_prefetched(&unit->place, false);
    return unit_prefetch(unit, USE_FORWARD);
}

void unit_expect_backward(struct unit *unit, bool expected) {
    unit->needs_pre_backward_unshard = expected && unit->handle;
}

/* Freed unless the backward will want it gathered; nothing can go stale in a copy that no backward can use (parity 4). */
static int reshard_after_forward(struct unit *unit) {
    struct handle *handle = unit->handle;
    bool expected = unit->needs_pre_backward_unshard;
    bool keeps = handle->param.sharded && !flat_param_reshards_after_forward(&handle->param);
    bool free_storage = !handle->param.sharded || !expected || (!unit->is_root && !keeps);
    if (order_record_post_forward(&unit->runtime->order, &unit->place) < 0 || unit_reshard(unit, free_storage) < 0)
        return -1;
    bool views_stay = keeps && !free_storage && torch_grad_enabled(); /* C-091 */
    if (!views_stay && handle_show_sharded(handle) < 0)
        return -1;
    return handle_set_training_state(handle, USE_IDLE);
}

int unit_reshard_after_forward(struct unit *unit) {
    if (unit->handle && reshard_after_forward(unit) < 0)
        return -1;
    return unit->is_root && !unit->needs_pre_backward_unshard ? schedule_settle(&unit->runtime->schedule) : 0;
}

/* ---- backward ---- */

int unit_unshard_for_backward(struct unit *unit) {
    if (handle_set_training_state(unit->handle, USE_BACKWARD_PRE) < 0)
        return -1;
    if (unit_precision_for_backward(unit) < 0 || unit_gather_and_wait(unit) < 0)
        return -1;
    unit_expect_backward(unit, false);
    order_place_set_prefetched(&unit->place, false);
    return unit_prefetch(unit, USE_BACKWARD_PRE);
}

int unit_reshard_in_backward(struct unit *unit) {
    struct handle *handle = unit->handle;
    bool free_storage =
        !handle->param.sharded || unit->sync_gradients || flat_param_reshards_after_forward(&handle->param);
    return unit_reshard(unit, free_storage) < 0 ? -1 : handle_show_sharded(handle);
}

int unit_post_backward_reshard(struct unit *unit) {
    if (unit_reshard_in_backward(unit) < 0 || unit_prefetch(unit, USE_BACKWARD_POST) < 0)
        return -1;
    return schedule_give_back(&unit->runtime->schedule);
}

int unit_reshard_only(struct unit *unit) {
    if (!unit->runtime || !unit->handle || unit->handle->training_state != USE_BACKWARD_PRE)
        return 0;
    struct trace trace = trace_begin(TRACED_POST_BACKWARD_RESHARD_ONLY, unit->recorder_index);
    int result = handle_set_training_state(unit->handle, USE_BACKWARD_POST);
    if (!result)
        result = unit->runtime->operations->post_backward_reshard(unit);
    trace_end(trace);
    return result;
}

/* ---- the end of a backward ---- */

bool unit_ends_with_backward(const struct unit *unit) {
    if (!unit->runtime->num_in_forward)
        return true;
    if (!unit->handle)
        return unit->ran_pre_backward;
    enum training_state state = unit->handle->training_state;
    return state == USE_BACKWARD_PRE || state == USE_BACKWARD_POST || (state == USE_IDLE && unit->place.prefetched);
}

int runtime_reshard_units(struct runtime *runtime) {
    for (int64_t i = 0; i < runtime->num_units; i++) {
        struct unit *unit = runtime->units[i];
        if (unit->handle && unit_ends_with_backward(unit) && unit_reshard_in_backward(unit) < 0)
            return -1;
    }
    return 0;
}
