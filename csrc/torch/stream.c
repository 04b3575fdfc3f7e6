#include "torch/stream.h"

#include <string.h>

#include "torch/kernel_library.h"
#include "torch/ref.h"
#include "torch/stream_backend.h"

/* ---- the compute stream ---- */

static int set_current(struct streams *streams, PyObject *stream) {
    return ref_done(PyObject_CallFunctionObjArgs(streams->set_stream, stream, NULL));
}

/* [Note: implied waits] A stream comes after a point of another stream if it waited for that point, for a later
 * one, or for a third stream that comes after it. Vector clocks of the roles show this, and an implied wait makes
 * no call of the driver. Waits of a side stream are kept until work is enqueued there: the last point of another
 * stream implies the earlier ones, and a stream without work needs no wait.
 *
 * A new compute stream comes after the former one (switch_compute_stream), so the role keeps its clock. The
 * capture of a CUDA graph begins on a synchronised device, and its points are later than all earlier points: a
 * wait that forks or joins a stream of a capture is never implied. */

/* Return true if the work of `role` comes after `event` once the kept waits are issued. */
static bool is_implied(const struct streams *streams, enum stream_role role, stream_event event) {
    int64_t point = event->clock[event->role];
    if (streams->clocks[role][event->role] >= point)
        return true;
    for (int other = 0; other < STREAM_ROLES; other++) {
        stream_event kept = streams->kept_waits[role][other];
        if (kept && kept != event && kept->clock[event->role] >= point)
            return true;
    }
    return false;
}

static int issue_wait(struct streams *streams, enum stream_role role, stream_event event) {
    int64_t *clock = streams->clocks[role];
    if (streams->backend->wait(streams, &streams->roles[role], event->event) < 0)
        return -1;
    for (int other = 0; other < STREAM_ROLES; other++)
        if (clock[other] < event->clock[other])
            clock[other] = event->clock[other];
    return 0;
}

/* Drop a reference, of a stream_event or of a kept wait. The mark is spare after the last one. */
static void release_mark(struct streams *streams, struct stream_mark *mark) {
    if (mark && --mark->num_references == 0) {
        mark->next_spare = streams->spare_marks;
        streams->spare_marks = mark;
    }
}

void stream_event_share(struct streams *streams, stream_event event, stream_event *shared) {
    if (event)
        event->num_references++;
    release_mark(streams, *shared);
    *shared = event;
}

void stream_event_destroy(struct streams *streams, stream_event *event) {
    release_mark(streams, *event);
    *event = NULL;
}

static int issue_kept_waits(struct streams *streams, enum stream_role role) {
    for (int other = 0; other < STREAM_ROLES; other++) {
        stream_event event = streams->kept_waits[role][other];
        if (event && !is_implied(streams, role, event) && issue_wait(streams, role, event) < 0)
            return -1;
        stream_event_destroy(streams, &streams->kept_waits[role][other]);
    }
    return 0;
}

static void drop_kept_waits(struct streams *streams) {
    for (int role = 0; role < STREAM_ROLES; role++)
        for (int other = 0; other < STREAM_ROLES; other++)
            stream_event_destroy(streams, &streams->kept_waits[role][other]);
}

static int record_on(struct streams *streams, enum stream_role role, stream_event *event) {
    if (issue_kept_waits(streams, role) < 0)
        return -1;
    if (*event && (*event)->num_references > 1) /* others refer to the earlier point */
        stream_event_destroy(streams, event);
    struct stream_mark *mark = *event;
    if (!mark && (mark = streams->spare_marks))
        streams->spare_marks = mark->next_spare;
    if (!mark && !(mark = PyMem_Calloc(1, sizeof *mark))) {
        PyErr_NoMemory();
        return -1;
    }
    mark->num_references = 1;
    *event = mark;
    if (streams->backend->record(streams, &streams->roles[role], &mark->event) < 0)
        return -1;
    streams->clocks[role][role]++;
    mark->role = role;
    memcpy(mark->clock, streams->clocks[role], sizeof mark->clock);
    return 0;
}

static int wait_on(struct streams *streams, enum stream_role role, stream_event event) {
    if (is_implied(streams, role, event))
        return 0;
    /* no stream_enter precedes the next work: the script enqueues on the compute stream at any time */
    if (role == STREAM_COMPUTE || (streams->entered && streams->entered_role == role))
        return issue_wait(streams, role, event);
    stream_event_share(streams, event, &streams->kept_waits[role][event->role]);
    return 0;
}

/* `stream` is stolen. */
static int adopt_stream(struct streams *streams, enum stream_role role, PyObject *stream) {
    ref_set(&streams->roles[role].object, stream);
    return stream ? stream_number(stream, streams->backend->id_attribute, &streams->roles[role].raw) : -1;
}

/* Set is_external. The stream_id of an external stream is its cudaStream_t, that of torch's streams is
 * not. */
