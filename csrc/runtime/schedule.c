#include "runtime/schedule.h"

#include "runtime/replaced.h"
#include "runtime/runtime.h"
#include "torch/profile.h"

int schedule_init(struct schedule *schedule, PyObject *device) {
    return streams_init(&schedule->streams, device);
}

void schedule_fini(struct schedule *schedule) {
    stream_event_destroy(&schedule->streams, &schedule->step_begin);
    stream_event_destroy(&schedule->streams, &schedule->freed);
    stream_event_destroy(&schedule->streams, &schedule->packed);
    for (int i = 0; i < LIMITER_DEPTH; i++)
        stream_event_destroy(&schedule->streams, &schedule->limiter[i]);
    streams_fini(&schedule->streams);
}

int schedule_begin_step(struct schedule *schedule) {
    struct streams *streams = &schedule->streams;
    if (stream_record(streams, STREAM_COMPUTE, &schedule->step_begin) < 0)
        return -1;
    return stream_wait(streams, STREAM_UNSHARD, schedule->step_begin);
}

/* ---- rate limiter: the host runs at most LIMITER_DEPTH frees ahead of the device (D-034) ---- */

static int limiter_wait(struct unit *unit) {
    struct schedule *schedule = &unit->runtime->schedule;
    if (!unit->limit_all_gathers || schedule->limiter_count < LIMITER_DEPTH)
        return 0;
    PyObject *range = profile_begin("FullyShardedDataParallel.rate_limiter");
    stream_event oldest = schedule->limiter[schedule->limiter_first];
    schedule->limiter_first = (schedule->limiter_first + 1) % LIMITER_DEPTH;
    schedule->limiter_count--;
    int result = stream_synchronize(&schedule->streams, oldest);
    profile_end(range);
    return result;
}

static int limiter_note_free(struct schedule *schedule) {
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

/* A collective failed: its error says of which unit and, where ledgers are kept, where the other ranks are. Returns -1. */
static int explain_failure(struct unit *unit, const char *collective) {
    PyObject *type, *value, *traceback;
    ledger_note_failure();
    PyErr_Fetch(&type, &value, &traceback);
    PyErr_NormalizeException(&type, &value, &traceback);
    PyObject *module = PyImport_ImportModule("fsdp_c.ledger"), *done = NULL;
    if (module)
        done = PyObject_CallMethod(module, "explain", "OsO", value, collective, unit->handle_object);
    if (!done)
        PyErr_Clear();
    Py_XDECREF(module);
    Py_XDECREF(done);
    PyErr_Restore(type, value, traceback);
    return -1;
}

/* ---- unshard and reshard ---- */

int schedule_unshard(struct unit *unit) {
    struct schedule *schedule = &unit->runtime->schedule;
    struct streams *streams = &schedule->streams;
    if (unit->handle->param_state != PARAM_SHARDED)
        return handle_check_views(unit->handle);
    if (limiter_wait(unit) < 0 || stream_wait(streams, STREAM_UNSHARD, schedule->freed) < 0)
        return -1;
    if (stream_enter(streams, STREAM_UNSHARD) < 0)
        return -1;
    int result = replaced[REPLACED_UNSHARD] ? replaced_unshard(unit) : handle_unshard_enqueue(unit->handle);
    if (!result)
        result = stream_record(streams, STREAM_UNSHARD, &unit->gathered);
    return stream_leave(streams) < 0 ? -1 : result;
}

int schedule_wait_unsharded(struct unit *unit) {
    bool pending = unit->handle->param_state == PARAM_UNSHARDING;
    if (handle_unshard_wait(unit->handle) < 0)
        return explain_failure(unit, "all-gather");
    return pending ? stream_wait(&unit->runtime->schedule.streams, STREAM_COMPUTE, unit->gathered) : 0;
}

int schedule_reshard(struct unit *unit, bool free_storage) {
    struct schedule *schedule = &unit->runtime->schedule;
    bool held = unit->handle->param_state != PARAM_SHARDED;
    if (replaced[REPLACED_RESHARD] && replaced_reshard(unit, free_storage) < 0)
        return -1;
    if (handle_reshard(unit->handle, free_storage) < 0)
        return -1;
    if (!held || !free_storage)
        return 0;
    if (stream_record(&schedule->streams, STREAM_COMPUTE, &schedule->freed) < 0)
        return -1;
    return limiter_note_free(schedule);
}

/* ---- reduction ---- */

int schedule_reduce(struct unit *unit) {
    struct schedule *schedule = &unit->runtime->schedule;
    struct streams *streams = &schedule->streams;
    if (stream_record(streams, STREAM_COMPUTE, &schedule->packed) < 0)
        return -1;
    if (stream_wait(streams, STREAM_POST_BACKWARD, schedule->packed) < 0)
        return -1;
    if (stream_enter(streams, STREAM_POST_BACKWARD) < 0)
        return -1;
    int result = handle_reduce_enqueue(unit->handle);
    return stream_leave(streams) < 0 ? -1 : result;
}

int schedule_finish_reduction(struct unit *unit) {
    struct streams *streams = &unit->runtime->schedule.streams;
    if (stream_enter(streams, STREAM_POST_BACKWARD) < 0)
        return -1;
    int result = handle_reduce_finish(unit->handle);
    if (result < 0)
        explain_failure(unit, "reduction");
    else
        result = stream_record(streams, STREAM_POST_BACKWARD, &unit->reduced);
    if (stream_leave(streams) < 0)
        return -1;
    return result ? result : stream_wait(streams, STREAM_COMPUTE, unit->reduced);
}
