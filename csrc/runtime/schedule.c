#include "runtime/schedule.h"

#include "runtime/callbacks.h"
#include "runtime/operations.h"
#include "runtime/runtime.h"
#include "runtime/watch.h"
#include "torch/profile.h"

int schedule_init(struct schedule *schedule, PyObject *device) {
    schedule->unsharded =
        (struct deferred_free){.streams = &schedule->streams, .owner = STREAM_UNSHARD, .user = STREAM_COMPUTE};
    schedule->inputs =
        (struct deferred_free){.streams = &schedule->streams, .owner = STREAM_PRE_UNSHARD, .user = STREAM_UNSHARD};
    return streams_init(&schedule->streams, device) < 0 ? -1 : pool_init(&schedule->pool, device);
}

void schedule_fini(struct schedule *schedule) {
    struct streams *streams = &schedule->streams;
    stream_event *events[] = {&schedule->step_begin,     &schedule->input_made, &schedule->received,
                              &schedule->packed,         &schedule->scattered,  &schedule->reduced,
                              &schedule->all_reduced,    &schedule->joined,     &schedule->unsharded.last_use,
                              &schedule->inputs.last_use};
    for (size_t i = 0; i < sizeof events / sizeof *events; i++)
        stream_event_destroy(streams, events[i]);
    for (int i = 0; i < LIMITER_DEPTH; i++)
        stream_event_destroy(streams, &schedule->limiter[i]);
    Py_CLEAR(schedule->scattered_output);
    Py_CLEAR(schedule->packed_gradients);
    streams_fini(streams);
    pool_fini(&schedule->pool);
}

void schedule_forget(struct schedule *schedule, struct gather_mark *gather) {
    stream_event_destroy(&schedule->streams, &gather->gathered);
}

void schedule_note_stepped(struct unit *unit) {
    unit->gather.stepped_in = unit->runtime->schedule.num_begins;
}

/* ---- the pool: how many units are gathered at a time ---- */

/* In use, gathered ahead, and in forward held until its last use is settled. */
static int64_t units_at_a_time(const struct runtime *runtime) {
    int64_t forward = 2, backward = 1;
    for (int64_t i = 0; i < runtime->num_units; i++) {
        const struct unit *unit = runtime->units[i];
        if (unit->forward_prefetch)
            forward = 2 + runtime->order.forward_prefetch_limit;
        if (unit->backward_prefetch != PREFETCH_NONE)
            backward = 1 + runtime->order.backward_prefetch_limit;
    }
    return forward > backward ? forward : backward;
}

static bool has_storage_to_take(const struct unit *unit) {
    return unit->handle && storage_wants_memory(&unit->handle->storage);
}

/* The root stays gathered until its backward, as every unit does that is not resharded after its forward. */
static bool stays_gathered(const struct unit *unit) {
    return unit->is_root || (unit->handle->param.sharded && !flat_param_reshards_after_forward(&unit->handle->param));
}

/* The largest among the units that give their storage back in a step; NULL when all have some. */
static struct unit *next_to_take(const struct runtime *runtime) {
    struct unit *largest = NULL;
    for (int64_t i = 0; i < runtime->num_units; i++) {
        struct unit *unit = runtime->units[i];
        if (!has_storage_to_take(unit) || stays_gathered(unit))
            continue;
        if (!largest || unit->handle->storage.copy->full.nbytes > largest->handle->storage.copy->full.nbytes)
            largest = unit;
    }
    return largest;
}

static int take_all(struct runtime *runtime) {
    struct unit *unit;
    for (int64_t i = 0; i < runtime->num_units; i++) {
        unit = runtime->units[i];
        if (has_storage_to_take(unit) && stays_gathered(unit) && storage_reserve(&unit->handle->storage) < 0)
            return -1;
    }
    for (int64_t i = units_at_a_time(runtime); i > 0 && (unit = next_to_take(runtime)); i--)
        if (storage_reserve(&unit->handle->storage) < 0)
            return -1;
    return 0;
}