static int detect_external(struct streams *streams) {
    PyObject *stream = streams->roles[STREAM_COMPUTE].object;
    void *number = NULL, *handle = NULL;
    streams->is_external = false;
    if (stream_number(stream, "stream_id", &number) < 0)
        return -1;
    if (stream_number(stream, "cuda_stream", &handle) == 0)
        streams->is_external = number && number == handle;
    else if (PyErr_ExceptionMatches(PyExc_AttributeError))
        PyErr_Clear();
    return PyErr_Occurred() ? -1 : 0;
}

static int adopt_current(struct streams *streams) {
    PyObject *stream = PyObject_CallMethod(streams->module, "current_stream", "O", streams->device);
    return adopt_stream(streams, STREAM_COMPUTE, stream) < 0 ? -1 : detect_external(streams);
}

static bool is_capturing(const struct streams *streams) {
    const struct stream_backend *backend = streams->backend;
    return backend->is_capturing && backend->is_capturing(streams, &streams->roles[STREAM_COMPUTE]);
}

static void clear_former(struct streams *streams) {
    for (int i = 0; i < MAX_FORMER; i++)
        Py_CLEAR(streams->former[i].object);
    streams->num_former = 0;
}

/* `former` is stolen. */
static void add_former(struct streams *streams, struct stream_handle former) {
    int count = streams->num_former;
    for (int i = 0; i < count && i < MAX_FORMER; i++) {
        if (streams->former[i].raw == former.raw) {
            Py_DECREF(former.object);
            return;
        }
    }
    Py_XDECREF(streams->former[count % MAX_FORMER].object);
    streams->former[count % MAX_FORMER] = former;
    streams->num_former = count + 1;
}

/* Make the current stream the compute stream, after the work of the former one. The first switch inside a
 * graph capture does not wait: a capture cannot wait for an event outside of it, and its start requires a
 * device synchronisation. */
static int switch_compute_stream(struct streams *streams) {
    bool is_idle = streams->is_idle;
    bool was_capturing = !is_idle && is_capturing(streams);
    streams->is_idle = false;
    if (!is_idle && record_on(streams, STREAM_COMPUTE, &streams->compute_event) < 0)
        return -1;
    struct stream_handle former = streams->roles[STREAM_COMPUTE];
    Py_INCREF(former.object);
    if (adopt_current(streams) < 0) {
        Py_DECREF(former.object);
        return -1;
    }
    bool begins_capture = is_capturing(streams) && !was_capturing;
    if (is_idle || begins_capture)
        Py_DECREF(former.object);
    else
        add_former(streams, former);
    if (begins_capture) {
        drop_kept_waits(streams);
        return 0;
    }
    streams->former_may_be_gone = streams->former_may_be_gone || is_idle;
    return streams->backend->wait(streams, &streams->roles[STREAM_COMPUTE], streams->compute_event->event);
}

/* The current stream may change at any call: scripts run steps, parts of a model or a backward on different
 * streams, and the engine runs a unit's hook on the stream that was current when its anchor was created. */
int stream_follow(struct streams *streams) {
    if (!streams_are_real(streams) || streams->entered)
        return 0;
    if (!streams->roles[STREAM_COMPUTE].object)
        return adopt_current(streams);
    if (!streams->backend->is_current(streams, &streams->roles[STREAM_COMPUTE]))
        return switch_compute_stream(streams);
    streams->is_idle = false;
    return 0;
}

int stream_join_former(struct streams *streams) {
    if (!streams->num_former)
        return 0;
    if (stream_follow(streams) < 0)
        return -1;
    if (is_capturing(streams)) /* a graph allocates from its own memory pool */
        return 0;
    int result = record_on(streams, STREAM_COMPUTE, &streams->compute_event);
    for (int i = 0; !result && i < streams->num_former && i < MAX_FORMER; i++)
        if (streams->former[i].raw != streams->roles[STREAM_COMPUTE].raw)
            result = streams->backend->wait(streams, &streams->former[i], streams->compute_event->event);
    return result;
}

int stream_end_backward(struct streams *streams) {
    if (!streams_are_real(streams))
        return 0;
    bool must_wait = streams->former_may_be_gone && !is_capturing(streams);
    clear_former(streams);
    streams->former_may_be_gone = false;
    if (must_wait && (stream_record(streams, STREAM_COMPUTE, &streams->compute_event) < 0 ||
                      stream_synchronize(streams, streams->compute_event) < 0))
        return -1;
    stream_record_external_end(streams);
    return 0;
}

void stream_record_external_end(struct streams *streams) {
    if (!streams->is_external || PyErr_Occurred())
        return;
    streams->is_idle =
        !is_capturing(streams) && record_on(streams, STREAM_COMPUTE, &streams->compute_event) == 0;
    PyErr_Clear();
}

/* ---- enter, record, wait ---- */

/* Set the current stream. torch also makes the stream's device current, so remember the former device. */
static int enter(struct streams *streams, PyObject *stream) {
    if (streams->entered)
        return set_current(streams, stream);
    int other_device = streams->backend->is_other_device_current(streams);
    Py_CLEAR(streams->previous_device);
    if (other_device < 0 || stream_follow(streams) < 0)
        return -1;
    if (other_device) {
        ref_set(&streams->previous_device, PyObject_CallMethod(streams->module, "current_device", NULL));
        if (!streams->previous_device)
            return -1;
    }
    streams->entered = set_current(streams, stream) == 0;
    return streams->entered ? 0 : -1;
}

