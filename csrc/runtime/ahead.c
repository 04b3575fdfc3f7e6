/* Gathering a unit ahead of its turn: in the order of units (D-110 to D-116), or on the user's word. A step that begins without its
 * root. */
#include "handle/unit_error.h"
#include "runtime/operations.h"
#include "runtime/runtime.h"

/* ---- in the order of units ---- */

static bool can_prefetch(const struct unit *unit) {
    return !unit->place.prefetched && unit->handle->storage.param_state == PARAM_SHARDED;
}

static struct unit *next_forward(const struct unit *unit) {
    const struct order *order = &unit->runtime->order;
    for (int64_t distance = 1; unit->forward_prefetch && distance <= order->forward_prefetch_limit; distance++) {
        int64_t next = order_after(order, &unit->place, distance);
        if (next < 0)
            return NULL;
        if (can_prefetch(unit->runtime->units[next]))
            return unit->runtime->units[next];
    }
    return NULL;
}

static struct unit *next_backward(const struct unit *unit) {
    const struct order *order = &unit->runtime->order;
    for (int64_t distance = 1; distance <= order->backward_prefetch_limit; distance++) {
        int64_t next = order_before(order, &unit->place, distance);
        if (next < 0)
            return NULL;
        struct unit *candidate = unit->runtime->units[next];
        if (candidate->needs_pre_backward_unshard && can_prefetch(candidate))
            return candidate;
    }
    return NULL;
}

struct unit *unit_next(const struct unit *unit, enum training_state state) {
    if (state == USE_FORWARD)
        return next_forward(unit);
    if (state == USE_BACKWARD_PRE && unit->backward_prefetch == PREFETCH_BACKWARD_PRE)
        return next_backward(unit);
    if (state == USE_BACKWARD_POST && unit->backward_prefetch == PREFETCH_BACKWARD_POST)
        return next_backward(unit);
    return NULL;
}

void unit_set_prefetched(struct unit *unit, bool prefetched) {
    FOR_PARTS(part, unit)
        order_place_set_prefetched(&part->place, prefetched);
}

int unit_gather_ahead(struct unit *candidate, enum training_state state) {
    if (!can_prefetch(candidate))
        return 0;
    bool in_forward = state == USE_FORWARD;
    int chosen = in_forward ? unit_precision_for_forward(candidate) : unit_precision_for_backward(candidate);
    if (chosen < 0 || (in_forward && unit_forget_node_parts(candidate) < 0) || unit_gather(candidate) < 0)
        return -1;
    unit_set_prefetched(candidate, true);
    return 0;
}

int unit_prefetch_in_order(struct unit *unit, enum training_state state) {
    for (struct unit *next; (next = unit_next(unit, state)) != NULL;)
        if (unit_gather_ahead(next, state) < 0)
            return -1;
    return 0;
}

int unit_prefetch(struct unit *unit, enum training_state state) {
    static const enum traced parts[USE_STATES] = {[USE_FORWARD] = TRACED_PRE_FORWARD_PREFETCH,
                                                  [USE_BACKWARD_PRE] = TRACED_PRE_BACKWARD_PREFETCH,
                                                  [USE_BACKWARD_POST] = TRACED_POST_BACKWARD_PREFETCH};
    struct trace trace = trace_begin(parts[state], unit->recorder_index);
    int result = unit->runtime->operations->prefetch(unit, state);
    trace_end(trace);
    return result;
}

/* ---- on the user's word ---- */

int unit_begin_step_alone(struct unit *unit) {
    struct runtime *runtime = unit->runtime;
    if (runtime->units[0]->phase != PHASE_IDLE)
        return 0;
    return runtime_check_kept(runtime) < 0 ? -1 : schedule_begin_step(&runtime->schedule);
}

/* What the last forward has left may be stale for the next one. */
static int gather_for_next(struct unit *unit) {
    int64_t num_forwards = unit->runtime->num_in_forward ? unit->runtime->num_forwards : 0;
    if (!num_forwards && unit->gathered_for != FOR_NEXT_FORWARD)
        unit->gathered_for = 0;
    if (unit_give_back_stale(unit) < 0 || unit_gather(unit) < 0)
        return -1;
    unit->gathered_for = num_forwards ? num_forwards : FOR_NEXT_FORWARD;
    return 0;
}

int unit_unshard(struct unit *unit) {
    struct handle *handle = unit->handle;
    if (!handle || !unit->runtime)
        return 0;
    if (handle->training_state == USE_SUMMON_FULL_PARAMS) {
        return unit_error(PyExc_RuntimeError, handle->param.layout.rank, unit->name,
                          "its full parameters are summoned: gather it ahead outside "
                          "of summon_full_params");
    }
    if (unit_begin_step_alone(unit) < 0 || unit_precision_for_forward(unit) < 0 || unit_forget_node_parts(unit) < 0 ||
        gather_for_next(unit) < 0)
        return -1;
    FOR_PARTS(part, unit)
        if (handle_show_views(part->handle) < 0)
            return -1;
    return 0;
}

int unit_wait_unsharded(struct unit *unit) {
    return unit->handle && unit->runtime ? unit_wait_gathered(unit) : 0;
}
