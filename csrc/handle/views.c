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

/* What wrap_views makes of `views`, or `views` themselves. New reference. */
static PyObject *wrapped(const struct handle *handle, PyObject *views) {
    return handle->wrap_views ? PyObject_CallFunctionObjArgs(handle->wrap_views, views, NULL) : Py_NewRef(views);
}

int handle_wrap_views(struct handle *handle) {
    if (!handle->wrap_views)
        return 0;
    ref_set(&handle->wrapped_views, wrapped(handle, handle->form->views));
    return handle->wrapped_views ? 0 : -1;
}

PyObject *handle_local_value(const struct handle *handle, PyObject *value) {
    PyObject *local = handle->wrap_views ? PyObject_GetAttrString(value, "_local_tensor") : NULL;
    if (!local) {
        PyErr_Clear();
        return value;
    }
    Py_DECREF(local); /* `value` keeps it */
    return local;
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
    if (slot->setting == SETTING_BY_SETATTR && show_by_setattr(slot, value) < 0)
        return -1;
    if (slot->setting == SETTING_BYPASS && PyDict_SetItem(slot->attributes, slot->name, value) < 0)
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
    if (slot->setting == SETTING_BY_SETATTR)
        return show_by_setattr(slot, value);
    return PyDict_SetItem(slot->attributes, slot->name, value);
}

static int show_views(struct handle *handle, PyObject *views) {
    handle->shown = SHOWN_NOTHING; /* until all slots agree */
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

int handle_show_views(struct handle *handle) {
    if (handle->wrap_views) {
        if (!handle->wrapped_views && handle_wrap_views(handle) < 0)
            return -1;
        return show_views(handle, handle->wrapped_views);
    }
    if (handle->shown == SHOWN_VIEWS && !handle->use_orig_params && !handle->watched)
        return 0; /* the slots keep these very objects */
    return show_views(handle, handle->form->views);
}

int handle_unwrap_views(struct handle *handle) {
    if (!handle->wrapped_views)
        return 0;
    Py_CLEAR(handle->wrapped_views);
    return handle->shown == SHOWN_VIEWS ? show_views(handle, handle->form->views) : 0;
}

/* `params`: a list of Parameters. */
static int show_params(struct handle *handle, PyObject *params) {
    for (int64_t i = 0; i < handle->num_slots; i++) {
        const struct slot *slot = &handle->slots[i];
        if (show_in_parameters(slot, PyList_GetItem(params, slot->param)) < 0)
            return -1;
        if (slot->setting == SETTING_BY_SETATTR && remove_key(slot->attributes, slot->name) < 0)
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
        if (show_params(handle, handle->params) < 0)
            return -1;
        handle->shown = SHOWN_SHARDED;
        return 0;
    }
    if (handle->shown == SHOWN_VIEWS)
        return 0;
    handle->shown = SHOWN_NOTHING;
    return handle_show_views(handle);
}

/* ---- full parameters ---- */

static PyObject *new_parameter(PyObject *view, PyObject *model) {
    PyObject *requires_grad = PyObject_GetAttr(model, torch_names.requires_grad);
    PyObject *param =
        requires_grad ? PyObject_CallFunctionObjArgs(torch_names.parameter_type, view, requires_grad, NULL) : NULL;
    Py_XDECREF(requires_grad);
    return param;
}

/* What stands for one parameter in full, new reference: the original Parameter where it can take `value` for its data, which is
 * not so for a DTensor; else a fresh one. */
static PyObject *full_param(struct handle *handle, int64_t i, PyObject *view, PyObject *value) {
    if (!handle->use_orig_params)
        return new_parameter(value, handle->flat_param);
    PyObject *param = PyList_GetItem(handle->params, i);
    if (value != view)
        return new_parameter(value, param);
    return torch_set_data(param, view) < 0 ? NULL : Py_NewRef(param);
}

static PyObject *full_params(struct handle *handle, PyObject *views, PyObject *values) {
    PyObject *params = PyList_New(handle->num_params);
    for (int64_t i = 0; params && i < handle->num_params; i++) {
        PyObject *param = full_param(handle, i, PyTuple_GetItem(views, i), PyTuple_GetItem(values, i));
        if (!param || PyList_SetItem(params, i, param) < 0)
            Py_CLEAR(params);
    }
    return params;
}

/* One Parameter per parameter; a shared one appears under all its names. */
static int show_full(struct handle *handle, PyObject *params) {
    for (int64_t i = 0; !handle->use_orig_params && i < handle->num_slots; i++)
        if (remove_key(handle->slots[i].attributes, handle->slots[i].name) < 0)
            return -1;
    return show_params(handle, params);
}

int handle_show_full_params(struct handle *handle, PyObject *full) {
    PyObject *views = handle_make_views(handle, full), *values = views ? wrapped(handle, views) : NULL;
    PyObject *params = values ? full_params(handle, views, values) : NULL;
    int result = params ? show_full(handle, params) : -1;
    Py_XDECREF(views);
    Py_XDECREF(values);
    Py_XDECREF(params);
    handle->shown = SHOWN_FULL_PARAMS;
    return result;
}

int handle_show_wrapped_grads(struct handle *handle, PyObject *full) {
    PyObject *views = handle->wrap_views ? handle_make_views(handle, full) : NULL;
    PyObject *values = views ? wrapped(handle, views) : NULL;
    int result = values || !handle->wrap_views ? 0 : -1;
    for (int64_t i = 0; values && !result && i < handle->num_params; i++) {
        const struct slot *slot = &handle->slots[i];
        PyObject *value = PyTuple_GetItem(values, i), *param = PyDict_GetItemWithError(slot->parameters, slot->name);
        int requires_grad = param ? torch_requires_grad(param) : PyErr_Occurred() ? -1 : 0;
        bool is_wrapped = value != PyTuple_GetItem(views, i);
        result = requires_grad > 0 && is_wrapped ? torch_set_grad(param, value) : requires_grad < 0 ? -1 : 0;
    }
    Py_XDECREF(views);
    Py_XDECREF(values);
    return result;
}
