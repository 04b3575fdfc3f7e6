/* What the user replaced between steps is taken over before the next all-gather (C-130 to C-136). */
#include "handle/handle.h"
#include "torch/names.h"
#include "torch/tensor.h"

/* ---- the flat parameter ---- */

/* `flat_param.data = other` is honoured: the new tensor becomes the shard. */
int handle_follow_flat_param(struct handle *handle) {
    struct tensor_view view;
    if (!handle->ready)
        return handle_lazy_init(handle);
    if (tensor_view_of(handle->flat_param, &view) < 0)
        return -1;
    if (view.data == handle->local_view.data && view.dtype == handle->orig_kind)
        return 0;
    handle->shown = handle->use_orig_params ? handle->shown : SHOWN_NOTHING;
    if (handle_lazy_init(handle) < 0)
        return -1;
    return handle->use_orig_params ? 0 : handle_show_views(handle);
}

/* ---- original parameters ---- */

static const char *expected_data(const struct handle *handle, int64_t param) {
    const struct layout_shard_range *range = &handle->layout.shard_ranges[param];
    int64_t offset = handle->sharded ? range->offset_in_shard : layout_param_offset(&handle->layout, param);
    return (const char *)handle->local_view.data + offset * dtype_nbytes(handle->local_view.dtype);
}

static int refuse_shape(struct handle *handle, int64_t param, PyObject *value, int64_t want) {
    PyObject *shape = PyObject_GetAttrString(value, "shape"), *fqn = handle_fqn(handle, param);
    PyErr_Format(PyExc_RuntimeError,
                 "rank %lld, unit %S: cannot write back the new value of %S: expected a tensor of %lld elements in "
                 "shape (%lld,), this rank's part of the parameter, got %S. Change full parameters inside "
                 "FullyShardedDataParallel.summon_full_params(module, writeback=True).",
                 (long long)handle->layout.rank, handle->name, fqn, (long long)want, (long long)want,
                 shape ? shape : Py_None);
    Py_XDECREF(shape);
    Py_DECREF(fqn);
    return -1;
}

static int check_shape(struct handle *handle, int64_t param, PyObject *value, const struct tensor_view *view) {
    int64_t want = handle->layout.shard_ranges[param].numel_in_shard, numel = tensor_view_numel(view);
    if (!handle->sharded)
        want = layout_param_numel(&handle->layout, param);
    if (numel == want && (!handle->sharded || view->ndim == 1))
        return 0;
    return refuse_shape(handle, param, value, want);
}

int handle_say_writeback(struct handle *handle, int64_t param, const char *what, PyObject *value) {
    if (!handle->verbose)
        return 0;
    PyObject *shape = value == Py_None ? Py_NewRef(Py_None) : PyObject_GetAttrString(value, "shape");
    PyObject *device = value == Py_None ? Py_NewRef(Py_None) : PyObject_GetAttr(value, torch_names.device);
    PyObject *fqn = handle_fqn(handle, param);
    int result = -1;
    if (shape && device)
        result = PyErr_WarnFormat(PyExc_UserWarning, 1,
                                  "[Rank %lld] %s needs writeback in %s: %S of unit %S, shape=%S device=%S, expected "
                                  "device=%S",
                                  (long long)handle->layout.rank, what, training_state_name(handle->training_state),
                                  fqn, handle->name, shape, device, handle->device);
    Py_XDECREF(shape);
    Py_XDECREF(device);
    Py_DECREF(fqn);
    return result;
}

/* `value` is the parameter from now on. */
static int keep_object(struct handle *handle, int64_t param, PyObject *value) {
    if (PyList_GetItem(handle->params, param) == value)
        return 0;
    if (PyList_SetItem(handle->params, param, Py_NewRef(value)) < 0)
        return -1;
    return PyObject_SetAttrString(value, "_fsdp_flattened", Py_True);
}

/* shard part <- value, then value.data = shard part, and `value` is the parameter from now on. */
static int take_over(struct handle *handle, int64_t param, PyObject *value) {
    PyObject *source = torch_data(value), *part = NULL, *copied = NULL;
    int64_t offset =
        (expected_data(handle, param) - (const char *)handle->local_view.data) / dtype_nbytes(handle->local_view.dtype);
    int64_t numel = handle->sharded ? handle->layout.shard_ranges[param].numel_in_shard
                                    : layout_param_numel(&handle->layout, param);
    PyObject *flat_shape = Py_BuildValue("(L)", (long long)numel);
    PyObject *shape = handle->sharded ? flat_shape : PyTuple_GetItem(handle->shapes, param);
    PyObject *strides = handle->sharded ? Py_None : PyTuple_GetItem(handle->strides, param);
    int result = -1;
    if (source && flat_shape)
        part = torch_view(handle->local_shard, offset, numel, shape, strides);
    handle->copied_changes = true;
    if (part)
        copied = PyObject_CallMethod(part, "copy_", "(O)", source);
    if (copied)
        result = torch_set_data(value, part);
    if (!result)
        result = keep_object(handle, param, value);
    Py_XDECREF(source);
    Py_XDECREF(part);
    Py_XDECREF(copied);
    Py_XDECREF(flat_shape);
    return result;
}

static int writeback_param(struct handle *handle, int64_t param) {
    PyObject *value = PyDict_GetItemWithError(handle->slots[param].parameters, handle->slots[param].name);
    struct tensor_view view;
    if (!value)
        return PyErr_Occurred() ? -1 : 0; /* deregistered */
    if (tensor_view_of(value, &view) < 0)
        return -1;
    bool same = value == PyList_GetItem(handle->params, param);
    if (same && (view.data == (void *)expected_data(handle, param) || tensor_view_numel(&view) == 0))
        return 0;
    if (handle_say_writeback(handle, param, "Parameter", value) < 0)
        return -1;
    if (check_shape(handle, param, value, &view) < 0)
        return -1;
    return take_over(handle, param, value);
}

