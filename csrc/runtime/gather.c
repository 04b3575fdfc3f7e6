/* A unit is gathered, in one precision or the other, and given back, also where an earlier forward has left
 * it gathered. */
#include "runtime/callbacks.h"
#include "runtime/operations.h"
#include "runtime/runtime.h"
#include "torch/names.h"

/* ---- failure ---- */

/* Add rank, unit and phase to the error of a collective. While it is being enqueued only errors of the backend
 * are a collective's. Returns -1. */
int unit_explain_failure(struct unit *unit, enum traced part, bool enqueued) {
    PyObject *type, *value, *traceback;
    TRACE(part, unit->name_index);
    PyErr_Fetch(&type, &value, &traceback);
    PyErr_NormalizeException(&type, &value, &traceback);
    if (ref_done(PyObject_CallFunction(
            callbacks.explain_failed_collective, "OiLOi", value, (int)traced_parts[part].phase,
            (long long)unit->runtime->order.iteration, unit->handle_object, (int)enqueued)) < 0)
        PyErr_Clear();
    PyErr_Restore(type, value, traceback);
    return -1;
}

static enum traced gather_of(const struct unit *unit) {
    enum training_state state = unit->handle->training_state;
    return state == USE_BACKWARD_PRE || state == USE_BACKWARD_POST ? TRACED_BACKWARD_GATHER
                                                                   : TRACED_FORWARD_GATHER;
}

static int explain_gather(struct unit *unit, bool enqueued) {
    return unit_explain_failure(unit, gather_of(unit), enqueued);
}

/* ---- one gather ---- */

static bool is_replaced(const struct unit *unit) {
    return unit->runtime->operations->replaced[REPLACEABLE_UNSHARD];
}

/* The shard is the whole, where computation is: nothing is enqueued. */
static bool is_there(const struct unit *unit) {
    return unit->handle->storage.copy->is_local && !is_replaced(unit);
}

int unit_await_step(struct unit *part) {
    bool stepping = part->stepping;
    part->stepping = false;
    return stepping ? schedule_wait_reduced(&part->runtime->schedule) : 0;
}

/* The user's changes are taken over on the user's own stream, where the memory of what they were made of goes
 * on. Gathers come after that, and after a step of the unit's optimizers in this backward. */
static int pre_unshard(struct unit *part) {
    bool stepping = part->stepping;
    if (unit_await_step(part) < 0)
        return -1;
    if (is_replaced(part))
        return 0; /* by what does that as well */
    if (handle_pre_unshard(part->handle) < 0)
        return -1;
    bool copied = writeback_take_copied(&part->handle->writeback);
    return copied || stepping ? schedule_begin_step(&part->runtime->schedule) : 0;
}

/* What an all-gather reads is made beside the all-gather before it, in memory of the stream that gathers. */
static int make_input(struct unit *part) {
    struct schedule *schedule = &part->runtime->schedule;
    struct storage *storage = &part->handle->storage;
    if (!storage_makes_input(storage))
        return 0;
    if (storage_alloc_unsharded(storage) < 0 || schedule_begin_pre_unshard(schedule) < 0)
        return -1;
    return schedule_end_pre_unshard(schedule, storage->offload, storage_pre_unshard(storage));
}

int unit_unshard_part(struct unit *part) {
    if (make_input(part) == 0)
        return storage_unshard(&part->handle->storage);
    storage_abandon_unshard(&part->handle->storage);
    return -1;
}

/* The limiter counts units. */
static int begin_gather(struct unit *unit) {
    struct schedule *schedule = &unit->runtime->schedule;
    bool limited = unit->limit_all_gathers && !unit->leader;
    if (pre_unshard(unit) < 0 || (limited && schedule_limit(schedule) < 0))
        return -1;
    return schedule_begin_unshard(schedule);
}

static int gather(struct unit *unit) {
    if (unit->handle->storage.param_state != PARAM_SHARDED)
        return unit_await_step(unit) < 0 || handle_check_flat_param(unit->handle) < 0
                   ? -1
                   : writeback_check_views(&unit->handle->writeback);
    if (is_there(unit))
        return unit_await_step(unit) < 0 ? -1 : handle_unshard(unit->handle);
    if (begin_gather(unit) < 0) {
        storage_abandon_unshard(&unit->handle->storage);
        return explain_gather(unit, false);
    }
    /* the event of a unit's last all-gather is that of all its parts */
    if (schedule_end_unshard(&unit->runtime->schedule, &unit_of_part(unit)->last_unshard,
                             unit->runtime->operations->unshard(unit)) < 0)
        return explain_gather(unit, false);
    return 0;
}

/* ---- of several parts ---- */

/* On a GPU one launch sends them all; elsewhere nothing is won. Outside code that gathers does it part by
 * part. */