static int give_all_back(struct runtime *runtime) {
    int result = 0;
    for (int64_t i = 0; i < runtime->num_units; i++)
        if (runtime->units[i]->handle && storage_release_reserved(&runtime->units[i]->handle->storage) < 0)
            result = -1;
    return result;
}

/* On the unshard stream, to which the memory belongs from then on. */
int schedule_reserve(struct runtime *runtime) {
    struct schedule *schedule = &runtime->schedule;
    if (schedule->pool.reserved || !streams_are_real(&schedule->streams))
        return 0;
    schedule->pool.reserved = true;
    if (stream_enter(&schedule->streams, STREAM_UNSHARD) < 0)
        return -1;
    int result = take_all(runtime);
    if (give_all_back(runtime) < 0)
        result = -1;
    return stream_leave(&schedule->streams) < 0 ? -1 : result;
}

int schedule_begin_step(struct schedule *schedule) {
    struct streams *streams = &schedule->streams;
    schedule->num_begins++;
    if (stream_follow(streams) < 0 || stream_record(streams, STREAM_COMPUTE, &schedule->step_begin) < 0)
        return -1;
    if (stream_wait(streams, STREAM_PRE_UNSHARD, schedule->step_begin) < 0)
        return -1;
    return stream_wait(streams, STREAM_UNSHARD, schedule->step_begin);
}

/* ---- rate limiter: the host runs at most LIMITER_DEPTH frees ahead of the device (D-034) ---- */

static int wait_for_free(struct schedule *schedule) {
    if (schedule->limiter_count < LIMITER_DEPTH)
        return 0;
    stream_event oldest = schedule->limiter[schedule->limiter_first];
    schedule->limiter_first = (schedule->limiter_first + 1) % LIMITER_DEPTH;
    schedule->limiter_count--;
    return stream_synchronize(&schedule->streams, oldest);
}

/* The range is there where there is nothing to wait for as well, once as much was freed as may be in flight: as upstream's. */
static int limiter_wait(struct unit *unit) {
    struct schedule *schedule = &unit->runtime->schedule;
    if (!unit->limit_all_gathers || schedule->num_frees < LIMITER_DEPTH)
        return 0;
    PyObject *range = profile_begin_inner("FullyShardedDataParallel.rate_limiter");
    int result = wait_for_free(schedule);
    profile_end(range);
    return result;
}

static int limiter_note_free(struct schedule *schedule) {
    schedule->num_frees++;
    if (!streams_are_real(&schedule->streams))
        return 0;
    if (schedule->limiter_count ==
        LIMITER_DEPTH) { /* two frees without a gather between them: the older one is implied */
        schedule->limiter_first = (schedule->limiter_first + 1) % LIMITER_DEPTH;
        schedule->limiter_count--;
    }
    int slot = (schedule->limiter_first + schedule->limiter_count++) % LIMITER_DEPTH;
    return stream_record(&schedule->streams, STREAM_COMPUTE, &schedule->limiter[slot]);
}

/* ---- failure ---- */

static enum ledger_phase gather_phase(const struct unit *unit) {
    enum training_state state = unit->handle->training_state;
    return state == USE_BACKWARD_PRE || state == USE_BACKWARD_POST ? LEDGER_BACKWARD_GATHER : LEDGER_FORWARD_GATHER;
}

/* A collective failed: its error says of which unit and phase and, where ledgers are kept, where the other ranks are. Where it was
 * only being enqueued, that goes for the backend's own errors. Returns -1. */
static int explain_failure(struct unit *unit, enum ledger_phase phase, bool enqueued) {
    PyObject *type, *value, *traceback;
    ledger_enter(unit->ledger_index, phase);
    PyErr_Fetch(&type, &value, &traceback);
    PyErr_NormalizeException(&type, &value, &traceback);
    PyObject *done =
        PyObject_CallFunction(callbacks.explain_failed_collective, "OiLOi", value, (int)phase,
                              (long long)unit->runtime->order.iteration, unit->handle_object, (int)enqueued);
    if (!done)
        PyErr_Clear();
    Py_XDECREF(done);
    PyErr_Restore(type, value, traceback);
    return -1;
}

