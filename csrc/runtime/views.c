/* The views of a unit lose their history: see [Note: one node per unit]. */
#include "runtime/runtime.h"
#include "torch/names.h"

static int detach_view(PyObject *view) {
    int requires_grad = torch_requires_grad(view);
    PyObject *done =
        requires_grad > 0 ? PyObject_CallMethodObjArgs(view, torch_names.detach_, NULL) : Py_NewRef(Py_None);
    Py_XDECREF(done);
    return done && requires_grad >= 0 ? 0 : -1;
}

/* A view that keeps its node keeps the whole unit for ever: one failure is not the end. */
static int detach_copy(const struct precision_copy *copy, int64_t num_params) {
    for (int64_t i = 0; copy->views && i < num_params; i++) {
        PyObject *view = PyTuple_GetItem(copy->views, i);
        if (detach_view(view) == 0)
            continue;
        PyErr_Clear();
        if (detach_view(view) < 0)
            return -1;
    }
    return 0;
}

static int detach_part(struct unit *part) {
    struct handle *handle = part->handle;
    part->in_node = false;
    if (handle_unwrap_views(handle) < 0)
        return -1;
    for (int i = 0; i < PRECISIONS; i++)
        if (detach_copy(&handle->storage.copies[i], handle->param.num_params) < 0)
            return -1;
    return 0;
}

int unit_detach_part(struct unit *part) {
    PyObject *left;
    if (torch_leave_inference_mode(&left) < 0)
        return -1;
    int result = detach_part(part);
    return torch_return_to_inference_mode(left) < 0 ? -1 : result;
}

int unit_detach_views(struct unit *unit) {
    if (!unit->views_attached || !unit->handle)
        return 0;
    unit->views_attached = false;
    FOR_PARTS(part, unit)
        if (unit_detach_part(part) < 0)
            return -1;
    return 0;
}

void runtime_detach_views(struct runtime *runtime) {
    for (int64_t i = 0; i < runtime->num_units; i++)
        if (unit_detach_views(runtime->units[i]) < 0)
            PyErr_WriteUnraisable(runtime->units[i]->name);
}