static bool goes_together(struct unit *unit) {
    if (!unit->next_segment || !streams_are_real(&unit->runtime->schedule.streams) ||
        unit->runtime->operations->unshard != unit_unshard_part)
        return false;
    FOR_PARTS(part, unit)
        if (!part->handle->param.sharded || part->handle->storage.param_state != PARAM_SHARDED)
            return false;
    return collective_gathers_together(&unit->handle->param.shard_group);
}

static int enqueue_together(struct unit *unit) {
    OWNED *outputs = PyList_New(0);
    OWNED *inputs = PyList_New(0);
    struct unshard_batch batch = {.outputs = outputs, .inputs = inputs};
    if (!outputs || !inputs)
        return -1;
    FOR_PARTS(part, unit)
        if (make_input(part) < 0 || storage_unshard_add(&part->handle->storage, &batch) < 0)
            return -1;
    OWNED *work = collective_all_gather_together(&unit->handle->param.shard_group, outputs, inputs);
    if (!work)
        return -1;
    FOR_PARTS(part, unit) /* what comes next is after the first one's */
        if (storage_unshard_begun(&part->handle->storage, part == unit ? work : Py_None) < 0)
            return -1;
    return 0;
}

static int gather_together(struct unit *unit) {
    struct schedule *schedule = &unit->runtime->schedule;
    FOR_PARTS(part, unit->next_segment)
        if (pre_unshard(part) < 0)
            return explain_gather(part, false);
    int result = begin_gather(unit);
    if (!result)
        result = schedule_end_unshard(schedule, &unit->last_unshard, enqueue_together(unit));
    if (!result)
        return 0;
    FOR_PARTS(part, unit)
        if (part->handle->storage.param_state == PARAM_SHARDED)
            storage_abandon_unshard(&part->handle->storage);
    return explain_gather(unit, false);
}

int unit_unshard(struct unit *unit) {
    if (unit->handle->storage.param_state == PARAM_SHARDED)
        unit->unsharded_for = unit->runtime->num_forwards;
    if (goes_together(unit))
        return gather_together(unit);
    FOR_PARTS(part, unit)
        if (gather(part) < 0)
            return -1;
    return 0;
}

/* ---- what comes after it ---- */

static int wait_gathered(struct unit *unit) {
    if (storage_wait_unshard(&unit->handle->storage) < 0)
        return explain_gather(unit, true);
    return schedule_wait_unshard(&unit->runtime->schedule, &unit_of_part(unit)->last_unshard);
}

int unit_wait_unshard(struct unit *unit) {
    FOR_PARTS(part, unit)
        if (wait_gathered(part) < 0)
            return -1;
    return 0;
}

int unit_unshard_and_wait(struct unit *unit) {
    TRACE(gather_of(unit), unit->name_index);
    return unit_unshard(unit) < 0 ? -1 : unit_wait_unshard(unit);
}

int unit_reshard(struct unit *unit, bool free_storage) {
    const struct operations *table = unit->runtime->operations;
    struct storage *storage = &unit->handle->storage;
    bool frees = storage->param_state != PARAM_SHARDED && free_storage && !unit->leader && !is_there(unit);
    if (wait_gathered(unit) < 0) /* prefetched for nothing */
        return -1;
    /* wherever another function has left the storage, it is as it should be then */
    if ((table->reshard && table->reshard(unit, free_storage) < 0) ||
        storage_reshard(storage, free_storage) < 0)
        return -1;
    return frees ? schedule_note_free(&unit->runtime->schedule) : 0;
}

/* ---- in which precision ---- */

/* FSDP_USE_FULL_PREC_IN_EVAL: under mixed precision a unit in eval mode computes in the precision of its
 * shard (D-123). */

int unit_is_training(const struct unit *unit) {
    PyObject *module = PyWeakref_GetObject(unit->module_ref);
    OWNED *wrapped = module ? PyObject_GetAttrString(module, "_fsdp_wrapped_module") : NULL;
    OWNED *training = wrapped ? PyObject_GetAttr(wrapped, torch_names.training) : NULL;
    return training ? PyObject_IsTrue(training) : -1;
}

static int use_precision(struct unit *unit, enum precision precision) {
    struct handle *handle = unit->handle;
    if (storage_precision(&handle->storage) == precision)
        return 0;
    if (handle_take_over_views(handle) < 0)
        return -1;
    return unit_reshard(unit, true) < 0 ? -1 : handle_use_precision(handle, precision);
}

int unit_precision_for_forward(struct unit *unit) {
    if (!unit->full_precision_in_eval)
        return 0;
    int training = unit_is_training(unit);
    if (training < 0)
        return -1;
    unit->evaluating = !training;
    if (!unit->handle)
        return 0;
    FOR_PARTS(part, unit) {
        bool full = !training && storage_has_mixed_precision(&part->handle->storage);
        if (use_precision(part, full ? PRECISION_FULL : PRECISION_COMPUTE) < 0)
            return -1;
    }
    return 0;
}