/* ---- unshard and reshard ---- */

/* The shard is the whole, where computation is: nothing is enqueued. */
bool schedule_is_there(const struct unit *unit) {
    return unit->handle->storage.copy->is_local;
}

/* The user's changes are taken over on the user's own stream, where the memory of what they were made of goes on. Gathers come
 * after that, and after a step of the unit's optimizers in this backward. */
static int take_changes(struct unit *unit) {
    struct schedule *schedule = &unit->runtime->schedule;
    bool has_stepped = unit->gather.stepped_in == schedule->num_begins, copied;
    if (handle_take_changes(unit->handle, &copied) < 0)
        return -1;
    return copied || has_stepped ? schedule_begin_step(schedule) : 0;
}

/* What the gather reads is made beside the gather before it, and while the host waits for the limiter. */
static int make_input(struct unit *unit) {
    struct schedule *schedule = &unit->runtime->schedule;
    struct streams *streams = &schedule->streams;
    if (!streams_are_real(streams) || !storage_gather_input(&unit->handle->storage))
        return 0;
    if (stream_enter(streams, STREAM_PRE_UNSHARD) < 0)
        return -1;
    int result = handle_pre_unshard(unit->handle);
    if (result < 0)
        explain_failure(unit, gather_phase(unit), false);
    if (stream_leave(streams) < 0 || result < 0)
        return -1;
    if (stream_record(streams, STREAM_PRE_UNSHARD, &schedule->input_made) < 0)
        return -1;
    schedule->uploading = schedule->uploading || unit->handle->storage.offload;
    return stream_wait(streams, STREAM_UNSHARD, schedule->input_made);
}

int schedule_prepare_gather(struct unit *unit) {
    return take_changes(unit) < 0 ? -1 : make_input(unit);
}

static int hold_input(struct unit *unit) {
    struct schedule *schedule = &unit->runtime->schedule;
    struct buffer *input = storage_gather_input(&unit->handle->storage);
    return input && streams_are_real(&schedule->streams) ? deferred_free_add(&schedule->inputs, input) : 0;
}

int schedule_gather(struct unit *unit) {
    return handle_unshard_enqueue(unit->handle) < 0 ? -1 : hold_input(unit);
}

int schedule_unshard(struct unit *unit) {
    struct schedule *schedule = &unit->runtime->schedule;
    struct streams *streams = &schedule->streams;
    if (unit->handle->storage.param_state != PARAM_SHARDED)
        return edits_check_views(&unit->handle->edits);
    if (operations.is_there(unit))
        return handle_unshard_enqueue(unit->handle);
    if (operations.prepare_gather(unit) < 0 || limiter_wait(unit) < 0 || stream_enter(streams, STREAM_UNSHARD) < 0) {
        handle_free_unshard(unit->handle);
        return -1;
    }
    int result = operations.gather(unit);
    if (result < 0)
        explain_failure(unit, gather_phase(unit), false);
    else
        result = stream_record(streams, STREAM_UNSHARD, &unit->gather.gathered);
    unit->gather.pending = !result;
    return stream_leave(streams) < 0 ? -1 : result;
}

int schedule_wait_unsharded(struct unit *unit) {
    bool pending = unit->gather.pending;
    unit->gather.pending = false;
    if (storage_unshard_wait(&unit->handle->storage) < 0)
        return explain_failure(unit, gather_phase(unit), true);
    return pending ? stream_wait(&unit->runtime->schedule.streams, STREAM_COMPUTE, unit->gather.gathered) : 0;
}

