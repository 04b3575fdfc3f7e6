/* Observability of a step: ranges in torch's profiler, under FSDP1's names (users search traces for them),
 * and progress (progress.h). All traced parts are listed here; nothing else in csrc/runtime opens a range.
 * The functions are inline because the part is a constant at nearly every call.
 *
 * Invariant: traced parts are nested, also when an exception is raised, which is kept. */
#ifndef FSDP_RUNTIME_TRACE_H
#define FSDP_RUNTIME_TRACE_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stdbool.h>
#include <stdint.h>

#include "runtime/progress.h"
#include "torch/py_torch.h"

enum traced {
    TRACED_NOTHING,
    TRACED_FORWARD,
    TRACED_ROOT_PRE_FORWARD,
    TRACED_PRE_FORWARD,
    TRACED_PRE_FORWARD_PREFETCH,
    TRACED_TO_KWARGS,
    TRACED_POST_FORWARD,
    TRACED_PRE_BACKWARD,
    TRACED_PRE_BACKWARD_PREFETCH,
    TRACED_POST_BACKWARD,
    TRACED_POST_BACKWARD_PREFETCH,
    TRACED_POST_BACKWARD_RESHARD_ONLY,
    TRACED_RATE_LIMITER,
    TRACED_FORWARD_GATHER,
    TRACED_BACKWARD_GATHER,
    TRACED_SUM,
    TRACED_REDUCTION,
    TRACED_PARTS
};

struct trace {
    PyObject *range; /* owned; NULL without a profiler */
    uint64_t place;  /* previous place */
    enum traced part;
};

static const struct traced_part {
    const char *range; /* NULL for no range */
    enum progress_phase phase;
    /* true if the profiler's state is queried, false if the enclosing range's applies */
    bool queries_profiler;
    bool stays_open; /* true if the phase lasts until the next one begins */
} traced_parts[TRACED_PARTS] = {
    [TRACED_FORWARD] = {.range = "FullyShardedDataParallel.forward",
                        .phase = PROGRESS_FORWARD,
                        .queries_profiler = true},
    [TRACED_ROOT_PRE_FORWARD] = {.range = "FullyShardedDataParallel._root_pre_forward"},
    [TRACED_PRE_FORWARD] = {.range = "FullyShardedDataParallel._pre_forward"},
    [TRACED_PRE_FORWARD_PREFETCH] = {.range = "FullyShardedDataParallel._pre_forward_prefetch"},
    [TRACED_TO_KWARGS] = {.range = "FullyShardedDataParallel._to_kwargs"},
    [TRACED_POST_FORWARD] = {.range = "FullyShardedDataParallel._post_forward", .queries_profiler = true},
    [TRACED_PRE_BACKWARD] = {.range = "FullyShardedDataParallel._pre_backward_hook",
                             .phase = PROGRESS_BACKWARD,
                             .queries_profiler = true,
                             .stays_open = true},
    [TRACED_PRE_BACKWARD_PREFETCH] = {.range = "FullyShardedDataParallel._pre_backward_prefetch"},
    [TRACED_POST_BACKWARD] = {.range = "FullyShardedDataParallel._post_backward_hook",
                              .queries_profiler = true},
    [TRACED_POST_BACKWARD_PREFETCH] = {.range = "FullyShardedDataParallel._post_backward_prefetch"},
    [TRACED_POST_BACKWARD_RESHARD_ONLY] = {.range =
                                               "FullyShardedDataParallel._post_backward_hook_reshard_only",
                                           .queries_profiler = true},
    [TRACED_RATE_LIMITER] = {.range = "FullyShardedDataParallel.rate_limiter"},
    [TRACED_FORWARD_GATHER] = {.phase = PROGRESS_FORWARD_GATHER},
    [TRACED_BACKWARD_GATHER] = {.phase = PROGRESS_BACKWARD_GATHER},
    [TRACED_SUM] = {.phase = PROGRESS_BACKWARD},
    [TRACED_REDUCTION] = {.phase = PROGRESS_REDUCE},
};

/* Inline cleanup functions too, which the compiler would call. */
#define ALWAYS_INLINE inline __attribute__((always_inline))

/* `unit`: index in the table of progress.c, or -1. */
static ALWAYS_INLINE struct trace trace_begin(enum traced part, int32_t unit) {
    const struct traced_part *traced = &traced_parts[part];
    struct trace trace = {.part = part};
    if (traced->range)
        trace.range =
            traced->queries_profiler ? profile_begin(traced->range) : profile_begin_inner(traced->range);
    if (traced->phase)
        trace.place = progress_enter(unit, traced->phase);
    return trace;
}

static ALWAYS_INLINE void trace_end(struct trace *trace) {
    if (traced_parts[trace->part].phase && !traced_parts[trace->part].stays_open)
        progress_leave(trace->place);
    profile_end(trace->range);
}

/* Trace the rest of the block as this part. */
#define TRACE(part, unit)                                                                                    \
    __attribute__((cleanup(trace_end), unused)) struct trace trace = trace_begin(part, unit)

#endif