void unit_note_precision(struct unit *unit) {
    FOR_PARTS(part, unit)
        part->graph_precision = storage_precision(&part->handle->storage);
}

int unit_precision_for_backward(struct unit *unit) {
    FOR_PARTS(part, unit)
        if (use_precision(part, part->graph_precision) < 0)
            return -1;
    return 0;
}

/* ---- what an earlier forward has left gathered ---- */

/* [Note: stale parameters] A forward may leave gathered what its backward will read: the root, all units of a
 * strategy that does not reshard after forward, what was prefetched and not run. The backward may never
 * come, and parameters change: by an optimizer, by a state dict that is loaded, by the user's own hand. All
 * of that goes to the shards. A change through `.data` leaves no trace, and ranks that hold nothing of a
 * parameter may be left out of one: so it is not asked whether there was any, as all ranks must gather or
 * none. Each unit knows for which forward it was gathered, and another one gathers anew: forwards are counted
 * where none is on its way yet, on each rank alike. Within one forward a unit that runs again, or that was
 * prefetched, is gathered once.
 *
 * What is gathered on the user's word is for the next forward that it runs in. So is what a backward under
 * no_sync keeps, whose use is that nothing is sent: it goes where any parameter of the root, empty or not,
 * has been written to in a way that can be seen, and in a forward without gradients, which is no part of an
 * accumulation and may be an evaluation of averaged weights. */
static bool is_stale(const struct unit *unit) {
    bool gathered = unit->handle && unit->handle->storage.param_state != PARAM_SHARDED;
    return gathered && unit->unsharded_for != unit->runtime->num_forwards &&
           unit->unsharded_for != FOR_NEXT_FORWARD;
}

static int give_back(struct unit *unit) {
    FOR_PARTS(part, unit) {
        struct handle *handle = part->handle;
        part->prefetched = false;
        if (writeback_check_views(&handle->writeback) < 0 || handle_take_over_views(handle) < 0 ||
            unit_reshard(part, true) < 0 || handle_show_sharded(handle) < 0)
            return -1;
    }
    return 0;
}

int unit_reshard_stale(struct unit *unit) {
    return is_stale(unit) && !unit->runtime->callback_queued ? give_back(unit) : 0;
}

void unit_note_used(struct unit *unit) {
    unit->unsharded_for = unit->runtime->num_forwards;
}

/* For the memory, but for what a graph of a backward reads, which nobody would gather again. */
int runtime_reshard_stale(struct runtime *runtime) {
    for (int64_t i = 0; i < runtime->num_units; i++) {
        struct unit *unit = runtime->units[i];
        bool comes_back = (unit->needs_pre_backward_unshard || unit->prefetched) && !unit->graph_reads;
        if (comes_back && !unit->leader && unit_reshard_stale(unit) < 0)
            return -1;
    }
    return 0;
}

int runtime_reshard_unused(struct runtime *runtime) {
    for (int64_t i = 0; i < runtime->num_units && !runtime->callback_queued; i++) {
        struct unit *unit = runtime->units[i];
        if (unit->prefetched && !unit->leader && give_back(unit) < 0)
            return -1;
    }
    return 0;
}

void unit_forget_graph(struct unit *unit) {
    unit->graph_reads = false;
}

/* ---- what a backward under no_sync keeps ---- */

void unit_keep_unsharded(struct unit *part) {
    struct unit *unit = unit_of_part(part);
    if (unit->runtime->num_in_forward || part->handle->storage.param_state == PARAM_SHARDED || is_stale(unit))
        return;
    unit->unsharded_for = FOR_NEXT_FORWARD;
    unit->runtime->keeps = true;
}

static int64_t count_writes(const struct runtime *runtime) {
    int64_t sum = 0;
    for (int64_t i = 0; i < runtime->num_units; i++) {
        const struct handle *handle = runtime->units[i]->handle;
        int64_t writes = handle ? writeback_count_writes(&handle->writeback) : 0;
        if (writes < 0)
            return -1;
        sum += writes;
    }
    return sum;
}

int runtime_note_kept(struct runtime *runtime) {
    runtime->num_writes = runtime->keeps ? count_writes(runtime) : 0;
    return runtime->num_writes < 0 ? -1 : 0;
}

int runtime_check_kept(struct runtime *runtime) {
    if (!runtime->keeps || runtime->num_in_forward > 1)
        return 0;
    int64_t writes = count_writes(runtime);
    bool anew = writes != runtime->num_writes || !torch_grad_enabled();
    for (int64_t i = 0; i < runtime->num_units && anew; i++)
        if (runtime->units[i]->unsharded_for == FOR_NEXT_FORWARD)
            runtime->units[i]->unsharded_for = 0;
    return writes < 0 ? -1 : 0;
}
