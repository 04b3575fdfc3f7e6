#include "torch/stream.h"

#include <dlfcn.h>
#include <string.h>

#include "torch/ref.h"
#include "torch/torch_abi.h"

/* ---- the driver's functions, found where CUDA is ---- */

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

static int driver_init(void) {
    if (driver.pop_context)
        return 0;
    void *library = dlopen("libcuda.so.1", RTLD_NOW);
    if (library && find_symbol(library, "cuEventCreate", &driver.create) &&
        find_symbol(library, "cuEventDestroy_v2", &driver.destroy) &&
        find_symbol(library, "cuEventRecord", &driver.record) &&
        find_symbol(library, "cuEventSynchronize", &driver.synchronize) &&
        find_symbol(library, "cuStreamWaitEvent", &driver.wait) &&
        find_symbol(library, "cuStreamIsCapturing", &driver.is_capturing) &&
        find_symbol(library, "cuStreamGetCtx", &driver.context_of_stream) &&
        find_symbol(library, "cuCtxGetCurrent", &driver.current_context) &&
        find_symbol(library, "cuCtxPushCurrent_v2", &driver.push_context) &&
        find_symbol(library, "cuCtxPopCurrent_v2", &driver.pop_context))
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

/* [Note: contexts] Events are made in the current context, and the default stream, whose handle is NULL, is that of the current
 * context. A thread may have another device's, or none: so the device's is current while the driver is asked. */
static void *current_context(void) {
    void *context = NULL;
    return driver.current_context(&context) == 0 ? context : NULL;
}

static int push_context(const struct streams *streams, bool *pushed) {
    *pushed = current_context() != streams->context;
    return *pushed ? driver_check(driver.push_context(streams->context), "cuCtxPushCurrent") : 0;
}

static void pop_context(bool pushed) {
    void *context;
    if (pushed)
        driver.pop_context(&context);
}

/* ---- on CUDA ---- */

static int set_current(struct streams *streams, PyObject *stream) {
    PyObject *done = PyObject_CallFunctionObjArgs(streams->set_stream, stream, NULL);
    Py_XDECREF(done);
    return done ? 0 : -1;
}

static int record_on(struct streams *streams, enum stream_role role, stream_event *event) {
    if (!*event && driver_check(driver.create(event, CUDA_EVENT_DISABLE_TIMING), "cuEventCreate") < 0)
        return -1;
    return driver_check(driver.record(*event, streams->raw[role]), "cuEventRecord");
}

static int wait_on(struct streams *streams, enum stream_role role, stream_event event) {
    return driver_check(driver.wait(streams->raw[role], event, 0), "cuStreamWaitEvent");
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

static bool is_followed(const struct streams *streams) {
    void *current = NULL;
    return streams->objects[STREAM_COMPUTE] && torch_abi.aoti_torch_get_current_cuda_stream &&
           !torch_abi.aoti_torch_get_current_cuda_stream(streams->device_index, &current) &&
           current == streams->raw[STREAM_COMPUTE];
}

/* torch numbers its own streams; the number of one that it has only been told of is the driver's handle. */
static int note_external(struct streams *streams) {
    PyObject *number = PyObject_GetAttrString(streams->objects[STREAM_COMPUTE], "stream_id");
    void *handle = number ? PyLong_AsVoidPtr(number) : NULL;
    streams->is_external = handle && handle == streams->raw[STREAM_COMPUTE];
    Py_XDECREF(number);
    return PyErr_Occurred() ? -1 : 0;
}

static int adopt_current(struct streams *streams) {
    PyObject *stream = PyObject_CallMethod(streams->cuda, "current_stream", "O", streams->device);
    return adopt_stream(streams, STREAM_COMPUTE, stream) < 0 ? -1 : note_external(streams);
}

/* Whether a CUDA graph is made of what is enqueued there. */
static bool is_capturing(const struct streams *streams) {
    int status = 0;
    return driver.is_capturing(streams->raw[STREAM_COMPUTE], &status) == 0 && status != 0;
}

static void add_former(struct streams *streams, void *raw) {
    for (int i = 0; i < streams->num_former && i < MOST_FORMER; i++)
        if (streams->former[i] == raw)
            return;
    streams->former[streams->num_former++ % MOST_FORMER] = raw;
}

/* A capture takes no wait for what is outside of it; whoever begins one has synchronised the device. */
static int hand_over(struct streams *streams) {
    void *former = streams->raw[STREAM_COMPUTE];
    bool has_ended = streams->has_ended;
    bool was_capturing = !has_ended && is_capturing(streams);
    streams->has_ended = false;
    if ((!has_ended && record_on(streams, STREAM_COMPUTE, &streams->followed) < 0) || adopt_current(streams) < 0)
        return -1;
    if (is_capturing(streams) && !was_capturing)
        return 0;
    streams->left_ended = streams->left_ended || has_ended;
    if (!has_ended)
        add_former(streams, former);
    return wait_on(streams, STREAM_COMPUTE, streams->followed);
}

/* A script may run its steps, parts of a model, or a backward under other streams than the rest; and the engine runs a unit's
 * hook under the stream that was current when its anchor was made. */
int stream_follow(struct streams *streams) {
    bool pushed;
    if (!streams_are_real(streams) || streams->entered)
        return 0;
    if (is_followed(streams)) {
        streams->has_ended = false;
        return 0;
    }
    if (!streams->objects[STREAM_COMPUTE])
        return adopt_current(streams);
    if (push_context(streams, &pushed) < 0)
        return -1;
    int result = hand_over(streams);
    pop_context(pushed);
    return result;
}

static int give_back(struct streams *streams) {
    int result = record_on(streams, STREAM_COMPUTE, &streams->followed);
    for (int i = 0; !result && i < streams->num_former && i < MOST_FORMER; i++)
        if (streams->former[i] != streams->raw[STREAM_COMPUTE])
            result = driver_check(driver.wait(streams->former[i], streams->followed, 0), "cuStreamWaitEvent");
    return result;
}

int stream_give_back(struct streams *streams) {
    bool pushed;
    if (!streams->num_former)
        return 0;
    if (stream_follow(streams) < 0 || push_context(streams, &pushed) < 0)
        return -1;
    int result = is_capturing(streams) ? 0 : give_back(streams); /* a graph has memory of its own */
    pop_context(pushed);
    return result;
}

int stream_end_backward(struct streams *streams) {
    bool waits = streams->left_ended && !is_capturing(streams);
    streams->num_former = 0;
    streams->left_ended = false;
    if (waits && (stream_record(streams, STREAM_COMPUTE, &streams->followed) < 0 ||
                  stream_synchronize(streams, streams->followed) < 0))
        return -1;
    stream_note_end(streams);
    return 0;
}

void stream_note_end(struct streams *streams) {
    bool pushed;
    if (!streams->is_external || PyErr_Occurred())
        return;
    if (push_context(streams, &pushed) == 0) {
        streams->has_ended = !is_capturing(streams) && record_on(streams, STREAM_COMPUTE, &streams->followed) == 0;
        pop_context(pushed);
    }
    PyErr_Clear();
}

/* To set a stream makes its device the current one. */
static int enter(struct streams *streams, PyObject *stream) {
    void *context = current_context();
    if (streams->entered)
        return set_current(streams, stream);
    Py_CLEAR(streams->left_device);
    if (stream_follow(streams) < 0)
        return -1;
    if (context && context != streams->context) {
        ref_set(&streams->left_device, PyObject_CallMethod(streams->cuda, "current_device", NULL));
        if (!streams->left_device)
            return -1;
    }
    streams->entered = set_current(streams, stream) == 0;
    return streams->entered ? 0 : -1;
}

int stream_enter(struct streams *streams, enum stream_role role) {
    return streams_are_real(streams) ? enter(streams, streams->objects[role]) : 0;
}

int stream_enter_lasting(struct streams *streams) {
    if (!streams_are_real(streams))
        return 0;
    if (stream_follow(streams) < 0)
        return -1;
    PyObject *stream = streams->is_external ? PyObject_CallMethod(streams->cuda, "default_stream", "O", streams->device)
                                            : Py_NewRef(streams->objects[STREAM_COMPUTE]);
    int result = stream ? enter(streams, stream) : -1;
    Py_XDECREF(stream);
    return result;
}

static int leave(struct streams *streams) {
    PyObject *left = streams->left_device;
    streams->left_device = NULL;
    streams->entered = false;
    int result = set_current(streams, streams->objects[STREAM_COMPUTE]);
    PyObject *done = !result && left ? PyObject_CallMethod(streams->cuda, "set_device", "O", left) : NULL;
    if (left && !done)
        result = -1;
    Py_XDECREF(done);
    Py_XDECREF(left);
    return result;
}

/* What was done in between may have failed: its exception stays. */
int stream_leave(struct streams *streams) {
    if (!streams_are_real(streams))
        return 0;
    PyObject *type, *value, *traceback;
    PyErr_Fetch(&type, &value, &traceback);
    int result = leave(streams);
    if (type)
        PyErr_Restore(type, value, traceback);
    return result;
}

int stream_record(struct streams *streams, enum stream_role role, stream_event *event) {
    bool pushed;
    if (!streams_are_real(streams))
        return 0;
    if (stream_follow(streams) < 0 || push_context(streams, &pushed) < 0)
        return -1;
    int result = record_on(streams, role, event);
    pop_context(pushed);
    return result;
}

int stream_wait(struct streams *streams, enum stream_role role, stream_event event) {
    bool pushed;
    if (!event)
        return 0;
    if (stream_follow(streams) < 0 || push_context(streams, &pushed) < 0)
        return -1;
    int result = wait_on(streams, role, event);
    pop_context(pushed);
    return result;
}

int stream_synchronize(struct streams *streams, stream_event event) {
    bool pushed;
    int code;
    if (!event)
        return 0;
    if (push_context(streams, &pushed) < 0)
        return -1;
    Py_BEGIN_ALLOW_THREADS code = driver.synchronize(event);
    Py_END_ALLOW_THREADS pop_context(pushed);
    return driver_check(code, "cuEventSynchronize");
}

void stream_event_destroy(struct streams *streams, stream_event *event) {
    (void)streams;
    if (*event)
        driver.destroy(*event);
    *event = NULL;
}

/* ---- life ---- */

static int read_index(PyObject *device, int32_t *index) {
    PyObject *value = PyObject_GetAttrString(device, "index");
    *index = value && value != Py_None ? (int32_t)PyLong_AsLong(value) : 0;
    Py_XDECREF(value);
    return PyErr_Occurred() ? -1 : 0;
}

/* What computation waits for soonest goes first: gathers and reduce-scatters before computation, beside
 * which the all-reduce of a hybrid reduction runs, as nobody waits for that until the end. */
static PyObject *new_stream(struct streams *streams, enum stream_role role) {
    int priority = role == STREAM_ALL_REDUCE ? 0 : -1;
    return PyObject_CallMethod(streams->cuda, "Stream", "Oi", streams->device, priority);
}

/* The side streams first: by one of them the driver tells the context. */
static int cuda_init(struct streams *streams, PyObject *device) {
    if (driver_init() < 0 || !(streams->cuda = PyImport_ImportModule("torch.cuda")))
        return -1;
    int result = read_index(device, &streams->device_index);
    streams->device = Py_NewRef(device);
    if (!result)
        result = (streams->set_stream = PyObject_GetAttrString(streams->cuda, "set_stream")) ? 0 : -1;
    for (int role = STREAM_COMPUTE + 1; !result && role < STREAM_ROLES; role++)
        result = adopt_stream(streams, (enum stream_role)role, new_stream(streams, (enum stream_role)role));
    if (!result)
        result =
            driver_check(driver.context_of_stream(streams->raw[STREAM_UNSHARD], &streams->context), "cuStreamGetCtx");
    return result ? -1 : stream_follow(streams);
}

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
    stream_event_destroy(streams, &streams->followed);
    Py_CLEAR(streams->cuda);
    Py_CLEAR(streams->set_stream);
    Py_CLEAR(streams->device);
    Py_CLEAR(streams->left_device);
    memset(streams, 0, sizeof *streams);
}
