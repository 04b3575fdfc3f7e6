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
    handle->copied_changes = true;
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
                 "Cannot writeback when the parameter shape changes: %S of unit %S has shape (%lld,) on rank %lld, "
                 "this rank's part of it, but the new value has %S. Change full parameters inside "
                 "FullyShardedDataParallel.summon_full_params(module, writeback=True).",
                 fqn, handle->name, (long long)want, (long long)handle->layout.rank, shape ? shape : Py_None);
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
        result = PyErr_WarnFormat(
            PyExc_UserWarning, 1,
            "[Rank %lld] %s needs writeback in HandleTrainingState.%s: %S of unit %S, shape=%S device=%S, expected "
            "device=%S",
            (long long)handle->layout.rank, what, training_state_name(handle->training_state), fqn, handle->name, shape,
            device, handle->device);
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
        "Cannot writeback when the parameter shape changes: %S of unit %S was given data of shape %S, and rank %lld "
        "holds none of the parameter, so that the edit would be lost. Change parameters inside "
        "FullyShardedDataParallel.summon_full_params(module, writeback=True).",
        fqn, handle->name, shape ? shape : Py_None, (long long)handle->layout.rank);
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
        "Changing shared parameters is not supported yet (rank %lld, unit %S): %S and %S were one when the unit was "
        "wrapped and are two now. Untie parameters before wrapping.",
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
                 "FSDP does not support changing the parameters between forward and backward for strategies that do "
                 "not reshard after forward (rank %lld, unit %S): %S was replaced. Change it after the backward.",
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

/* ---- a flat parameter that moves ---- */

static int refuse_to_move(struct handle *handle) {
    PyErr_Format(
        PyExc_AssertionError,
        "rank %lld, unit %S: its flat parameter cannot be moved in state %s. Move it between steps, outside of "
        "summon_full_params.",
        (long long)handle->layout.rank, handle->name, training_state_name(handle->training_state));
    return -1;
}

static PyObject *moved(PyObject *tensor, PyObject *args, PyObject *kwargs) {
    PyObject *to = PyObject_GetAttrString(tensor, "to");
    PyObject *result = to ? PyObject_Call(to, args, kwargs) : NULL;
    Py_XDECREF(to);
    return result;
}

/* On the device that it has left nothing is kept for it. */
static int leave_device(struct handle *handle) {
    struct form *form = handle->form;
    if (!handle->elsewhere)
        return 0;
    if (retirement_forget(handle->retirement, &form->full) < 0 ||
        retirement_forget(handle->input_retirement, &form->low_precision_shard) < 0)
        return -1;
    return handle->pool ? pool_empty(handle->pool) : 0;
}

static int follow_to(struct handle *handle, PyObject *data) {
    if (torch_set_data(handle->flat_param, data) < 0 || handle_follow_flat_param(handle) < 0)
        return -1;
    return leave_device(handle);
}

/* What could not be followed is left for what was there before; the exception stays. */
static void move_back(struct handle *handle, PyObject *data) {
    PyObject *type, *value, *traceback;
    PyErr_Fetch(&type, &value, &traceback);
    if (follow_to(handle, data) < 0)
        PyErr_WriteUnraisable(handle->name);
    PyErr_Restore(type, value, traceback);
}

int handle_flat_param_to(struct handle *handle, PyObject *args, PyObject *kwargs) {
    if (handle->training_state != USE_IDLE)
        return refuse_to_move(handle);
    if ((!handle->skip_writeback_check && handle_writeback(handle) < 0) || handle_reshard(handle, true) < 0)
        return -1;
    PyObject *data = torch_data(handle->flat_param), *to = data ? moved(data, args, kwargs) : NULL;
    int result = to ? follow_to(handle, to) : -1;
    if (result < 0 && to)
        move_back(handle, data);
    Py_XDECREF(data);
    Py_XDECREF(to);
    return result;
}
