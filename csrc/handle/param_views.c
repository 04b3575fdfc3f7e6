/* Exposure of sharded Parameters, of views of the unsharded storage, and of full Parameters in the
 * modules. */
#include "handle/param_views.h"

#include "base/check.h"
#include "torch/py_torch.h"
#include "torch/tensor.h"

/* ---- kind of tensor that is exposed ---- */

static const bool exposed_allowed[EXPOSED_KINDS][EXPOSED_KINDS] = {
    [EXPOSED_NOTHING] = {[EXPOSED_NOTHING] = true, /* retry after a failed change */
                         [EXPOSED_SHARDED] = true,
                         [EXPOSED_VIEWS] = true,
                         [EXPOSED_FULL_PARAMS] = true},
    [EXPOSED_SHARDED] = {[EXPOSED_NOTHING] = true}, /* a change begins */
    [EXPOSED_VIEWS] = {[EXPOSED_NOTHING] = true},
    [EXPOSED_FULL_PARAMS] = {[EXPOSED_NOTHING] = true},
};

static const char *const exposed_names[EXPOSED_KINDS] = {"NOTHING", "SHARDED", "VIEWS", "FULL_PARAMS"};

int param_views_set_exposed(struct param_views *param_views, enum exposed exposed) {
    if (!exposed_allowed[param_views->exposed][exposed])
        return flat_param_refuse(param_views->param, exposed_names[param_views->exposed],
                                 exposed_names[exposed], "");
    param_views->exposed = exposed;
    CHECKED(param_views_check(param_views));
    return 0;
}

void param_views_check(const struct param_views *param_views) {
    INVARIANT(param_views->count >= param_views->param->num_params);
    INVARIANT(param_views->exposed != EXPOSED_SHARDED || param_views->param->use_orig_params);
    INVARIANT(!param_views->wrapped_views || param_views->wrap_views);
}

/* ---- init and fini ---- */

int param_views_init(struct param_views *param_views, const struct handle_spec *spec) {
    param_views->wrap_views = spec->wrap_views == Py_None ? NULL : Py_NewRef(spec->wrap_views);
    param_views->count = PyList_Size(spec->param_views);
    param_views->all = PyMem_Calloc((size_t)param_views->count + 1, sizeof *param_views->all);
    if (!param_views->all)
        return tensor_check(STATUS_NO_MEMORY, "param views of a unit");
    for (int64_t i = 0; i < param_views->count; i++) {
        struct param_view *param_view = &param_views->all[i];
        long long param;
        int setting;
        PyObject *module, *name;
        if (!PyArg_ParseTuple(PyList_GetItem(spec->param_views, i), "LOO!i", &param, &module, &PyUnicode_Type,
                              &name, &setting))
            return -1;
        param_view->param = param;
        param_view->module = Py_NewRef(module);
        param_view->name = Py_NewRef(name);
        PyUnicode_InternInPlace(&param_view->name);
        param_view->setting = (enum setting)setting;
        param_views->uses_setattr = param_views->uses_setattr || setting == SETTING_BY_SETATTR;
        param_view->parameters = PyObject_GetAttrString(module, "_parameters");
        param_view->attributes = param_view->parameters ? PyObject_GetAttrString(module, "__dict__") : NULL;
        if (!param_view->attributes)
            return -1;
    }
    return 0;
}

void param_views_fini(struct param_views *param_views) {
    for (int64_t i = 0; param_views->all && i < param_views->count; i++) {
        Py_CLEAR(param_views->all[i].module);
        Py_CLEAR(param_views->all[i].parameters);
        Py_CLEAR(param_views->all[i].attributes);
        Py_CLEAR(param_views->all[i].name);
    }
    PyMem_Free(param_views->all);
    param_views->all = NULL;
    Py_CLEAR(param_views->wrapped_views);
    Py_CLEAR(param_views->wrap_views);
    Py_CLEAR(param_views->empty_param);
}

/* ---- wrapped views ---- */

