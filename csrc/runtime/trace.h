/* What others see of a step: ranges in torch's profiler, under the names that users grep traces for (D-130), and where this rank is, in
 * the flight recorder. All of them are listed in trace.c, and nothing else in this folder opens one.
 *
 * Invariant: what was begun last ends first, also after an exception, which stays as it is. */
#ifndef FSDP_RUNTIME_TRACE_H
#define FSDP_RUNTIME_TRACE_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stdint.h>

#include "runtime/flight_recorder.h"

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
    TRACED_REDUCTION,
    TRACED_PARTS
};

struct trace {
    PyObject *range; /* owned; NULL where no profiler is on */
    uint64_t place;  /* that was left */
    enum traced part;
};

/* `unit`: its index in the flight recorder, or -1. */
struct trace trace_begin(enum traced part, int32_t unit);
void trace_end(struct trace trace);
enum recorder_phase trace_phase(enum traced part);
void trace_end_step(void); /* a backward has ended */
void trace_abandon(void);  /* after an exception: whatever was begun is over */

#endif
