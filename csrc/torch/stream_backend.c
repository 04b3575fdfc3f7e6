#include "torch/stream_backend.h"

#include <dlfcn.h>

#include "torch/torch_abi.h"

/* ---- CUDA, by the driver's functions, whose calls are a hundred times cheaper than torch's ---- */

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

bool driver_is_available(void) {
    if (driver.pop_context)
        return true;
    void *library = dlopen("libcuda.so.1", RTLD_NOW);
    return torch_abi_find(library, "cuEventCreate", &driver.create) &&
           torch_abi_find(library, "cuEventDestroy_v2", &driver.destroy) &&
           torch_abi_find(library, "cuEventRecord", &driver.record) &&
           torch_abi_find(library, "cuEventSynchronize", &driver.synchronize) &&
           torch_abi_find(library, "cuStreamWaitEvent", &driver.wait) &&
           torch_abi_find(library, "cuStreamIsCapturing", &driver.is_capturing) &&
           torch_abi_find(library, "cuStreamGetCtx", &driver.context_of_stream) &&
           torch_abi_find(library, "cuCtxGetCurrent", &driver.current_context) &&
           torch_abi_find(library, "cuCtxPushCurrent_v2", &driver.push_context) &&
           torch_abi_find(library, "cuCtxPopCurrent_v2", &driver.pop_context);
}

static int check(int code, const char *function) {
    if (code == 0)
        return 0;
    return RAISED(PyExc_RuntimeError, "%s failed with CUDA driver error %d", function, code);
}

/* [Note: contexts] The driver creates events in the current context, and a NULL stream is the default stream
 * of the current context. A thread may have the context of a different device, or none. The functions below
 * therefore make the context of the device current for their calls. */
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

static int driver_init(struct streams *streams) {
    return check(driver.context_of_stream(streams->roles[STREAM_UNSHARD].raw, &streams->context),
                 "cuStreamGetCtx");
}

static int driver_record(const struct streams *streams, const struct stream_handle *stream, void **event) {
    bool pushed;
    if (push_context(streams, &pushed) < 0)
        return -1;
    int result = *event ? 0 : check(driver.create(event, CUDA_EVENT_DISABLE_TIMING), "cuEventCreate");
    if (!result)
        result = check(driver.record(*event, stream->raw), "cuEventRecord");
    pop_context(pushed);
    return result;
}

static int driver_wait(const struct streams *streams, const struct stream_handle *stream, void *event) {
    bool pushed;
    if (push_context(streams, &pushed) < 0)
        return -1;
    int result = check(driver.wait(stream->raw, event, 0), "cuStreamWaitEvent");
    pop_context(pushed);
    return result;
}

static int driver_synchronize(const struct streams *streams, void *event) {
    bool pushed;
    int code;
    if (push_context(streams, &pushed) < 0)
        return -1;
    Py_BEGIN_ALLOW_THREADS code = driver.synchronize(event);
    Py_END_ALLOW_THREADS pop_context(pushed);
    return check(code, "cuEventSynchronize");
}

static void driver_destroy(void *event) {
    driver.destroy(event);
}

static bool driver_is_current(const struct streams *streams, const struct stream_handle *stream) {
    void *current = NULL;
    return torch_abi.aoti_torch_get_current_cuda_stream &&
           !torch_abi.aoti_torch_get_current_cuda_stream(streams->device_index, &current) &&
           current == stream->raw;
}

static bool driver_is_capturing(const struct streams *streams, const struct stream_handle *stream) {
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

static int driver_is_other_device_current(const struct streams *streams) {
    void *context = current_context();
    return context && context != streams->context;
}

const struct stream_backend driver_backend = {
    .id_attribute = "cuda_stream",
    .init = driver_init,
    .record = driver_record,
    .wait = driver_wait,
    .synchronize = driver_synchronize,
    .destroy = driver_destroy,
    .is_current = driver_is_current,
    .is_capturing = driver_is_capturing,
    .is_other_device_current = driver_is_other_device_current,
};

/* ---- other devices, by the functions of torch's module for the device, such as torch.xpu. Events are Python
 * objects, and streams are compared by stream_id. ---- */

static int module_record(const struct streams *streams, const struct stream_handle *stream, void **event) {
    if (!*event && !(*event = PyObject_CallMethod(streams->module, "Event", NULL)))
        return -1;
    return ref_done(PyObject_CallMethod(*event, "record", "O", stream->object));
}

static int module_wait(const struct streams *streams, const struct stream_handle *stream, void *event) {
    (void)streams;
    return ref_done(PyObject_CallMethod(stream->object, "wait_event", "O", event));
}

static int module_synchronize(const struct streams *streams, void *event) {
    (void)streams;
    return ref_done(PyObject_CallMethod(event, "synchronize", NULL));
}

static void module_destroy(void *event) {
    Py_DECREF((PyObject *)event);
}

static bool module_is_current(const struct streams *streams, const struct stream_handle *stream) {
    void *number = NULL;
    PyObject *current = PyObject_CallMethod(streams->module, "current_stream", "O", streams->device);
    bool same = current && stream_number(current, streams->backend->id_attribute, &number) == 0 &&
                number == stream->raw;
    Py_XDECREF(current);
    PyErr_Clear();
    return same;
}

static int module_is_other_device_current(const struct streams *streams) {
    OWNED *index = PyObject_CallMethod(streams->module, "current_device", NULL);
    long current = index ? PyLong_AsLong(index) : -1;
    return PyErr_Occurred() ? -1 : current != streams->device_index;
}

const struct stream_backend module_backend = {
    .id_attribute = "stream_id",
    .record = module_record,
    .wait = module_wait,
    .synchronize = module_synchronize,
    .destroy = module_destroy,
    .is_current = module_is_current,
    .is_other_device_current = module_is_other_device_current,
};
