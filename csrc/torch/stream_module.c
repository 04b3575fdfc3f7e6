/* Streams and events of any device by the functions of torch's module of it, as torch.cuda and torch.xpu have
 * them. An event is a Python object here, and a stream is told by its number. */
#include "torch/stream_backend.h"

#include "torch/ref.h"

static int init(struct streams *streams) {
    (void)streams;
    return 0;
}

static int record(const struct streams *streams, const struct stream_handle *stream, stream_event *event) {
    if (!*event && !(*event = PyObject_CallMethod(streams->module, "Event", NULL)))
        return -1;
    return ref_done(PyObject_CallMethod(*event, "record", "O", stream->object));
}

static int wait(const struct streams *streams, const struct stream_handle *stream, stream_event event) {
    (void)streams;
    return ref_done(PyObject_CallMethod(stream->object, "wait_event", "O", event));
}

static int synchronize(const struct streams *streams, stream_event event) {
    (void)streams;
    return ref_done(PyObject_CallMethod(event, "synchronize", NULL));
}

static void destroy(stream_event event) {
    Py_DECREF((PyObject *)event);
}

static bool is_current(const struct streams *streams, const struct stream_handle *stream) {
    void *number = NULL;
    PyObject *current = PyObject_CallMethod(streams->module, "current_stream", "O", streams->device);
    bool same =
        current && stream_number(current, streams->backend->number, &number) == 0 && number == stream->raw;
    Py_XDECREF(current);
    PyErr_Clear();
    return same;
}

/* Graphs are captured of what the driver is given. */
static bool is_capturing(const struct streams *streams, const struct stream_handle *stream) {
    (void)streams;
    (void)stream;
    return false;
}

static int is_elsewhere(const struct streams *streams) {
    OWNED *index = PyObject_CallMethod(streams->module, "current_device", NULL);
    long current = index ? PyLong_AsLong(index) : -1;
    return PyErr_Occurred() ? -1 : current != streams->device_index;
}

const struct stream_backend module_backend = {
    .number = "stream_id",
    .init = init,
    .record = record,
    .wait = wait,
    .synchronize = synchronize,
    .destroy = destroy,
    .is_current = is_current,
    .is_capturing = is_capturing,
    .is_elsewhere = is_elsewhere,
};
