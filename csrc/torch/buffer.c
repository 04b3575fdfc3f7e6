#include "torch/buffer.h"

#include <string.h>

#include "torch/py_torch.h"
#include "torch/tensor.h"

static int64_t live_nbytes, peak_nbytes;
static PyObject *freed_nbytes; /* owned; never freed; the size of a freed storage */

static void count(const struct buffer *buffer, int64_t change) {
    if (!buffer->counted)
        return;
    live_nbytes += change;
    if (live_nbytes > peak_nbytes)
        peak_nbytes = live_nbytes;
}

int64_t buffer_live_nbytes(void) {
    return live_nbytes;
}

int64_t buffer_peak_nbytes(bool reset) {
    int64_t peak = peak_nbytes;
    if (reset)
        peak_nbytes = live_nbytes;
    return peak;
}

/* Bind `buffer` to the storage of `tensor`: its resize_ and its guard. 0, or -1 and `buffer` is unchanged. */
static int bind_storage(struct buffer *buffer, PyObject *tensor) {
    struct data_guard guard = {0};
    OWNED *storage = PyObject_CallMethod(tensor, "untyped_storage", NULL);
    if (!storage || (buffer->counted && data_guard_init(&guard, tensor) < 0))
        return -1;
    PyObject *resize = PyObject_GetAttrString(storage, "resize_"); /* holds a reference to the storage */
    if (!resize)
        return -1;
    ref_set(&buffer->resize, resize);
    buffer->guard = guard;
    return 0;
}

int buffer_init(struct buffer *buffer, int64_t numel, PyObject *dtype, PyObject *device, bool counted) {
    if (!freed_nbytes && !(freed_nbytes = PyLong_FromLong(0)))
        return -1;
    *buffer =
        (struct buffer){.tensor = torch_empty(numel, dtype, device), .numel = numel, .counted = counted};
    if (!buffer->tensor || tensor_view_of(buffer->tensor, &buffer->view) < 0 ||
        bind_storage(buffer, buffer->tensor) < 0 ||
        !(buffer->full_nbytes = PyLong_FromLongLong(numel * dtype_nbytes(buffer->view.dtype)))) {
        buffer_fini(buffer);
        return -1;
    }
    buffer->nbytes = numel * dtype_nbytes(buffer->view.dtype);
    tensor_prefer_large_pages(&buffer->view);
    buffer->allocated = true;
    count(buffer, buffer->nbytes);
    return 0;
}

void buffer_fini(struct buffer *buffer) {
    if (buffer->allocated)
        count(buffer, -buffer->nbytes);
    Py_CLEAR(buffer->tensor);
    Py_CLEAR(buffer->resize);
    Py_CLEAR(buffer->full_nbytes);
    memset(buffer, 0, sizeof *buffer);
}

static int resize(struct buffer *buffer, PyObject *nbytes) {
    return ref_done(PyObject_CallFunctionObjArgs(buffer->resize, nbytes, NULL));
}

int buffer_alloc(struct buffer *buffer) {
    if (buffer->allocated)
        return 0;
    data_guard_set(&buffer->guard, false);
    /* The user may have allocated the storage by resize_() of a tensor derived from a view. Growing it would
     * copy its bytes on the current stream, without an order with writes on other streams. */
    if (tensor_view_of(buffer->tensor, &buffer->view) < 0 ||
        (buffer->view.data && resize(buffer, freed_nbytes) < 0) || resize(buffer, buffer->full_nbytes) < 0) {
        data_guard_set(&buffer->guard, true);
        return -1;
    }
    if (tensor_view_of(buffer->tensor, &buffer->view) < 0)
        return -1;
    tensor_prefer_large_pages(&buffer->view);
    buffer->allocated = true;
    count(buffer, buffer->nbytes);
    return 0;
}

int buffer_free(struct buffer *buffer) {
    if (!buffer->allocated)
        return 0;
    data_guard_set(&buffer->guard, false); /* set if the free was deferred */
    if (resize(buffer, freed_nbytes) < 0)
        return -1;
    data_guard_set(&buffer->guard, true);
    buffer->view.data = NULL;
    buffer->allocated = false;
    count(buffer, -buffer->nbytes);
    return 0;
}

int buffer_is_exported(const struct buffer *buffer) {
    OWNED *storage = PyObject_GetAttrString(buffer->resize, "__self__");
    OWNED *resizable = storage ? PyObject_CallMethod(storage, "resizable", NULL) : NULL;
    return resizable ? resizable == Py_False : -1;
}

int buffer_replace_storage(struct buffer *buffer) {
    OWNED *tensor = torch_empty_like(buffer->tensor);
    if (!tensor || torch_set_data(buffer->tensor, tensor) < 0 || bind_storage(buffer, tensor) < 0)
        return -1;
    return tensor_view_of(buffer->tensor, &buffer->view);
}

/* ---- deferred frees: see [Note: deferred frees] ---- */

/* Make the streams that allocate and write the memory wait for its last use. 0 or -1. */
static int wait_for_last_use(struct deferred_free *deferred) {
    if (stream_wait(deferred->streams, deferred->writer, deferred->last_use) < 0)
        return -1;
    return stream_wait(deferred->streams, deferred->owner, deferred->last_use);
}

static struct buffer *unlink_held(struct buffer **link) {
    struct buffer *buffer = *link;
    *link = buffer->next_held;
    buffer->next_held = NULL;
    return buffer;
}

int deferred_free_flush(struct deferred_free *deferred) {
    if (!deferred->held)
        return 0;
    bool has_waited = wait_for_last_use(deferred) == 0;
    int result = has_waited ? 0 : -1;
    while (deferred->held) {
        struct buffer *buffer = unlink_held(&deferred->held);
        if (has_waited && buffer_free(buffer) < 0)
            result = -1;
    }
    return result;
}

int deferred_free_add(struct deferred_free *deferred, struct buffer *buffer, bool same_unit) {
    if (!buffer->allocated)
        return 0;
    if (!deferred_free_holds(deferred, buffer)) {
        if (!same_unit && deferred_free_flush(deferred) < 0)
            return -1;
        buffer->next_held = deferred->held;
        deferred->held = buffer;
        data_guard_set(&buffer->guard, true);
    }
    return stream_record(deferred->streams, deferred->user, &deferred->last_use);
}

int deferred_free_reclaim(struct deferred_free *deferred, struct buffer *buffer) {
    struct buffer **link = &deferred->held;
    while (*link && *link != buffer)
        link = &(*link)->next_held;
    if (!*link)
        return 0;
    data_guard_set(&unlink_held(link)->guard, false);
    return wait_for_last_use(deferred);
}

int deferred_free_flush_buffer(struct deferred_free *deferred, struct buffer *buffer) {
    return deferred_free_holds(deferred, buffer) ? deferred_free_flush(deferred) : 0;
}
