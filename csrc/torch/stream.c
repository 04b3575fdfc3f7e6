#include "torch/stream.h"

#include <dlfcn.h>
#include <string.h>

/* ---- the driver's event functions, found where CUDA is ---- */

enum { CUDA_EVENT_DISABLE_TIMING = 2 };

static struct {
    int (*create)(void **event, unsigned flags);
    int (*destroy)(void *event);
    int (*record)(void *event, void *stream);
    int (*synchronize)(void *event);
    int (*wait)(void *stream, void *event, unsigned flags);
} driver;

static bool find_symbol(void *library, const char *name, void *field) {
    void *symbol = dlsym(library, name);
    memcpy(field, &symbol, sizeof symbol);
    return symbol != NULL;
}

static int driver_init(void) {
    if (driver.wait)
        return 0;
    void *library = dlopen("libcuda.so.1", RTLD_NOW);
    if (library && find_symbol(library, "cuEventCreate", &driver.create) &&
        find_symbol(library, "cuEventDestroy_v2", &driver.destroy) &&
        find_symbol(library, "cuEventRecord", &driver.record) &&
        find_symbol(library, "cuEventSynchronize", &driver.synchronize) &&
        find_symbol(library, "cuStreamWaitEvent", &driver.wait))
        return 0;
    PyErr_SetString(PyExc_RuntimeError, "the parameters are on CUDA, but libcuda.so.1 cannot be loaded");
    return -1;
}

static int driver_check(int code, const char *what) {
    if (code == 0)
        return 0;
    PyErr_Format(PyExc_RuntimeError, "%s failed with CUDA driver error %d", what, code);
    return -1;
}

/* ---- the CUDA backend ---- */

static int cuda_set(struct streams *streams, enum stream_role role) {
    PyObject *done = PyObject_CallFunctionObjArgs(streams->set_stream, streams->objects[role], NULL);
    Py_XDECREF(done);
    return done ? 0 : -1;
}

static int cuda_leave(struct streams *streams) {
    return cuda_set(streams, STREAM_COMPUTE);
}

static int cuda_record(struct streams *streams, enum stream_role role, stream_event *event) {
    if (!*event && driver_check(driver.create(event, CUDA_EVENT_DISABLE_TIMING), "cuEventCreate") < 0)
        return -1;
    return driver_check(driver.record(*event, streams->raw[role]), "cuEventRecord");
}

static int cuda_wait(struct streams *streams, enum stream_role role, stream_event event) {
    return driver_check(driver.wait(streams->raw[role], event, 0), "cuStreamWaitEvent");
}

static int cuda_synchronize(struct streams *streams, stream_event event) {
    int code;
    (void)streams;
    Py_BEGIN_ALLOW_THREADS code = driver.synchronize(event);
    Py_END_ALLOW_THREADS return driver_check(code, "cuEventSynchronize");
}

static void cuda_destroy(struct streams *streams, stream_event event) {
    (void)streams;
    driver.destroy(event);
}

static const struct stream_backend cuda_backend = {cuda_set,  cuda_leave,       cuda_record,
                                                   cuda_wait, cuda_synchronize, cuda_destroy};

static int adopt_stream(struct streams *streams, enum stream_role role, PyObject *stream) {
    PyObject *raw = stream ? PyObject_GetAttrString(stream, "cuda_stream") : NULL;
    streams->objects[role] = stream;
    if (!raw)
        return -1;
    streams->raw[role] = PyLong_AsVoidPtr(raw);
    Py_DECREF(raw);
    return PyErr_Occurred() ? -1 : 0;
}

static int cuda_init(struct streams *streams, PyObject *device) {
    PyObject *cuda = driver_init() < 0 ? NULL : PyImport_ImportModule("torch.cuda");
    int result = cuda ? 0 : -1;
    if (!result)
        result = adopt_stream(streams, STREAM_COMPUTE, PyObject_CallMethod(cuda, "current_stream", "O", device));
    for (int role = STREAM_UNSHARD; !result && role < STREAM_ROLES; role++)
        result = adopt_stream(streams, (enum stream_role)role, PyObject_CallMethod(cuda, "Stream", "O", device));
    if (!result)
        result = (streams->set_stream = PyObject_GetAttrString(cuda, "set_stream")) ? 0 : -1;
    streams->backend = &cuda_backend;
    Py_XDECREF(cuda);
    return result;
}

/* ---- life ---- */

int streams_init(struct streams *streams, PyObject *device) {
    memset(streams, 0, sizeof *streams);
    PyObject *type = PyObject_GetAttrString(device, "type");
    if (!type)
        return -1;
    bool is_cuda = PyUnicode_CompareWithASCIIString(type, "cuda") == 0;
    Py_DECREF(type);
    if (!is_cuda || cuda_init(streams, device) == 0)
        return 0;
    streams_fini(streams);
    return -1;
}

void streams_fini(struct streams *streams) {
    for (int role = 0; role < STREAM_ROLES; role++)
        Py_CLEAR(streams->objects[role]);
    Py_CLEAR(streams->set_stream);
    memset(streams, 0, sizeof *streams);
}

/* ---- verbs ---- */

int stream_enter(struct streams *streams, enum stream_role role) {
    return streams->backend ? streams->backend->enter(streams, role) : 0;
}

int stream_leave(struct streams *streams) {
    return streams->backend ? streams->backend->leave(streams) : 0;
}

int stream_record(struct streams *streams, enum stream_role role, stream_event *event) {
    return streams->backend ? streams->backend->record(streams, role, event) : 0;
}

int stream_wait(struct streams *streams, enum stream_role role, stream_event event) {
    return streams->backend && event ? streams->backend->wait(streams, role, event) : 0;
}

int stream_synchronize(struct streams *streams, stream_event event) {
    return streams->backend && event ? streams->backend->synchronize(streams, event) : 0;
}

void stream_event_destroy(struct streams *streams, stream_event *event) {
    if (streams->backend && *event)
        streams->backend->destroy(streams, *event);
    *event = NULL;
}
