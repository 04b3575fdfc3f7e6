/* What the modules' slots show: sharded Parameters, views of the unsharded storage, or full Parameters. */
#include "handle/handle.h"

#include "handle/handle_ops.h"
#include "torch/names.h"
#include "torch/tensor.h"

/* ---- making views ---- */

PyObject *handle_make_views(struct handle *handle, PyObject *full) {
    PyObject *list = handle_segment_views(handle, full);
    PyObject *views = list ? PyList_AsTuple(list) : NULL;
    Py_XDECREF(list);
    return views;
}

static PyObject *shard_part(struct handle *handle, int64_t param) {
    const struct layout_shard_range *range = &handle->layout.shard_ranges[param];
    if (!handle->sharded)
        return torch_view(handle->local_shard, layout_param_offset(&handle->layout, param),
                          layout_param_numel(&handle->layout, param), PyTuple_GetItem(handle->shapes, param),
                          PyTuple_GetItem(handle->strides, param));
    if (!range->in_shard)
        return Py_NewRef(handle->empty_param);
    PyObject *shape = Py_BuildValue("(L)", (long long)range->numel_in_shard);
    PyObject *part =
        shape ? torch_view(handle->local_shard, range->offset_in_shard, range->numel_in_shard, shape, Py_None) : NULL;
    Py_XDECREF(shape);
    return part;
}

int handle_point_params_at_shard(struct handle *handle) {
    ref_set(&handle->empty_param, PyObject_CallMethod(handle->local_shard, "new_empty", "(i)", 0));
    if (!handle->empty_param)
        return -1;
    for (int64_t i = 0; i < handle->num_params; i++) {
        PyObject *part = shard_part(handle, i);
        int result = part ? torch_set_data(PyList_GetItem(handle->params, i), part) : -1;
        Py_XDECREF(part);
        if (result < 0)
            return -1;
    }
    return 0;
}

/* ---- slots ---- */

/* As a user's `setattr` would do it, for classes that watch their attributes. */
static int show_by_setattr(const struct slot *slot, PyObject *value) {
    if (PyObject_HasAttr(slot->module, slot->name) && PyObject_DelAttr(slot->module, slot->name) < 0)
        return -1;
    return PyObject_SetAttr(slot->module, slot->name, value);
}

static int show_in_parameters(const struct slot *slot, PyObject *value) {
    if (slot->custom_setattr && show_by_setattr(slot, value) < 0)
        return -1;
    return PyDict_SetItem(slot->parameters, slot->name, value);
}

static int remove_key(PyObject *dict, PyObject *key) {
    if (PyDict_Contains(dict, key) != 1)
        return PyErr_Occurred() ? -1 : 0;
    return PyDict_DelItem(dict, key);
}

/* A plain attribute: in the instance's __dict__ and not among the parameters. */
static int show_as_attribute(const struct slot *slot, PyObject *value) {
    if (remove_key(slot->parameters, slot->name) < 0)
        return -1;
    if (slot->custom_setattr)
        return show_by_setattr(slot, value);
    return PyDict_SetItem(slot->attributes, slot->name, value);
}

int handle_show_views(struct handle *handle, PyObject *views) {
    if (handle->shown == SHOWN_VIEWS && !handle->use_orig_params)
        return 0; /* the slots keep these very objects */
    for (int64_t i = 0; i < handle->num_slots; i++) {
        const struct slot *slot = &handle->slots[i];
        PyObject *view = PyTuple_GetItem(views, slot->param);
        int result = handle->use_orig_params ? show_in_parameters(slot, view) : show_as_attribute(slot, view);
        if (result < 0)
            return -1;
    }
    handle->shown = SHOWN_VIEWS;
    return 0;
}

static int show_params(struct handle *handle) {
    for (int64_t i = 0; i < handle->num_slots; i++) {
        const struct slot *slot = &handle->slots[i];
        if (show_in_parameters(slot, PyList_GetItem(handle->params, slot->param)) < 0)
            return -1;
        if (slot->custom_setattr && remove_key(slot->attributes, slot->name) < 0)
            return -1;
    }
    return 0;
}

int handle_show_sharded(struct handle *handle) {
    if (handle->shown == SHOWN_SHARDED)
        return 0;
    if (handle->use_orig_params) {
        if (handle->shown == SHOWN_FULL_PARAMS && handle_point_params_at_shard(handle) < 0)
            return -1;
        if (show_params(handle) < 0)
            return -1;
        handle->shown = SHOWN_SHARDED;
        return 0;
    }
    if (handle->shown == SHOWN_VIEWS)
        return 0;
    handle->shown = SHOWN_NOTHING;
    return handle_show_views(handle, handle->form->views);
}

/* ---- full parameters ---- */

static int point_params_at(struct handle *handle, PyObject *views) {
    for (int64_t i = 0; i < handle->num_params; i++)
        if (torch_set_data(PyList_GetItem(handle->params, i), PyTuple_GetItem(views, i)) < 0)
            return -1;
    return show_params(handle);
}

static PyObject *new_parameter(PyObject *view, PyObject *requires_grad) {
    return PyObject_CallFunctionObjArgs(torch_names.parameter_type, view, requires_grad, NULL);
}

/* One fresh Parameter per parameter; a shared one appears under all its names. */
static int show_fresh_params(struct handle *handle, PyObject *views) {
    PyObject *requires_grad = PyObject_GetAttr(handle->flat_param, torch_names.requires_grad);
    PyObject *params = PyTuple_New(handle->num_params);
    int result = requires_grad && params ? 0 : -1;
    for (int64_t i = 0; !result && i < handle->num_params; i++) {
        PyObject *param = new_parameter(PyTuple_GetItem(views, i), requires_grad);
        result = param ? PyTuple_SetItem(params, i, param) : -1;
    }
    for (int64_t i = 0; !result && i < handle->num_slots; i++) {
        const struct slot *slot = &handle->slots[i];
        result = remove_key(slot->attributes, slot->name);
        if (!result)
            result = show_in_parameters(slot, PyTuple_GetItem(params, slot->param));
    }
    Py_XDECREF(requires_grad);
    Py_XDECREF(params);
    return result;
}

int handle_show_full_params(struct handle *handle, PyObject *full) {
    PyObject *views = handle_make_views(handle, full);
    if (!views)
        return -1;
    int result = handle->use_orig_params ? point_params_at(handle, views) : show_fresh_params(handle, views);
    Py_DECREF(views);
    handle->shown = SHOWN_FULL_PARAMS;
    return result;
}