int schedule_reshard(struct unit *unit, bool free_storage) {
    struct schedule *schedule = &unit->runtime->schedule;
    bool held = unit->handle->storage.param_state != PARAM_SHARDED;
    if (schedule_wait_unsharded(unit) < 0) /* gathered ahead for nothing */
        return -1;
    if (operations.reshard(unit, free_storage) < 0)
        return -1;
    return held && free_storage && !operations.is_there(unit) ? limiter_note_free(schedule) : 0;
}

int schedule_give_back(struct schedule *schedule) {
    return deferred_free_settle(&schedule->unsharded);
}

/* ---- packing ---- */

/* Of the unit before. Computation goes on when it is packed, so that its memory may be taken again. */
static int release_packed(struct schedule *schedule) {
    if (!schedule->packed_gradients)
        return 0;
    int result = stream_wait(&schedule->streams, STREAM_COMPUTE, schedule->packed);
    Py_CLEAR(schedule->packed_gradients);
    return result;
}

static int mark_received(struct unit *unit) {
    struct schedule *schedule = &unit->runtime->schedule;
    if (gradients_take_memory(&unit->handle->gradients) < 0)
        return -1;
    if (stream_record(&schedule->streams, STREAM_COMPUTE, &schedule->received) < 0)
        return -1;
    return stream_wait(&schedule->streams, STREAM_POST_BACKWARD, schedule->received);
}

static int pack_beside(struct unit *unit) {
    struct schedule *schedule = &unit->runtime->schedule;
    struct streams *streams = &schedule->streams;
    if (release_packed(schedule) < 0 || mark_received(unit) < 0 || stream_enter(streams, STREAM_POST_BACKWARD) < 0)
        return -1;
    int result = gradients_pack_beside(&unit->handle->gradients, &schedule->packed_gradients);
    if (!result)
        result = stream_record(streams, STREAM_POST_BACKWARD, &schedule->packed);
    return stream_leave(streams) < 0 ? -1 : result;
}

int schedule_pack(struct unit *unit) {
    struct schedule *schedule = &unit->runtime->schedule;
    struct gradients *gradients = &unit->handle->gradients;
    if (watch_unit(unit, Py_None) < 0)
        return -1;
    schedule->packs_beside = streams_are_real(&schedule->streams) && gradients_pack_directly(gradients);
    return schedule->packs_beside ? pack_beside(unit) : gradients_pack(gradients);
}

/* ---- reduction ---- */

int schedule_reduce(struct unit *unit) {
    struct schedule *schedule = &unit->runtime->schedule;
    struct streams *streams = &schedule->streams;
    struct gradients *gradients = &unit->handle->gradients;
    if ((!schedule->packs_beside && mark_received(unit) < 0) || stream_enter(streams, STREAM_POST_BACKWARD) < 0)
        return -1;
    int result = gradients_reduce_enqueue(gradients);
    if (result < 0)
        explain_failure(unit, LEDGER_REDUCE, false);
    else if (gradients_reduce_twice(gradients))
        result = stream_record(streams, STREAM_POST_BACKWARD, &schedule->scattered);
    if (schedule->packs_beside) /* its memory is taken again on the same stream */
        gradients_release_reduce_input(gradients);
    return stream_leave(streams) < 0 ? -1 : result;
}

static int finish_on(struct unit *unit, enum stream_role role, stream_event *end) {
    struct streams *streams = &unit->runtime->schedule.streams;
    if (stream_enter(streams, role) < 0)
        return -1;
    int result = gradients_reduce_finish(&unit->handle->gradients);
    if (result < 0)
        explain_failure(unit, LEDGER_REDUCE, true);
    else
        result = stream_record(streams, role, end);
    return stream_leave(streams) < 0 ? -1 : result;
}

/* The memory of the output before goes back to the stream that took it. */
static int release_scattered_output(struct schedule *schedule) {
    if (!schedule->scattered_output)
        return 0;
    int result = stream_wait(&schedule->streams, STREAM_POST_BACKWARD, schedule->all_reduced);
    Py_CLEAR(schedule->scattered_output);
    return result;
}

