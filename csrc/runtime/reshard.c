/* Time of reshards: after a forward, in a backward, and for parameters left by an earlier forward or a
 * prefetch. */
#include "runtime/operations.h"
#include "runtime/runtime.h"
#include "torch/py_torch.h"

static int reshard_flat_params(struct unit *unit, bool free_storage) {
    FOR_EACH_FLAT_PARAM(part, unit)
        if (unit_reshard(part, free_storage) < 0 || handle_expose_sharded(part->handle) < 0)
            return -1;
    return 0;
}

/* ---- after a forward ---- */

int unit_reshard_after_forward(struct unit *unit) {
    if (unit->handle && unit->optional.enclosing) { /* the unit may run again, and issues no collective */
        FOR_EACH_FLAT_PARAM(part, unit)
            if (handle_writeback_forward(part->handle) < 0)
                return -1;
        if (reshard_flat_params(unit, false) < 0 || unit_set_training_state(unit, USE_IDLE) < 0)
            return -1;
    } else if (unit->handle) {
        if (order_record_post_forward(&unit->runtime->order, &unit->place) < 0)
            return -1;
        /* Reshard unless the backward needs the parameters. Parameters are freed without a backward too, as
         * they could be stale in the next forward. */
        FOR_EACH_FLAT_PARAM(part, unit) {
            struct handle *handle = part->handle;
            bool keeps = flat_param_stays_unsharded(&handle->param);
            bool free_storage =
                !unit->unsharded.saved_by_graph &&
                (!handle->param.sharded || !unit->needs_pre_backward_unshard || (!unit->is_root && !keeps));
            bool views_stay = keeps && !free_storage && torch_grad_enabled();
            if (handle_writeback_forward(handle) < 0 || unit_reshard(part, free_storage) < 0 ||
                (!views_stay && handle_expose_sharded(handle) < 0) ||
                handle_set_training_state(handle, USE_IDLE) < 0)
                return -1;
        }
    }
    if (optional_end_forward(unit) < 0)
        return -1;
    /* the script may have called the unit by itself */
    bool is_outermost = unit->is_root || unit->runtime->num_in_forward == 1;
    if (is_outermost && runtime_reshard_unused(unit->runtime) < 0)
        return -1;
    return unit->is_root && !unit->needs_pre_backward_unshard ? schedule_flush(&unit->runtime->schedule) : 0;
}

/* ---- stale parameters ---- */

/* [Note: stale parameters] A forward leaves parameters unsharded that its backward reads: the root's, those
 * of strategies that do not reshard after forward, and prefetched units that did not run. The backward may
 * never run, and the shards may change: by an optimizer, a loaded state dict, or the user. A write through
 * `.data` leaves no trace, and a rank that holds no part of a parameter may not take part in the change. All
 * ranks must unshard or none, so changes are not searched for. Instead each unit records the forward that it
 * was unsharded for, and any other forward unshards it again. Only outermost forwards are counted, so all
 * ranks count alike. Within one forward a unit that runs twice, or was prefetched, is unsharded once.
 *
 * Parameters that the user unsharded explicitly are kept for the next forward in which the unit runs.
 * Parameters kept by a backward under no_sync, to save communication, are kept likewise, until a visible
 * write to any parameter of the root, or a forward without gradients, which may be an evaluation of averaged
 * weights. */
static bool is_stale(const struct unit *unit) {
    bool unsharded = unit->handle && unit->handle->storage.param_state != PARAM_SHARDED;
    return unsharded && unit->unsharded.for_forward != unit->runtime->num_forwards &&
           unit->unsharded.for_forward != FOR_NEXT_FORWARD;
}

/* ---- in a backward ---- */

/* Reshard the flat parameter. Strategies that keep parameters unsharded also do so under no_sync, as in
 * FSDP1. */
static int reshard_in_backward(struct unit *part) {
    struct unit *unit = unit_of_part(part);
    bool unsharded = part->handle->storage.param_state != PARAM_SHARDED;
    /* A later backward over this backward's graph may read the unsharded parameters, which it cannot unshard
     * itself. create_graph=True creates such a graph, retain_graph=True keeps it. */
    int saved_by_graph = 0;
    if (unsharded && part->runtime->create_graph)
        saved_by_graph = 1;
    else if (unsharded && unit->unsharded.saved_by_graph)
        saved_by_graph = torch_keeps_graph();
    bool keeps = !part->sync_gradients && flat_param_stays_unsharded(&part->handle->param);
    if (saved_by_graph < 0)
        return -1;
    unit->unsharded.saved_by_graph = saved_by_graph;
    if (keeps && !unit->runtime->num_in_forward && unsharded && !is_stale(unit)) {
        unit->unsharded.for_forward = FOR_NEXT_FORWARD;
        unit->runtime->keeps_unsharded = true;
    }
    if (handle_writeback_views(part->handle) < 0 || unit_reshard(part, !keeps && !saved_by_graph) < 0)
        return -1;
    return handle_expose_sharded(part->handle);
}

int unit_post_backward_reshard(struct unit *unit) {
    if (unit->optional.enclosing)
        return reshard_flat_params(unit, false);
    FOR_EACH_FLAT_PARAM(part, unit)
        if (reshard_in_backward(part) < 0)
            return -1;
    if (unit_prefetch_next(unit, USE_BACKWARD_POST) < 0 || unit_wait_prefetched(unit) < 0)
        return -1;
    /* so that the next unshard can reuse the memory after its last use; a forward keeps one unit deferred,
     * as the unshard would wait for the previous unit's forward */
    return deferred_free_flush(&unit->runtime->schedule.unsharded);
}