/* Return wrap_views(views), or `views` without a wrapper. New reference. */
static PyObject *wrapped(const struct param_views *param_views, PyObject *views) {
    return param_views->wrap_views ? PyObject_CallFunctionObjArgs(param_views->wrap_views, views, NULL)
                                   : Py_NewRef(views);
}

int param_views_wrap_views(struct param_views *param_views, PyObject *views) {
    if (!param_views->wrap_views)
        return 0;
    ref_set(&param_views->wrapped_views, wrapped(param_views, views));
    return param_views->wrapped_views ? 0 : -1;
}

void param_views_drop_wrapped(struct param_views *param_views) {
    Py_CLEAR(param_views->wrapped_views);
}

PyObject *param_views_local_value(const struct param_views *param_views, PyObject *value) {
    PyObject *local = param_views->wrap_views ? PyObject_GetAttrString(value, "_local_tensor") : NULL;
    if (!local) {
        PyErr_Clear();
        return value;
    }
    Py_DECREF(local); /* `value` keeps a reference */
    return local;
}

/* ---- the shard ---- */

int param_views_point_params_at(struct param_views *param_views, PyObject *shard) {
    const struct flat_param *flat_param = param_views->param;
    const struct flat_layout *layout = &flat_param->layout;
    ref_set(&param_views->empty_param, PyObject_CallMethod(shard, "new_empty", "(i)", 0));
    if (!param_views->empty_param)
        return -1;
    for (int64_t i = 0; i < flat_param->num_params; i++) {
        const struct layout_shard_range *range = &layout->shard_ranges[i];
        OWNED *part = NULL;
        if (!flat_param->sharded) {
            part =
                torch_view(shard, layout_param_offset(layout, i), layout_param_numel(layout, i),
                           PyTuple_GetItem(flat_param->shapes, i), PyTuple_GetItem(flat_param->strides, i));
        } else if (!range->in_shard) {
            part = Py_NewRef(param_views->empty_param);
        } else {
            OWNED *shape = Py_BuildValue("(L)", (long long)range->numel_in_shard);
            if (shape)
                part = torch_view(shard, range->offset_in_shard, range->numel_in_shard, shape, Py_None);
        }
        if (!part || torch_set_data(PyList_GetItem(flat_param->params, i), part) < 0)
            return -1;
    }
    param_views->params_are_full = false;
    return 0;
}

/* ---- entries of modules ---- */

PyObject *param_views_value(const struct param_views *param_views, int64_t index) {
    return PyDict_GetItemWithError(param_views->all[index].parameters, param_views->all[index].name);
}

/* Set through the class's own setattr, for classes that override it. */
static int set_by_setattr(const struct param_view *param_view, PyObject *value) {
    if (PyObject_HasAttr(param_view->module, param_view->name) &&
        PyObject_DelAttr(param_view->module, param_view->name) < 0)
        return -1;
    return PyObject_SetAttr(param_view->module, param_view->name, value);
}

static int set_in_parameters(const struct param_view *param_view, PyObject *value) {
    if (param_view->setting == SETTING_BY_SETATTR && set_by_setattr(param_view, value) < 0)
        return -1;
    if (param_view->setting == SETTING_BYPASS &&
        PyDict_SetItem(param_view->attributes, param_view->name, value) < 0)
        return -1;
    return PyDict_SetItem(param_view->parameters, param_view->name, value);
}

static int remove_key(PyObject *dict, PyObject *key) {
    if (PyDict_Contains(dict, key) != 1)
        return PyErr_Occurred() ? -1 : 0;
    return PyDict_DelItem(dict, key);
}

/* Set a plain attribute, which is not in _parameters. */
static int set_as_attribute(const struct param_view *param_view, PyObject *value) {
    if (remove_key(param_view->parameters, param_view->name) < 0)
        return -1;
    if (param_view->setting == SETTING_BY_SETATTR)
        return set_by_setattr(param_view, value);
    return PyDict_SetItem(param_view->attributes, param_view->name, value);
}

static int set_views(struct param_views *param_views, PyObject *views) {
    for (int64_t i = 0; i < param_views->count; i++) {
        const struct param_view *param_view = &param_views->all[i];
        PyObject *view = PyTuple_GetItem(views, param_view->param);
        int result = param_views->param->use_orig_params ? set_in_parameters(param_view, view)
                                                         : set_as_attribute(param_view, view);
        if (result < 0)
            return -1;
    }
    return 0;
}

