/* Unshard, wait and reshard over all flat parameters of a unit, and their precision. Called from forward.c,
 * backward.c, prefetch.c and reshard.c. */
#include "runtime/operations.h"
#include "runtime/runtime.h"
#include "torch/py_torch.h"

/* ---- one flat parameter ---- */

static enum traced traced_unshard(const struct unit *part) {
    enum training_state state = part->handle->training_state;
    return state == USE_BACKWARD_PRE || state == USE_BACKWARD_POST ? TRACED_BACKWARD_GATHER
                                                                   : TRACED_FORWARD_GATHER;
}

static int explain(struct unit *part, bool enqueued) {
    return unit_explain_failure(part, traced_unshard(part), enqueued);
}

/* Return true if the shard is the unsharded parameter: nothing is enqueued. */
static bool is_local(const struct unit *part) {
    return part->handle->storage.copy->is_local && !operations_replaced[REPLACEABLE_UNSHARD];
}

/* Write back user edits on the current stream: the edited tensors were allocated on it. All-gathers wait for
 * that, and for a step of the unit's optimizers in this backward. */
static int pre_unshard(struct unit *part) {
    bool stepping = part->stepping;
    if (unit_wait_step(part) < 0)
        return -1;
    if (operations_replaced[REPLACEABLE_UNSHARD])
        return 0; /* a replaced `_unshard` does its own writeback */
    if (handle_pre_unshard(part->handle) < 0)
        return -1;
    bool copied = writeback_pop_copied(part->handle);
    return copied || stepping ? schedule_begin_step(&part->runtime->schedule) : 0;
}

/* Make the all-gather's input on PRE_UNSHARD, while the previous all-gather runs. The memory belongs to
 * UNSHARD. */
static int make_all_gather_input(struct unit *part) {
    struct schedule *schedule = &part->runtime->schedule;
    struct storage *storage = &part->handle->storage;
    if (!storage_needs_pre_unshard(storage))
        return 0;
    if (storage_alloc_unsharded(storage) < 0 || stream_enter(&schedule->streams, STREAM_PRE_UNSHARD) < 0)
        return -1;
    return schedule_end_pre_unshard(schedule, storage->offload, storage_pre_unshard(storage));
}

int unit_unshard_part(struct unit *part) {
    if (make_all_gather_input(part) == 0)
        return storage_unshard(&part->handle->storage, NULL);
    return storage_abandon_unshard(&part->handle->storage);
}

/* Rate limiter: one event per unit, not per flat parameter. */
static int begin_unshard(struct unit *part) {
    struct schedule *schedule = &part->runtime->schedule;
    bool limited = part->options.limit_all_gathers && !part->leader;
    if (pre_unshard(part) < 0 || (limited && limiter_wait(&schedule->limiter, &schedule->streams) < 0))
        return -1;
    return stream_enter(&schedule->streams, STREAM_UNSHARD);
}

/* ---- several flat parameters ---- */

/* Coalesce on a GPU only, where it saves launches. A replaced _unshard is called per flat parameter. */
static bool can_coalesce(struct unit *unit) {
    if (!unit->next_segment || !streams_are_real(&unit->runtime->schedule.streams) ||
        operations_replaced[REPLACEABLE_UNSHARD])
        return false;
    FOR_EACH_FLAT_PARAM(part, unit)
        if (!part->handle->param.sharded || part->handle->storage.param_state != PARAM_SHARDED)
            return false;
    return collective_can_coalesce(&unit->handle->param.shard_group);
}

static int enqueue_coalesced(struct unit *unit) {
    OWNED *outputs = PyList_New(0);
    OWNED *inputs = PyList_New(0);
    struct unshard_batch batch = {.outputs = outputs, .inputs = inputs};
    if (!outputs || !inputs)
        return -1;
    FOR_EACH_FLAT_PARAM(part, unit)
        if (make_all_gather_input(part) < 0 || storage_unshard(&part->handle->storage, &batch) < 0)
            return -1;
    OWNED *work = collective_all_gather_coalesced(&unit->handle->param.shard_group, outputs, inputs);
    if (!work)
        return -1;
    FOR_EACH_FLAT_PARAM(part, unit) /* the first work covers all outputs */
        if (storage_unshard_started(&part->handle->storage, part == unit ? work : Py_None) < 0)
            return -1;
    return 0;
}