/* ---- parameters that lie in other shards alone (parity 20) ---- */

static bool is_held(const struct handle *handle, int64_t param) {
    return !handle->sharded || handle->layout.shard_ranges[param].in_shard;
}

static int refuse_unheld(struct handle *handle, int64_t param, PyObject *value) {
    PyObject *shape = PyObject_GetAttrString(value, "shape"), *fqn = handle_fqn(handle, param);
    PyErr_Format(
        PyExc_RuntimeError,
        "rank %lld, unit %S: %S was given data of shape %S, and this rank holds none of the parameter: the edit "
        "would be lost. Change parameters inside "
        "FullyShardedDataParallel.summon_full_params(module, writeback=True).",
        (long long)handle->layout.rank, handle->name, fqn, shape ? shape : Py_None);
    Py_XDECREF(shape);
    Py_DECREF(fqn);
    return -1;
}

/* It is shown without elements; what has some was put there. */
static int check_unheld(struct handle *handle, int64_t param, PyObject *value) {
    struct tensor_view view;
    if (tensor_view_of(value, &view) < 0)
        return -1;
    return tensor_view_numel(&view) ? refuse_unheld(handle, param, value) : keep_object(handle, param, value);
}

/* A new object is seen at once, new data of the same object in one parameter per gather, in turn: most parameters lie
 * elsewhere, and asking each for its size would be a third of the host work of a step. */
static int look_at_unheld(struct handle *handle, int64_t param, bool in_turn) {
    PyObject *value = PyDict_GetItemWithError(handle->slots[param].parameters, handle->slots[param].name);
    if (!value)
        return PyErr_Occurred() ? -1 : 0; /* deregistered */
    if (!in_turn && value == PyList_GetItem(handle->params, param))
        return 0;
    return check_unheld(handle, param, value);
}

/* The next one whose turn it is, or -1 when this rank has a part of all. */
static int64_t next_unheld(struct handle *handle) {
    for (int64_t i = 1; i <= handle->num_params; i++) {
        int64_t param = (handle->unheld_turn + i) % handle->num_params;
        if (!is_held(handle, param))
            return handle->unheld_turn = param;
    }
    return -1;
}

int handle_check_unheld(struct handle *handle) {
    if (!handle->use_orig_params || handle->shown != SHOWN_SHARDED || handle->skip_writeback_check)
        return 0;
    for (int64_t i = 0; i < handle->num_params; i++)
        if (!is_held(handle, i) && look_at_unheld(handle, i, true) < 0)
            return -1;
    return 0;
}

/* ---- all parameters ---- */

static int check_shared(struct handle *handle, const struct slot *slot) {
    PyObject *value = PyDict_GetItemWithError(slot->parameters, slot->name);
    const struct slot *primary = &handle->slots[slot->param];
    if (!value || value == PyDict_GetItemWithError(primary->parameters, primary->name))
        return PyErr_Occurred() ? -1 : 0;
    PyErr_Format(
        PyExc_NotImplementedError,
        "rank %lld, unit %S: %S and %S were one shared parameter when the unit was wrapped and are two now. Untie "
        "parameters before wrapping.",
        (long long)handle->layout.rank, handle->name, primary->name, slot->name);
    return -1;
}

/* Sharded parameters as the user left them go into the shard that they were shown from. */
int handle_take_over_params(struct handle *handle) {
    if (!handle->use_orig_params || handle->shown != SHOWN_SHARDED || handle->skip_writeback_check)
        return 0;
    int64_t turn = next_unheld(handle);
    for (int64_t i = 0; i < handle->num_params; i++)
        if ((is_held(handle, i) ? writeback_param(handle, i) : look_at_unheld(handle, i, i == turn)) < 0)
            return -1;
    for (int64_t i = handle->num_params; i < handle->num_slots; i++)
        if (check_shared(handle, &handle->slots[i]) < 0)
            return -1;
    return 0;
}

int handle_writeback(struct handle *handle) {
    return handle_follow_flat_param(handle) < 0 ? -1 : handle_take_over_params(handle);
}

/* ---- views that stay between forward and backward ---- */

static int refuse_changed_view(struct handle *handle, const struct slot *slot) {
    PyObject *fqn = handle_fqn(handle, slot->param);
    PyErr_Format(PyExc_AssertionError,
                 "rank %lld, unit %S: %S was replaced between forward and backward, which a strategy that does not "
                 "reshard after forward does not support. Change parameters after the backward.",
                 (long long)handle->layout.rank, handle->name, fqn);
    Py_DECREF(fqn);
    return -1;
}

int handle_check_views(struct handle *handle) {
    if (!handle->use_orig_params || handle->shown != SHOWN_VIEWS || handle->skip_writeback_check)
        return 0;
    const char *full = handle->form->is_local ? handle->local_view.data : handle->form->full.view.data;
    for (int64_t i = 0; i < handle->num_slots; i++) {
        const struct slot *slot = &handle->slots[i];
        PyObject *value = PyDict_GetItemWithError(slot->parameters, slot->name);
        int64_t offset = layout_param_offset(&handle->layout, slot->param);
        struct tensor_view view;
        if (!value && PyErr_Occurred())
            return -1;
        if (!value || !layout_param_numel(&handle->layout, slot->param))
            continue;
        if (tensor_view_of(handle_local_value(handle, value), &view) < 0)
            return -1;
        if ((const char *)view.data != full + offset * dtype_nbytes(handle->form->kind))
            return refuse_changed_view(handle, slot);
    }
    return 0;
}
