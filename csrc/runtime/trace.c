#include "runtime/trace.h"

#include <stdbool.h>

#include "torch/profile.h"

static const struct part {
    const char *range; /* NULL: none */
    enum recorder_phase phase;
    bool asks;    /* whether a profiler is on; else that is as in the range around it */
    bool goes_on; /* the phase does, until the next one begins */
} parts[TRACED_PARTS] = {
    [TRACED_FORWARD] = {"FullyShardedDataParallel.forward", RECORDER_FORWARD, .asks = true},
    [TRACED_ROOT_PRE_FORWARD] = {"FullyShardedDataParallel._root_pre_forward"},
    [TRACED_PRE_FORWARD] = {"FullyShardedDataParallel._pre_forward"},
    [TRACED_PRE_FORWARD_PREFETCH] = {"FullyShardedDataParallel._pre_forward_prefetch"},
    [TRACED_TO_KWARGS] = {"FullyShardedDataParallel._to_kwargs"},
    [TRACED_POST_FORWARD] = {"FullyShardedDataParallel._post_forward", .asks = true},
    [TRACED_PRE_BACKWARD] = {"FullyShardedDataParallel._pre_backward_hook", RECORDER_BACKWARD, .asks = true,
                             .goes_on = true},
    [TRACED_PRE_BACKWARD_PREFETCH] = {"FullyShardedDataParallel._pre_backward_prefetch"},
    [TRACED_POST_BACKWARD] = {"FullyShardedDataParallel._post_backward_hook", .asks = true},
    [TRACED_POST_BACKWARD_PREFETCH] = {"FullyShardedDataParallel._post_backward_prefetch"},
    [TRACED_POST_BACKWARD_RESHARD_ONLY] = {"FullyShardedDataParallel._post_backward_hook_reshard_only", .asks = true},
    [TRACED_RATE_LIMITER] = {"FullyShardedDataParallel.rate_limiter"},
    [TRACED_FORWARD_GATHER] = {.phase = RECORDER_FORWARD_GATHER},
    [TRACED_BACKWARD_GATHER] = {.phase = RECORDER_BACKWARD_GATHER},
    [TRACED_REDUCTION] = {.phase = RECORDER_REDUCE},
};

struct trace trace_begin(enum traced part, int32_t unit) {
    const struct part *traced = &parts[part];
    struct trace trace = {.part = part};
    if (traced->range)
        trace.range = traced->asks ? profile_begin(traced->range) : profile_begin_inner(traced->range);
    if (traced->phase)
        trace.place = flight_recorder_enter(unit, traced->phase);
    return trace;
}

void trace_end(struct trace trace) {
    if (parts[trace.part].phase && !parts[trace.part].goes_on)
        flight_recorder_leave(trace.place);
    profile_end(trace.range);
}

enum recorder_phase trace_phase(enum traced part) {
    return parts[part].phase;
}

void trace_end_step(void) {
    flight_recorder_end_step();
}

void trace_abandon(void) {
    flight_recorder_leave(0);
}
