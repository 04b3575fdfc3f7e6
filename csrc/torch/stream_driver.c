/* Streams and events of CUDA by the driver's functions: a call of one is a hundredth of a call of torch's. */
#include "torch/stream_backend.h"

#include <dlfcn.h>
#include <string.h>

#include "torch/torch_abi.h"

enum { CUDA_EVENT_DISABLE_TIMING = 2 };

static struct {
    int (*create)(void **event, unsigned flags);
    int (*destroy)(void *event);
    int (*record)(void *event, void *stream);
    int (*synchronize)(void *event);
    int (*wait)(void *stream, void *event, unsigned flags);
    int (*is_capturing)(void *stream, int *status);
    int (*context_of_stream)(void *stream, void **context);
    int (*current_context)(void **context);
    int (*push_context)(void *context);
    int (*pop_context)(void **context);
} driver;

static bool find_symbol(void *library, const char *name, void *field) {
    void *symbol = dlsym(library, name);
    memcpy(field, &symbol, sizeof symbol);
    return symbol != NULL;
}

bool driver_is_there(void) {
    if (driver.pop_context)
        return true;
    void *library = dlopen("libcuda.so.1", RTLD_NOW);
    return library && find_symbol(library, "cuEventCreate", &driver.create) &&
           find_symbol(library, "cuEventDestroy_v2", &driver.destroy) &&
           find_symbol(library, "cuEventRecord", &driver.record) &&
           find_symbol(library, "cuEventSynchronize", &driver.synchronize) &&
           find_symbol(library, "cuStreamWaitEvent", &driver.wait) &&
           find_symbol(library, "cuStreamIsCapturing", &driver.is_capturing) &&
           find_symbol(library, "cuStreamGetCtx", &driver.context_of_stream) &&
           find_symbol(library, "cuCtxGetCurrent", &driver.current_context) &&
           find_symbol(library, "cuCtxPushCurrent_v2", &driver.push_context) &&
           find_symbol(library, "cuCtxPopCurrent_v2", &driver.pop_context);
}

static int check(int code, const char *what) {
    if (code == 0)
        return 0;
    return RAISED(PyExc_RuntimeError, "%s failed with CUDA driver error %d", what, code);
}

/* [Note: contexts] Events are made in the current context, and the default stream, whose handle is NULL, is
 * that of the current context. A thread may have another device's, or none: so the device's is current while
 * the driver is asked. */
static void *current_context(void) {
    void *context = NULL;
    return driver.current_context(&context) == 0 ? context : NULL;
}

static int push_context(const struct streams *streams, bool *pushed) {
    *pushed = current_context() != streams->context;
    return *pushed ? check(driver.push_context(streams->context), "cuCtxPushCurrent") : 0;
}

static void pop_context(bool pushed) {
    void *context;
    if (pushed)
        driver.pop_context(&context);
}

static int init(struct streams *streams) {
    return check(driver.context_of_stream(streams->roles[STREAM_UNSHARD].raw, &streams->context),
                 "cuStreamGetCtx");
}

static int record(const struct streams *streams, const struct stream_handle *stream, stream_event *event) {
    bool pushed;
    if (push_context(streams, &pushed) < 0)
        return -1;
    int result = *event ? 0 : check(driver.create(event, CUDA_EVENT_DISABLE_TIMING), "cuEventCreate");
    if (!result)
        result = check(driver.record(*event, stream->raw), "cuEventRecord");
    pop_context(pushed);
    return result;
}

static int wait(const struct streams *streams, const struct stream_handle *stream, stream_event event) {
    bool pushed;
    if (push_context(streams, &pushed) < 0)
        return -1;
    int result = check(driver.wait(stream->raw, event, 0), "cuStreamWaitEvent");
    pop_context(pushed);
    return result;
}

static int synchronize(const struct streams *streams, stream_event event) {
    bool pushed;
    int code;
    if (push_context(streams, &pushed) < 0)
        return -1;
    Py_BEGIN_ALLOW_THREADS code = driver.synchronize(event);
    Py_END_ALLOW_THREADS pop_context(pushed);
    return check(code, "cuEventSynchronize");
}

static void destroy(stream_event event) {
    driver.destroy(event);
}

static bool is_current(const struct streams *streams, const struct stream_handle *stream) {
    void *current = NULL;
    return torch_abi.aoti_torch_get_current_cuda_stream &&
           !torch_abi.aoti_torch_get_current_cuda_stream(streams->device_index, &current) &&
           current == stream->raw;
}

static bool is_capturing(const struct streams *streams, const struct stream_handle *stream) {
    bool pushed;
    int status = 0;
    if (push_context(streams, &pushed) < 0) {
        PyErr_Clear();
        return false;
    }
    bool capturing = driver.is_capturing(stream->raw, &status) == 0 && status != 0;
    pop_context(pushed);
    return capturing;
}

static int is_elsewhere(const struct streams *streams) {
    void *context = current_context();
    return context && context != streams->context;
}

const struct stream_backend driver_backend = {
    .number = "cuda_stream",
    .init = init,
    .record = record,
    .wait = wait,
    .synchronize = synchronize,
    .destroy = destroy,
    .is_current = is_current,
    .is_capturing = is_capturing,
    .is_elsewhere = is_elsewhere,
};
