/* What holds of a root between steps. */
#include "runtime/operations.h"
#include "runtime/runtime.h"

#include "base/check.h"

static void check_unit(const struct unit *unit) {
    const struct handle *handle = unit->handle;
    (void)handle; /* without FSDP_C_CHECK */
    INVARIANT(unit->phase != PHASE_IN_STEP && !unit->ran_pre_backward && !unit->needs_pre_backward_unshard);
    INVARIANT(!unit->place.prefetched && !unit->gather.pending);
    INVARIANT(!unit->reshard_hook);
    INVARIANT(!unit->optional.open && !unit->optional.reached);
    INVARIANT(!unit->optional.around || !unit->optional.first);
    order_check_place(&unit->runtime->order, &unit->place);
    INVARIANT(!handle || handle->training_state == USE_IDLE || handle->training_state == USE_SUMMON_FULL_PARAMS);
    INVARIANT(!handle || (!handle->gradients.in_backward && !handle->gradients.pending && !handle->gradients.work));
    INVARIANT(!handle || handle->storage.param_state != PARAM_UNSHARDING);
    if (handle && handle->ready)
        handle_check(handle);
}

void runtime_check(const struct runtime *runtime) {
    INVARIANT(!runtime->callback_queued && !runtime->reducing && !runtime->resetting && !runtime->num_in_forward);
    order_check(&runtime->order);
    INVARIANT(runtime->order.num_post == 0);
    schedule_check(&runtime->schedule);
    operations_check(&operations);
    INVARIANT(schedule_is_settled(&runtime->schedule));
    for (int64_t i = 0; i < runtime->num_units; i++)
        check_unit(runtime->units[i]);
}
