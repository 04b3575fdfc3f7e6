#include "torch/stream.h"

#include <dlfcn.h>
#include <string.h>

#include "torch/ref.h"
#include "torch/torch_abi.h"
#include "torch/trace.h"

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

/* `stream` is stolen. */
static int adopt_stream(struct streams *streams, enum stream_role role, PyObject *stream) {
    PyObject *raw = stream ? PyObject_GetAttrString(stream, "cuda_stream") : NULL;
    ref_set(&streams->objects[role], stream);
    if (!raw)
        return -1;
    streams->raw[role] = PyLong_AsVoidPtr(raw);
    Py_DECREF(raw);
    return PyErr_Occurred() ? -1 : 0;
}

/* A script may run its steps under another stream than the first one. */
static int cuda_follow(struct streams *streams) {
    void *current = NULL;
    if (torch_abi.aoti_torch_get_current_cuda_stream &&
        !torch_abi.aoti_torch_get_current_cuda_stream(streams->device_index, &current) &&
        current == streams->raw[STREAM_COMPUTE])
        return 0;
    return adopt_stream(streams, STREAM_COMPUTE,
                        PyObject_CallFunctionObjArgs(streams->current_stream, streams->device, NULL));
}

static const struct stream_backend cuda_backend = {cuda_follow, cuda_set,         cuda_leave,  cuda_record,
                                                   cuda_wait,   cuda_synchronize, cuda_destroy};

static int read_index(PyObject *device, int32_t *index) {
    PyObject *value = PyObject_GetAttrString(device, "index");
    *index = value && value != Py_None ? (int32_t)PyLong_AsLong(value) : 0;
    Py_XDECREF(value);
    return PyErr_Occurred() ? -1 : 0;
}

static int cuda_init(struct streams *streams, PyObject *device) {
    PyObject *cuda = driver_init() < 0 ? NULL : PyImport_ImportModule("torch.cuda");
    int result = cuda ? read_index(device, &streams->device_index) : -1;
    streams->backend = &cuda_backend;
    streams->device = Py_NewRef(device);
    if (!result)
        result = (streams->current_stream = PyObject_GetAttrString(cuda, "current_stream")) ? 0 : -1;
    if (!result)
        result = (streams->set_stream = PyObject_GetAttrString(cuda, "set_stream")) ? 0 : -1;
    if (!result)
        result = cuda_follow(streams);
    for (int role = STREAM_UNSHARD; !result && role < STREAM_ROLES; role++)
        result = adopt_stream(streams, (enum stream_role)role, PyObject_CallMethod(cuda, "Stream", "O", device));
    Py_XDECREF(cuda);
    return result;
}

/* ---- the recording backend: an event is a number ---- */

static void *event_of_number(uintptr_t number) {
    return (void *)number; /* never followed */
}

static int recording_follow(struct streams *streams) {
    (void)streams;
    return 0;
}

static int recording_enter(struct streams *streams, enum stream_role role) {
    (void)streams;
    trace_stream("enter", (int)role, 0);
    return 0;
}

static int recording_leave(struct streams *streams) {
    (void)streams;
    trace_stream("leave", -1, 0);
    return 0;
}

static int recording_record(struct streams *streams, enum stream_role role, stream_event *event) {
    static uintptr_t last;
    (void)streams;
    if (!*event)
        *event = event_of_number(++last);
    trace_stream("record", (int)role, (size_t)*event);
    return 0;
}

static int recording_wait(struct streams *streams, enum stream_role role, stream_event event) {
    (void)streams;
    trace_stream("wait", (int)role, (size_t)event);
    return 0;
}

static int recording_synchronize(struct streams *streams, stream_event event) {
    (void)streams;
    trace_stream("synchronize", -1, (size_t)event);
    return 0;
}

static void recording_destroy(struct streams *streams, stream_event event) {
    (void)streams;
    trace_stream("destroy", -1, (size_t)event);
}

static const struct stream_backend recording_backend = {recording_follow, recording_enter, recording_leave,
                                                        recording_record, recording_wait,  recording_synchronize,
                                                        recording_destroy};

/* ---- life ---- */

int streams_init(struct streams *streams, PyObject *device) {
    memset(streams, 0, sizeof *streams);
    if (trace_recorder) {
        streams->backend = &recording_backend;
        return 0;
    }
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
    Py_CLEAR(streams->current_stream);
    Py_CLEAR(streams->device);
    memset(streams, 0, sizeof *streams);
}

/* ---- verbs ---- */

int stream_follow(struct streams *streams) {
    return streams->backend ? streams->backend->follow(streams) : 0;
}

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