static int unshard_coalesced(struct unit *unit) {
    struct schedule *schedule = &unit->runtime->schedule;
    FOR_EACH_FLAT_PARAM(part, unit->next_segment)
        if (pre_unshard(part) < 0)
            return explain(part, false);
    if (begin_unshard(unit) == 0 &&
        schedule_end_unshard(schedule, &unit->unsharded.mark, enqueue_coalesced(unit)) == 0)
        return 0;
    FOR_EACH_FLAT_PARAM(part, unit)
        if (part->handle->storage.param_state == PARAM_SHARDED)
            storage_abandon_unshard(&part->handle->storage);
    return explain(unit, false);
}

int unit_unshard(struct unit *unit) {
    struct schedule *schedule = &unit->runtime->schedule;
    if (unit->handle->storage.param_state == PARAM_SHARDED)
        unit->unsharded.for_forward = unit->runtime->num_forwards;
    if (can_coalesce(unit))
        return unshard_coalesced(unit);
    FOR_EACH_FLAT_PARAM(part, unit) {
        struct handle *handle = part->handle;
        if (handle->storage.param_state != PARAM_SHARDED) {
            if (unit_wait_step(part) < 0 || handle_check_flat_param(handle) < 0 ||
                writeback_check_views(handle) < 0)
                return -1;
        } else if (is_local(part)) {
            if (unit_wait_step(part) < 0 || handle_unshard(handle) < 0)
                return -1;
        } else {
            int result = begin_unshard(part);
            if (result < 0)
                result = storage_abandon_unshard(&handle->storage);
            else /* the event of the last all-gather covers all flat parameters */
                result = schedule_end_unshard(schedule, &unit->unsharded.mark, operations_unshard(part));
            if (result < 0)
                return explain(part, false);
        }
    }
    return 0;
}

/* ---- wait and reshard ---- */

static int wait_unshard_part(struct unit *part) {
    if (storage_wait_unshard(&part->handle->storage) < 0)
        return explain(part, true);
    return schedule_wait_unshard(&part->runtime->schedule, &unit_of_part(part)->unsharded.mark);
}

int unit_wait_unshard(struct unit *unit) {
    FOR_EACH_FLAT_PARAM(part, unit)
        if (wait_unshard_part(part) < 0)
            return -1;
    return 0;
}

int unit_unshard_and_wait(struct unit *unit) {
    TRACE(traced_unshard(unit), unit->name_index);
    return unit_unshard(unit) < 0 ? -1 : unit_wait_unshard(unit);
}

int unit_reshard(struct unit *part, bool free_storage) {
    struct schedule *schedule = &part->runtime->schedule;
    struct storage *storage = &part->handle->storage;
    bool frees = storage->param_state != PARAM_SHARDED && free_storage && !part->leader && !is_local(part);
    if (wait_unshard_part(part) < 0) /* prefetched, but not used */
        return -1;
    /* A replaced `_reshard` may have freed the storage: storage_reshard() is idempotent. */
    if (operations_reshard(part, free_storage) < 0 || storage_reshard(storage, free_storage) < 0)
        return -1;
    if (frees)
        limiter_add_free(&schedule->limiter, &schedule->streams, schedule->unsharded.last_use);
    return 0;
}

/* ---- precision ---- */

/* Under FSDP_USE_FULL_PREC_IN_EVAL and mixed precision, a unit in eval mode computes in the precision of its
 * shard. */

static int use_precision(struct unit *part, enum precision precision) {
    struct handle *handle = part->handle;
    if (storage_precision(&handle->storage) == precision)
        return 0;
    if (handle_writeback_views(handle) < 0)
        return -1;
    return unit_reshard(part, true) < 0 ? -1 : handle_use_precision(handle, precision);
}

int unit_precision_for_forward(struct unit *unit) {
    if (!unit->options.full_precision_in_eval)
        return 0;
    int training = unit_is_training(unit);
    if (training < 0)
        return -1;
    unit->evaluating = !training;
    if (!unit->handle)
        return 0;
    FOR_EACH_FLAT_PARAM(part, unit) {
        const struct precision_copy *copy = &part->handle->storage.copies[PRECISION_COMPUTE];
        bool is_mixed = copy->low_precision || copy->reduce_dtype != part->handle->storage.orig_dtype;
        bool full = !training && is_mixed;
        if (use_precision(part, full ? PRECISION_FULL : PRECISION_COMPUTE) < 0)
            return -1;
    }
    return 0;
}

void unit_record_precision(struct unit *unit) {
    FOR_EACH_FLAT_PARAM(part, unit)
        part->unsharded.graph_precision = storage_precision(&part->handle->storage);
}

int unit_precision_for_backward(struct unit *unit) {
    FOR_EACH_FLAT_PARAM(part, unit)
        if (use_precision(part, part->unsharded.graph_precision) < 0)
            return -1;
    return 0;
}
