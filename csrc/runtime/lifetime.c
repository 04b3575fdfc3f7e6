/* When the unsharded parameters of a unit come and go in a step. The hooks of forward and backward
 * call these functions. */
#include "runtime/runtime.h"

#include "runtime/operations.h"
#include "torch/names.h"

int unit_set_training_state(struct unit *unit, enum training_state state) {
    FOR_PARTS(part, unit)
        if (handle_set_training_state(part->handle, state) < 0)
            return -1;
    return 0;
}

/* ---- prefetch, in the order of units (D-110 to D-116) ---- */

static bool can_prefetch(const struct unit *unit) {
    return !unit->prefetched && unit->handle->storage.param_state == PARAM_SHARDED;
}

static struct unit *next_forward(const struct unit *unit) {
    const struct order *order = &unit->runtime->order;
    for (int64_t distance = 1; unit->forward_prefetch && distance <= order->forward_prefetch_limit;
         distance++) {
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
        part->prefetched = prefetched;
}

int unit_prefetch(struct unit *candidate, enum training_state state) {
    if (!can_prefetch(candidate))
        return 0;
    bool in_forward = state == USE_FORWARD;
    int chosen = in_forward ? unit_precision_for_forward(candidate) : unit_precision_for_backward(candidate);
    if (chosen < 0 || unit_unshard(candidate) < 0)
        return -1;
    unit_set_prefetched(candidate, true);
    return 0;
}

int unit_prefetch_in_order(struct unit *unit, enum training_state state) {
    for (struct unit *next; (next = unit_next(unit, state)) != NULL;)
        if (unit_prefetch(next, state) < 0)
            return -1;
    return 0;
}

static int prefetch_next(struct unit *unit, enum training_state state) {
    static const enum traced parts[USE_STATES] = {[USE_FORWARD] = TRACED_PRE_FORWARD_PREFETCH,
                                                  [USE_BACKWARD_PRE] = TRACED_PRE_BACKWARD_PREFETCH,
                                                  [USE_BACKWARD_POST] = TRACED_POST_BACKWARD_PREFETCH};
    TRACE(parts[state], unit->name_index);
    return unit->runtime->operations->prefetch(unit, state);
}

/* ---- forward ---- */

/* Outside of the root's forward the script has called this unit by itself. */
static int begin_step_alone(struct unit *unit) {
    struct runtime *runtime = unit->runtime;
    if (runtime->units[0]->phase != PHASE_IDLE)
        return 0;
    return runtime_check_kept(runtime) < 0 ? -1 : schedule_begin_step(&runtime->schedule);
}

static int take_turn(struct unit *unit) {
    if (unit->optional.enclosing)
        return optional_check_forward(unit);
    order_record_pre_forward(&unit->runtime->order, &unit->place);
    return 0;
}

int unit_unshard_for_forward(struct unit *unit) {
    if (!unit->handle)
        return optional_begin_forward(unit);
    if (take_turn(unit) < 0 || begin_step_alone(unit) < 0 || unit_reshard_stale(unit) < 0 ||
        unit_unshard_and_wait(unit) < 0)
        return -1;
    unit_note_used(unit);
    if (optional_begin_forward(unit) < 0)
        return -1;
    unit_set_prefetched(unit, false);
    return prefetch_next(unit, USE_FORWARD);
}

void unit_expect_backward(struct unit *unit, bool expected) {
    unit->needs_pre_backward_unshard = expected && unit->handle;
}

/* Freed unless the backward will want it gathered; nothing can go stale in a copy that no backward can use
 * (parity 4). */
static int reshard_after_forward(struct unit *part, const struct unit *unit) {
    struct handle *handle = part->handle;
    bool expected = unit->needs_pre_backward_unshard;
    bool keeps = handle->param.sharded && !flat_param_reshards_after_forward(&handle->param);
    bool free_storage =
        !unit->graph_reads && (!handle->param.sharded || !expected || (!unit->is_root && !keeps));
    if (handle_take_over_writes(handle) < 0 || unit_reshard(part, free_storage) < 0)
        return -1;
    bool views_stay = keeps && !free_storage && torch_grad_enabled(); /* C-091 */
    if (!views_stay && handle_show_sharded(handle) < 0)
        return -1;
    return handle_set_training_state(handle, USE_IDLE);
}

static int end_use(struct unit *unit) {
    if (unit->optional.enclosing) { /* it may run again, and sends nothing */
        FOR_PARTS(part, unit)
            if (handle_take_over_writes(part->handle) < 0)
                return -1;
        return optional_hold(unit) < 0 ? -1 : unit_set_training_state(unit, USE_IDLE);
    }
    if (order_record_post_forward(&unit->runtime->order, &unit->place) < 0)
        return -1;
    FOR_PARTS(part, unit)
        if (reshard_after_forward(part, unit) < 0)
            return -1;
    return 0;
}

int unit_reshard_after_forward(struct unit *unit) {
    if ((unit->handle && end_use(unit) < 0) || optional_end_forward(unit) < 0)
        return -1;
    bool is_outermost = unit->is_root || unit->runtime->num_in_forward == 1; /* or was called by itself */
    if (is_outermost && runtime_reshard_unused(unit->runtime) < 0)
        return -1;
    return unit->is_root && !unit->needs_pre_backward_unshard ? schedule_flush(&unit->runtime->schedule) : 0;
}

/* ---- backward ---- */

int unit_unshard_for_backward(struct unit *unit) {
    if (!unit->handle)
        return optional_begin_backward(unit);
    if (unit->optional.enclosing && optional_check_backward(unit) < 0)
        return -1;
    if (unit_set_training_state(unit, USE_BACKWARD_PRE) < 0)
        return -1;
    if (unit_precision_for_backward(unit) < 0 || unit_unshard_and_wait(unit) < 0)
        return -1;
    unit_expect_backward(unit, false);
    unit_set_prefetched(unit, false);
    if (optional_begin_backward(unit) < 0)
        return -1;
    return prefetch_next(unit, USE_BACKWARD_PRE);
}

/* Is this backward followed by another one over the graph of a backward, which reads the unsharded parameters
 * and has no all-gather? create_graph=True makes such a graph, retain_graph=True keeps it. 1, 0 or -1. */
static int graph_goes_on(struct unit *part) {
    if (part->handle->storage.param_state == PARAM_SHARDED)
        return 0;
    if (part->runtime->graph_goes_on)
        return 1;
    return unit_of_part(part)->graph_reads ? torch_keeps_graph() : 0;
}

/* Under no_sync a strategy that keeps parameters stays gathered (D-070). */
static int reshard_in_backward(struct unit *part) {
    struct handle *handle = part->handle;
    int goes_on = graph_goes_on(part);
    bool keeps =
        handle->param.sharded && !part->sync_gradients && !flat_param_reshards_after_forward(&handle->param);
    if (goes_on < 0)
        return -1;
    unit_of_part(part)->graph_reads = goes_on;
    if (keeps)
        unit_keep_unsharded(part);
    if (handle_take_over_views(handle) < 0 || unit_reshard(part, !keeps && !goes_on) < 0)
        return -1;
    return handle_show_sharded(handle);
}

int unit_post_backward_reshard(struct unit *unit) {
    if (unit->optional.enclosing)
        return optional_hold(unit);
    FOR_PARTS(part, unit)
        if (reshard_in_backward(part) < 0)
            return -1;
    if (prefetch_next(unit, USE_BACKWARD_POST) < 0)
        return -1;
    return schedule_release_deferred(&unit->runtime->schedule);
}

int unit_reshard_optional(struct unit *enclosing) {
    optional_reset(enclosing);
    for (struct unit *unit = enclosing->optional.first; unit; unit = unit->optional.next) {
        FOR_PARTS(part, unit)
            if (reshard_in_backward(part) < 0)
                return -1;
        if (schedule_release_deferred(&unit->runtime->schedule) < 0)
            return -1;
    }
    return 0;
}

int unit_reshard_only(void *target) {
    struct unit *unit = target;
    if (!unit->runtime || !unit->handle || unit->handle->training_state != USE_BACKWARD_PRE)
        return 0;
    TRACE(TRACED_POST_BACKWARD_RESHARD_ONLY, unit->name_index);
    if (unit_set_training_state(unit, USE_BACKWARD_POST) < 0)
        return -1;
    return unit->runtime->operations->post_backward_reshard(unit);
}

/* ---- the end of a backward ---- */

bool unit_ends_with_backward(const struct unit *unit) {
    if (unit->phase == PHASE_SUMMON_FULL_PARAMS ||
        (unit->handle && unit->handle->training_state == USE_SUMMON_FULL_PARAMS))
        return false; /* summon_full_params ends by itself */
    if (!unit->runtime->num_in_forward)
        return true;
    if (!unit->handle)
        return unit->ran_pre_backward;
    enum training_state state = unit->handle->training_state;
    return state == USE_BACKWARD_PRE || state == USE_BACKWARD_POST || (state == USE_IDLE && unit->prefetched);
}

int runtime_reshard_units(struct runtime *runtime) {
    runtime->keeps = false;
    for (int64_t i = 0; i < runtime->num_units; i++) {
        struct unit *unit = runtime->units[i];
        if (unit->handle && unit_ends_with_backward(unit) && reshard_in_backward(unit) < 0)
            return -1;
    }
    return 0;
}

/* ---- on the user's word ---- */

/* What the last forward has left may be stale for the next one. */
static int gather_for_next(struct unit *unit) {
    int64_t num_forwards = unit->runtime->num_in_forward ? unit->runtime->num_forwards : 0;
    if (!num_forwards && unit->unsharded_for != FOR_NEXT_FORWARD)
        unit->unsharded_for = 0;
    if (unit_reshard_stale(unit) < 0 || unit_unshard(unit) < 0)
        return -1;
    unit->unsharded_for = num_forwards ? num_forwards : FOR_NEXT_FORWARD;
    return 0;
}

int unit_prefetch_by_user(struct unit *unit) {
    struct handle *handle = unit->handle;
    if (!handle || !unit->runtime)
        return 0;
    if (handle->training_state == USE_SUMMON_FULL_PARAMS)
        return unit_error(PyExc_RuntimeError, handle->param.layout.rank, unit->name,
                          "its full parameters are summoned: prefetch it outside of summon_full_params");
    if (begin_step_alone(unit) < 0 || unit_precision_for_forward(unit) < 0 || gather_for_next(unit) < 0)
        return -1;
    FOR_PARTS(part, unit)
        if (handle_show_views(part->handle) < 0)
            return -1;
    return 0;
}