/* Register a list of Parameters. */
static int set_params(struct param_views *param_views, PyObject *params) {
    for (int64_t i = 0; i < param_views->count; i++) {
        const struct param_view *param_view = &param_views->all[i];
        if (set_in_parameters(param_view, PyList_GetItem(params, param_view->param)) < 0)
            return -1;
        if (param_view->setting == SETTING_BY_SETATTR &&
            remove_key(param_view->attributes, param_view->name) < 0)
            return -1;
    }
    return 0;
}

int param_views_restore_param(const struct param_views *param_views, int64_t param) {
    PyObject *value = PyList_GetItem(param_views->param->params, param);
    for (int64_t i = 0; i < param_views->count; i++) {
        const struct param_view *param_view = &param_views->all[i];
        if (param_view->param == param && PyDict_SetItem(param_view->parameters, param_view->name, value) < 0)
            return -1;
    }
    return 0;
}

/* Change all modules, then record the kind; `exposed` stays EXPOSED_NOTHING on failure. */
static int change_exposed(struct param_views *param_views, enum exposed to,
                          int (*set)(struct param_views *, PyObject *), PyObject *values) {
    if (param_views_set_exposed(param_views, EXPOSED_NOTHING) < 0 || set(param_views, values) < 0)
        return -1;
    return param_views_set_exposed(param_views, to);
}

void param_views_mark_assigned(struct param_views *param_views) {
    param_views->assigned = true;
}

int param_views_restore_attributes(struct param_views *param_views, PyObject *views) {
    for (int64_t i = 0; param_views->assigned && i < param_views->count; i++) {
        const struct param_view *param_view = &param_views->all[i];
        PyObject *view = PyTuple_GetItem(views, param_view->param);
        if (PyDict_GetItemWithError(param_view->parameters, param_view->name) == view &&
            set_as_attribute(param_view, view) < 0)
            return -1;
    }
    return PyErr_Occurred() ? -1 : 0;
}

/* Raise RuntimeError if a view that was exposed by an earlier forward has been replaced. A deleted one is
 * accepted. */
static int check_reused_views(struct param_views *param_views, PyObject *views) {
    if (param_views_restore_attributes(param_views, views) < 0)
        return -1;
    for (int64_t i = 0; i < param_views->count; i++) {
        const struct param_view *param_view = &param_views->all[i];
        PyObject *value = PyDict_GetItemWithError(param_view->attributes, param_view->name);
        if (value == PyTuple_GetItem(views, param_view->param))
            continue;
        if (!value)
            value = PyDict_GetItemWithError(param_view->parameters, param_view->name);
        if (PyErr_Occurred())
            return -1;
        if (!value || value == Py_None)
            continue;
        OWNED *fqn = flat_param_fqn(param_views->param, param_view->param);
        return flat_param_error(
            param_views->param, PyExc_RuntimeError,
            "something else was assigned to %S after wrapping. With use_orig_params=False each rank would "
            "train its own value, and no state dict would contain it. Assign or tie before wrapping, change "
            "values inside FullyShardedDataParallel.summon_full_params(module), or pass "
            "use_orig_params=True.",
            fqn);
    }
    param_views->assigned = false;
    return 0;
}

int param_views_expose_views(struct param_views *param_views, PyObject *views) {
    if (param_views->wrap_views) {
        if (!param_views->wrapped_views && param_views_wrap_views(param_views, views) < 0)
            return -1;
        return change_exposed(param_views, EXPOSED_VIEWS, set_views, param_views->wrapped_views);
    }
    if (param_views->exposed == EXPOSED_VIEWS && !param_views->param->use_orig_params) {
        /* Check in the first two forwards and in every eighth: each check costs a dict lookup per
         * parameter. */
        uint32_t num_reused = param_views->num_reused++;
        bool is_due =
            num_reused < 2 || num_reused % 8 == 0 || param_views->assigned || param_views->uses_setattr;
        if (is_due && check_reused_views(param_views, views) < 0)
            return -1;
        if (!param_views->uses_setattr)
            return 0;
    }
    return change_exposed(param_views, EXPOSED_VIEWS, set_views, views);
}

