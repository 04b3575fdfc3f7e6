/* Observability of a step: ranges in torch's profiler, under FSDP1's names (users search traces for them),
 * and the progress of this rank: number of finished backwards, phase, and unit of the phase, for error
 * messages, SIGUSR1 and torch's debug server. All traced parts are listed here; nothing else in csrc/runtime
 * opens a range. The functions are inline because the part is a constant at nearly every call.
 *
 * Invariants: traced parts are nested, also when an exception is raised, which is kept. Phase and unit of the
 * progress are one aligned word, so that a signal handler or another thread never reads the phase of one unit
 * with another unit. */
#ifndef FSDP_RUNTIME_TRACE_H
#define FSDP_RUNTIME_TRACE_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "torch/py_torch.h"

enum progress_phase {
    PROGRESS_IDLE,
    PROGRESS_FORWARD,
    PROGRESS_FORWARD_GATHER, /* waits in the all-gather of a forward */
    PROGRESS_BACKWARD,
    PROGRESS_BACKWARD_GATHER,
    PROGRESS_REDUCE, /* waits in the reduction of gradients */
    PROGRESS_SAVE,
    PROGRESS_LOAD,
    PROGRESS_STATE_DICT,
    PROGRESS_LOAD_STATE_DICT,
    PROGRESS_OPTIM_STATE_DICT,
    PROGRESS_SUMMON,
    PROGRESS_WRAP,
    PROGRESS_PHASES
};

enum { PROGRESS_NAME_NBYTES = 128, PROGRESS_CAPACITY = 4096, PROGRESS_TEXT_NBYTES = 320 };

extern struct progress {
    volatile uint64_t step;  /* number of backwards finished on this rank */
    volatile uint64_t place; /* phase << 32 | index of the unit's name */
} progress;

/* Texts such as "waits in the all-gather of "; the name of a unit follows in phases of a step. */
extern const char *const progress_phases[PROGRESS_PHASES];

/* Return an index for the unit's name, or -1 if PROGRESS_CAPACITY names are in use. */
int32_t progress_add_unit(const char *name);
/* Write "step 3: waits in the all-gather of layers.0". Safe in a signal handler. */
void progress_describe(char text[PROGRESS_TEXT_NBYTES]);
/* Print the description, after "fsdp_c: rank N, ", to stderr on SIGUSR1, unless the process handles that
 * signal already. Returns 1 if it is printed from now on, 0 if not, -1 with errno on failure. */
int progress_print_on_signal(int64_t rank);

/* Enter a phase and return the previous place, for progress_leave. */
static inline uint64_t progress_enter(int32_t unit, enum progress_phase phase) {
    uint64_t previous = progress.place;
    progress.place = (uint64_t)phase << 32 | (uint32_t)unit;
    return previous;
}

static inline void progress_leave(uint64_t place) {
    progress.place = place;
}

/* ---- traced parts ---- */

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