bool unit_ends_with_backward(const struct unit *unit) {
    if (unit->phase == PHASE_SUMMON_FULL_PARAMS ||
        (unit->handle && unit->handle->training_state == USE_SUMMON_FULL_PARAMS))
        return false; /* summon_full_params exits by itself */
    if (!unit->runtime->num_in_forward)
        return true;
    if (!unit->handle)
        return unit->ran_pre_backward;
    enum training_state state = unit->handle->training_state;
    return state == USE_BACKWARD_PRE || state == USE_BACKWARD_POST ||
           (state == USE_IDLE && unit->unsharded.prefetched);
}

int runtime_reshard_units(struct runtime *runtime) {
    runtime->keeps_unsharded = false;
    FOR_EACH_UNIT(unit, runtime) {
        if (unit->handle && unit_ends_with_backward(unit) && reshard_in_backward(unit) < 0)
            return -1;
    }
    return 0;
}

/* ---- optional units: see [Note: optional units] ---- */

/* Reshard all optional units alike, run or not: a rank that ran one may need it in a backward. */
int optional_end_forward(struct unit *enclosing) {
    bool expected = enclosing->needs_pre_backward_unshard;
    enclosing->optional.open = false;
    for (struct unit *unit = enclosing->optional.first; unit; unit = unit->optional.next) {
        bool keeps = flat_param_stays_unsharded(&unit->handle->param); /* segments share the strategy */
        if (torch_grad_enabled()) {
            unit_record_precision(unit);
            FOR_EACH_FLAT_PARAM(part, unit) {
                int trains = flat_param_is_trainable(&part->handle->param);
                part->optional.trainable = trains > 0;
                if (trains < 0)
                    return -1;
            }
        }
        if (reshard_flat_params(unit, !(keeps && expected) && !unit->unsharded.saved_by_graph) < 0)
            return -1;
    }
    return 0;
}

void optional_abandon(struct unit *enclosing) {
    enclosing->optional.open = false;
    for (struct unit *unit = enclosing->optional.first; unit; unit = unit->optional.next) {
        reshard_flat_params(unit, true);
        PyErr_Clear();
    }
}

int optional_end_backward(struct unit *enclosing) {
    optional_reset(enclosing);
    for (struct unit *unit = enclosing->optional.first; unit; unit = unit->optional.next) {
        FOR_EACH_FLAT_PARAM(part, unit)
            if (reshard_in_backward(part) < 0)
                return -1;
        if (deferred_free_flush(&unit->runtime->schedule.unsharded) < 0)
            return -1;
    }
    return 0;
}

/* ---- parameters left by an earlier forward ---- */

static int reshard_unused(struct unit *unit) {
    FOR_EACH_FLAT_PARAM(part, unit) {
        struct handle *handle = part->handle;
        part->unsharded.prefetched = false;
        if (writeback_check_views(handle) < 0 || handle_writeback_views(handle) < 0 ||
            unit_reshard(part, true) < 0 || handle_expose_sharded(handle) < 0)
            return -1;
    }
    return 0;
}

int unit_reshard_stale(struct unit *unit) {
    return is_stale(unit) && !unit->runtime->callback_queued ? reshard_unused(unit) : 0;
}

/* Reshard stale units to free memory. Skip units saved by a create_graph backward: nothing would unshard them
 * again. */
int runtime_reshard_stale(struct runtime *runtime) {
    FOR_EACH_UNIT(unit, runtime) {
        bool will_be_unsharded_again = (unit->needs_pre_backward_unshard || unit->unsharded.prefetched) &&
                                       !unit->unsharded.saved_by_graph;
        if (will_be_unsharded_again && !unit->leader && unit_reshard_stale(unit) < 0)
            return -1;
    }
    return 0;
}

int runtime_reshard_unused(struct runtime *runtime) {
    for (int64_t i = 0; i < runtime->num_units && !runtime->callback_queued; i++) {
        struct unit *unit = runtime->units[i];
        if (unit->unsharded.prefetched && !unit->leader && reshard_unused(unit) < 0)
            return -1;
    }
    return 0;
}

/* ---- parameters kept under no_sync ---- */

static int64_t count_writes(const struct runtime *runtime) {
    int64_t sum = 0;
    FOR_EACH_UNIT(unit, runtime) {
        int64_t writes = unit->handle ? writeback_count_writes(unit->handle) : 0;
        if (writes < 0)
            return -1;
        sum += writes;
    }
    return sum;
}

int runtime_record_kept(struct runtime *runtime) {
    runtime->num_writes = runtime->keeps_unsharded ? count_writes(runtime) : 0;
    return runtime->num_writes < 0 ? -1 : 0;
}

int runtime_check_kept(struct runtime *runtime) {
    if (!runtime->keeps_unsharded || runtime->num_in_forward > 1)
        return 0;
    int64_t writes = count_writes(runtime);
    bool is_outdated = writes != runtime->num_writes || !torch_grad_enabled();
    FOR_EACH_UNIT(unit, runtime)
        if (is_outdated && unit->unsharded.for_forward == FOR_NEXT_FORWARD)
            unit->unsharded.for_forward = 0;
    return writes < 0 ? -1 : 0;
}
