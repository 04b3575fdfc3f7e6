/* Whether a unit is in a step: the table, and the only writer. */
#include "handle/transition.h"
#include "runtime/runtime.h"

static const bool phase_allowed[UNIT_PHASES][UNIT_PHASES] = {
    [PHASE_IDLE] = {[PHASE_IDLE] = true, [PHASE_IN_STEP] = true, [PHASE_SUMMON_FULL_PARAMS] = true},
    [PHASE_IN_STEP] = {[PHASE_IN_STEP] = true, /* forward of an earlier backward's unit, or its backward */
                       [PHASE_IDLE] = true},
    [PHASE_SUMMON_FULL_PARAMS] = {[PHASE_IDLE] = true},
};

static const char *const phase_names[UNIT_PHASES] = {"IDLE", "IN_STEP", "SUMMON_FULL_PARAMS"};

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

int unit_set_phase(struct unit *unit, enum unit_phase phase) {
    if (!phase_allowed[unit->phase][phase])
        return transition_refuse(unit_rank(unit), unit->name, phase_names[unit->phase], phase_names[phase], "");
    unit->phase = phase;
    return 0;
}