static int finish_hybrid_reduction(struct unit *unit) {
    struct schedule *schedule = &unit->runtime->schedule;
    struct streams *streams = &schedule->streams;
    if (release_scattered_output(schedule) < 0 || stream_wait(streams, STREAM_ALL_REDUCE, schedule->scattered) < 0 ||
        finish_on(unit, STREAM_ALL_REDUCE, &schedule->all_reduced) < 0)
        return -1;
    schedule->all_reducing = true;
    schedule->scattered_output = gradients_take_reduce_output(&unit->handle->gradients);
    return schedule->packs_beside ? 0 : stream_wait(streams, STREAM_COMPUTE, schedule->scattered);
}

/* Computation waits at once where what is reduced is memory of its own. */
static int finish_reduction(struct unit *unit) {
    struct schedule *schedule = &unit->runtime->schedule;
    if (finish_on(unit, STREAM_POST_BACKWARD, &schedule->reduced) < 0)
        return -1;
    schedule->reducing = schedule->packs_beside;
    return schedule->packs_beside ? 0 : stream_wait(&schedule->streams, STREAM_COMPUTE, schedule->reduced);
}

int schedule_finish_reduction(struct unit *unit) {
    bool is_hybrid =
        streams_are_real(&unit->runtime->schedule.streams) && gradients_reduce_twice(&unit->handle->gradients);
    int result = is_hybrid ? finish_hybrid_reduction(unit) : finish_reduction(unit);
    if (!result)
        gradients_reduce_release(&unit->handle->gradients);
    return result;
}

static int wait_for_all_reduces(struct schedule *schedule) {
    if (!schedule->all_reducing)
        return 0;
    schedule->all_reducing = false;
    if (stream_wait(&schedule->streams, STREAM_COMPUTE, schedule->all_reduced) < 0)
        return -1;
    return release_scattered_output(schedule);
}

int schedule_wait_reduced(struct schedule *schedule) {
    bool reducing = schedule->reducing;
    schedule->reducing = false;
    if (release_packed(schedule) < 0)
        return -1;
    if (reducing && stream_wait(&schedule->streams, STREAM_COMPUTE, schedule->reduced) < 0)
        return -1;
    return wait_for_all_reduces(schedule);
}

/* ---- ends ---- */

/* Computation has waited for all gathers, and they for what they read. */
int schedule_synchronize(struct schedule *schedule) {
    struct streams *streams = &schedule->streams;
    schedule->uploading = false;
    if (stream_record(streams, STREAM_COMPUTE, &schedule->joined) < 0)
        return -1;
    return stream_synchronize(streams, schedule->joined);
}

static int wait_for_uploads(struct schedule *schedule) {
    bool uploading = schedule->uploading;
    schedule->uploading = false;
    return uploading ? stream_synchronize(&schedule->streams, schedule->input_made) : 0;
}

int schedule_settle(struct schedule *schedule) {
    int result = schedule_wait_reduced(schedule) < 0 ? -1 : wait_for_uploads(schedule);
    if (deferred_free_settle(&schedule->unsharded) < 0 || deferred_free_settle(&schedule->inputs) < 0)
        result = -1;
    return result;
}

/* The script may call a backward under another stream than its forward. */
int schedule_end_backward(struct schedule *schedule) {
    struct streams *streams = &schedule->streams;
    if (schedule_settle(schedule) < 0 || stream_follow(streams) < 0 || stream_give_back(streams) < 0)
        return -1;
    streams->num_former = 0;
    return 0;
}

/* The stream of the gathers has waited for what they read. */
int schedule_join(struct schedule *schedule) {
    struct streams *streams = &schedule->streams;
    for (int role = STREAM_UNSHARD; role < STREAM_ROLES; role++) {
        if (stream_record(streams, (enum stream_role)role, &schedule->joined) < 0 ||
            stream_wait(streams, STREAM_COMPUTE, schedule->joined) < 0)
            return -1;
    }
    return 0;
}
