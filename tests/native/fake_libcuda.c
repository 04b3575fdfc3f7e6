/* A stand-in for the driver: it writes down what is asked of it, with the context that was current.
 *
 * A stream of device d is the number 100 * (d + 1) + n, its context d + 1; the default stream, NULL, is of
 * the current context. */
#include <stdint.h>
#include <stdio.h>
#include <string.h>

static char calls[4096];
static uintptr_t contexts[8] = {0};
static int depth;
static uintptr_t events;

static int note(const char *what, uintptr_t event, uintptr_t stream) {
    size_t used = strlen(calls);
    uintptr_t context = contexts[depth];
    if (!context || (stream && stream / 100 != context))
        return 201; /* CUDA_ERROR_INVALID_CONTEXT */
    snprintf(calls + used, sizeof calls - used, "%s event %d stream %d context %d\n", what, (int)event,
             (int)stream, (int)context);
    return 0;
}

const char *take_calls(void) {
    static char taken[sizeof calls];
    memcpy(taken, calls, sizeof calls);
    calls[0] = 0;
    return taken;
}

void set_context(uintptr_t context) {
    depth = 0;
    contexts[0] = context;
}

int pushed_contexts(void) {
    return depth;
}

int cuEventCreate(void **event, unsigned flags) {
    *event = (void *)++events;
    return flags == 2 ? note("create", events, 0) : 1;
}

int cuEventDestroy_v2(void *event) {
    (void)event;
    return 0;
}

int cuEventRecord(void *event, void *stream) {
    return note("record", (uintptr_t)event, (uintptr_t)stream);
}

int cuEventSynchronize(void *event) {
    return note("synchronize", (uintptr_t)event, 0);
}

int cuStreamWaitEvent(void *stream, void *event, unsigned flags) {
    return flags == 0 ? note("wait", (uintptr_t)event, (uintptr_t)stream) : 1;
}

int cuStreamIsCapturing(void *stream, int *status) {
    (void)stream;
    *status = 0;
    return 0;
}

int cuStreamGetCtx(void *stream, void **context) {
    *context = (void *)((uintptr_t)stream / 100);
    return *context ? 0 : 201;
}

int cuCtxGetCurrent(void **context) {
    *context = (void *)contexts[depth];
    return 0;
}

int cuCtxPushCurrent_v2(void *context) {
    contexts[++depth] = (uintptr_t)context;
    return 0;
}

int cuCtxPopCurrent_v2(void **context) {
    *context = (void *)contexts[depth--];
    return 0;
}