int stream_enter(struct streams *streams, enum stream_role role) {
    if (!streams_are_real(streams))
        return 0;
    if (issue_kept_waits(streams, role) < 0 || enter(streams, streams->roles[role].object) < 0)
        return -1;
    streams->entered_role = role;
    return 0;
}

int stream_enter_persistent(struct streams *streams) {
    if (!streams_are_real(streams))
        return 0;
    if (stream_follow(streams) < 0)
        return -1;
    OWNED *stream = streams->is_external
                        ? PyObject_CallMethod(streams->module, "default_stream", "O", streams->device)
                        : Py_NewRef(streams->roles[STREAM_COMPUTE].object);
    streams->entered_role = STREAM_COMPUTE;
    return stream ? enter(streams, stream) : -1;
}

/* Work between enter and leave may have raised: keep its exception. */
int stream_leave(struct streams *streams) {
    if (!streams_are_real(streams))
        return 0;
    PyObject *previous_device = streams->previous_device;
    PyObject *error = PyErr_GetRaisedException();
    streams->previous_device = NULL;
    streams->entered = false;
    int result = set_current(streams, streams->roles[STREAM_COMPUTE].object);
    if (!result && previous_device)
        result = ref_done(PyObject_CallMethod(streams->module, "set_device", "O", previous_device));
    Py_XDECREF(previous_device);
    if (error)
        PyErr_SetRaisedException(error);
    return result;
}

int stream_record(struct streams *streams, enum stream_role role, stream_event *event) {
    if (!streams_are_real(streams))
        return 0;
    return stream_follow(streams) < 0 ? -1 : record_on(streams, role, event);
}

int stream_wait(struct streams *streams, enum stream_role role, stream_event event) {
    if (!event)
        return 0;
    return stream_follow(streams) < 0 ? -1 : wait_on(streams, role, event);
}

int stream_synchronize(struct streams *streams, stream_event event) {
    return event ? streams->backend->synchronize(streams, event->event) : 0;
}

/* ---- life ---- */

/* Create the side streams, then initialise the backend, which takes the context of one of them. All-gathers
 * and reduce-scatters have priority over computation, which waits for them soon. The all-reduce of a hybrid
 * reduction has none: the wait for it is at the end of the backward. */
static int init(struct streams *streams, PyObject *device) {
    OWNED *get_module = ref_find("torch", "get_device_module");
    OWNED *index = PyObject_GetAttrString(device, "index");
    streams->device = Py_NewRef(device);
    streams->device_index = index && index != Py_None ? (int32_t)PyLong_AsLong(index) : 0;
    streams->module = get_module ? PyObject_CallFunctionObjArgs(get_module, device, NULL) : NULL;
    if (PyErr_Occurred() || !(streams->set_stream = PyObject_GetAttrString(streams->module, "set_stream")))
        return -1;
    for (int role = STREAM_COMPUTE + 1; role < STREAM_ROLES; role++) {
        int priority = role == STREAM_ALL_REDUCE ? 0 : -1;
        PyObject *stream = PyObject_CallMethod(streams->module, "Stream", "Oi", device, priority);
        if (adopt_stream(streams, (enum stream_role)role, stream) < 0)
            return -1;
    }
    if (streams->backend->init && streams->backend->init(streams) < 0)
        return -1;
    return stream_follow(streams);
}

int streams_init(struct streams *streams, PyObject *device) {
    memset(streams, 0, sizeof *streams);
    OWNED *type = PyObject_GetAttrString(device, "type");
    if (!type)
        return -1;
    if (PyUnicode_CompareWithASCIIString(type, "cpu") == 0 ||
        PyUnicode_CompareWithASCIIString(type, "meta") == 0)
        return 0;
    bool is_cuda = PyUnicode_CompareWithASCIIString(type, "cuda") == 0;
    bool by_driver = is_cuda && !kernels_use_torch_operators() && driver_is_available();
    streams->backend = by_driver ? &driver_backend : &module_backend;
    if (init(streams, device) == 0)
        return 0;
    streams_fini(streams);
    return -1;
}

void streams_fini(struct streams *streams) {
    for (int role = 0; role < STREAM_ROLES; role++)
        Py_CLEAR(streams->roles[role].object);
    clear_former(streams);
    stream_event_destroy(streams, &streams->compute_event);
    drop_kept_waits(streams);
    for (struct stream_mark *mark; (mark = streams->spare_marks);) {
        streams->spare_marks = mark->next_spare;
        if (mark->event)
            streams->backend->destroy(mark->event);
        PyMem_Free(mark);
    }
    Py_CLEAR(streams->module);
    Py_CLEAR(streams->set_stream);
    Py_CLEAR(streams->device);
    Py_CLEAR(streams->previous_device);
    memset(streams, 0, sizeof *streams);
}