int param_views_expose_sharded(struct param_views *param_views, PyObject *shard, PyObject *views) {
    if (param_views->exposed == EXPOSED_SHARDED && !param_views->params_are_full)
        return 0;
    if (!param_views->param->use_orig_params)
        return param_views->exposed == EXPOSED_VIEWS ? 0 : param_views_expose_views(param_views, views);
    if (param_views->params_are_full && param_views_point_params_at(param_views, shard) < 0)
        return -1;
    return change_exposed(param_views, EXPOSED_SHARDED, set_params, param_views->param->params);
}

/* ---- full parameters ---- */

static PyObject *new_parameter(PyObject *view, PyObject *model) {
    OWNED *requires_grad = PyObject_GetAttr(model, torch_names.requires_grad);
    return requires_grad ? PyObject_CallFunctionObjArgs(torch_names.parameter_type, view, requires_grad, NULL)
                         : NULL;
}

/* Return the full tensors to expose, new list: each original Parameter with its view as data, or a new
 * Parameter around the value where wrap_views made a DTensor. */
static PyObject *full_params(struct param_views *param_views, PyObject *views, PyObject *values) {
    const struct flat_param *flat_param = param_views->param;
    OWNED *params = PyList_New(flat_param->num_params);
    param_views->params_are_full = true;
    for (int64_t i = 0; params && i < flat_param->num_params; i++) {
        PyObject *view = PyTuple_GetItem(views, i), *value = PyTuple_GetItem(values, i), *param = NULL;
        int is_param = value == view ? 0 : PyObject_IsInstance(value, torch_names.parameter_type);
        if (is_param > 0 && !flat_param->use_orig_params) {
            param = Py_NewRef(value);
        } else if (is_param == 0 && !flat_param->use_orig_params) {
            param = new_parameter(value, flat_param->tensor);
        } else if (is_param == 0 && value != view) {
            param = new_parameter(value, PyList_GetItem(flat_param->params, i));
        } else if (is_param >= 0) {
            param = PyList_GetItem(flat_param->params, i);
            param = torch_set_data(param, view) < 0 ? NULL : Py_NewRef(param);
        }
        if (!param || PyList_SetItem(params, i, param) < 0)
            return NULL;
    }
    return Py_XNewRef(params);
}

/* Register one Parameter per parameter, and shared ones under all their names. */
static int set_full_params(struct param_views *param_views, PyObject *params) {
    for (int64_t i = 0; !param_views->param->use_orig_params && i < param_views->count; i++)
        if (remove_key(param_views->all[i].attributes, param_views->all[i].name) < 0)
            return -1;
    return set_params(param_views, params);
}

int param_views_expose_full_params(struct param_views *param_views, PyObject *full) {
    OWNED *views = flat_param_views(param_views->param, full);
    OWNED *values = views ? wrapped(param_views, views) : NULL;
    OWNED *params = values ? full_params(param_views, views, values) : NULL;
    return params ? change_exposed(param_views, EXPOSED_FULL_PARAMS, set_full_params, params) : -1;
}

int param_views_expose_wrapped_grads(struct param_views *param_views, PyObject *full) {
    OWNED *views = param_views->wrap_views ? flat_param_views(param_views->param, full) : NULL;
    OWNED *values = views ? wrapped(param_views, views) : NULL;
    int result = values || !param_views->wrap_views ? 0 : -1;
    for (int64_t i = 0; values && !result && i < param_views->param->num_params; i++) {
        PyObject *value = PyTuple_GetItem(values, i), *param = param_views_value(param_views, i);
        int requires_grad = param ? torch_requires_grad(param) : PyErr_Occurred() ? -1 : 0;
        bool is_wrapped = value != PyTuple_GetItem(views, i);
        result = requires_grad > 0 && is_wrapped ? torch_set_grad(param, value) : requires_grad < 0 ? -1 : 0;
    }
    return result;
}
