/* Gathering a unit ahead of its forward on the user's word, and a step that begins without its root. */
#include "runtime/runtime.h"

int unit_begin_step_alone(struct unit *unit) {
    struct runtime *runtime = unit->runtime;
    return runtime->units[0]->phase == PHASE_IDLE ? schedule_begin_step(&runtime->schedule) : 0;
}

int unit_unshard(struct unit *unit) {
    struct handle *handle = unit->handle;
    if (!handle || !unit->runtime)
        return 0;
    if (handle->training_state == USE_SUMMON_FULL_PARAMS) {
        PyErr_Format(PyExc_RuntimeError,
                     "rank %lld, unit %S: its full parameters are summoned: gather it ahead outside "
                     "of summon_full_params",
                     (long long)handle->param.layout.rank, unit->name);
        return -1;
    }
    if (unit_begin_step_alone(unit) < 0 || unit_precision_for_forward(unit) < 0 || schedule_unshard(unit) < 0)
        return -1;
    order_place_set_prefetched(&unit->place, true);
    return handle_show_views(handle);
}

int unit_wait_unsharded(struct unit *unit) {
    return unit->handle && unit->runtime ? schedule_wait_unsharded(unit) : 0;
}
