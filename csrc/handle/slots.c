/* What the modules' slots show: sharded Parameters, views of the unsharded storage, or full Parameters. */
#include "handle/slots.h"
#include "handle/unit_error.h"

#include "torch/names.h"
#include "torch/tensor.h"

/* ---- life ---- */

static int slot_init(struct slot *slot, PyObject *entry) {
    long long param;
    int setting;
    PyObject *module, *name;
    if (!PyArg_ParseTuple(entry, "LOO!i", &param, &module, &PyUnicode_Type, &name, &setting))
        return -1;
    slot->param = param;
    slot->module = Py_NewRef(module);
    slot->name = Py_NewRef(name);
    PyUnicode_InternInPlace(&slot->name);
    slot->parameters = PyObject_GetAttrString(module, "_parameters");
    slot->attributes = slot->parameters ? PyObject_GetAttrString(module, "__dict__") : NULL;
    slot->setting = (enum setting)setting;
    return slot->attributes ? 0 : -1;
}

void slots_bind(struct slots *slots, const struct flat_param *param) {
    slots->param = param;
}

int slots_init(struct slots *slots, const struct handle_spec *spec) {
    slots->wrap_views = spec->wrap_views == Py_None ? NULL : Py_NewRef(spec->wrap_views);
    slots->count = PyList_Size(spec->slots);
    slots->all = PyMem_Calloc((size_t)slots->count + 1, sizeof *slots->all);
    if (!slots->all)
        return tensor_check(STATUS_NO_MEMORY, "slots of a unit");
    for (int64_t i = 0; i < slots->count; i++) {
        if (slot_init(&slots->all[i], PyList_GetItem(spec->slots, i)) < 0)
            return -1;
        slots->watched = slots->watched || slots->all[i].setting == SETTING_BY_SETATTR;
    }
    return 0;
}

void slots_fini(struct slots *slots) {
    for (int64_t i = 0; slots->all && i < slots->count; i++) {
        Py_CLEAR(slots->all[i].module);
        Py_CLEAR(slots->all[i].parameters);
        Py_CLEAR(slots->all[i].attributes);
        Py_CLEAR(slots->all[i].name);
    }
    PyMem_Free(slots->all);
    Py_CLEAR(slots->wrapped_views);
    Py_CLEAR(slots->wrap_views);
    Py_CLEAR(slots->empty_param);
}

int slots_visit(const struct slots *slots, visitproc visit, void *arg) {
    for (int64_t i = 0; slots->all && i < slots->count; i++) {
        Py_VISIT(slots->all[i].module);
        Py_VISIT(slots->all[i].parameters);
        Py_VISIT(slots->all[i].attributes);
    }
    Py_VISIT(slots->wrapped_views);
    Py_VISIT(slots->wrap_views);
    return 0;
}

/* ---- wrapped views ---- */

/* What wrap_views makes of `views`, or `views` themselves. New reference. */
static PyObject *wrapped(const struct slots *slots, PyObject *views) {
    return slots->wrap_views ? PyObject_CallFunctionObjArgs(slots->wrap_views, views, NULL)
                             : Py_NewRef(views);
}

int slots_wrap_views(struct slots *slots, PyObject *views) {
    if (!slots->wrap_views)
        return 0;
    ref_set(&slots->wrapped_views, wrapped(slots, views));
    return slots->wrapped_views ? 0 : -1;
}

void slots_forget_wrapped(struct slots *slots) {
    Py_CLEAR(slots->wrapped_views);
}

PyObject *slots_local_value(const struct slots *slots, PyObject *value) {
    PyObject *local = slots->wrap_views ? PyObject_GetAttrString(value, "_local_tensor") : NULL;
    if (!local) {
        PyErr_Clear();
        return value;
    }
    Py_DECREF(local); /* `value` keeps it */
    return local;
}

/* ---- the shard ---- */

static PyObject *shard_part(struct slots *slots, PyObject *shard, int64_t param) {
    const struct layout_shard_range *range = &slots->param->layout.shard_ranges[param];
    if (!slots->param->sharded)
        return torch_view(shard, layout_param_offset(&slots->param->layout, param),
                          layout_param_numel(&slots->param->layout, param),
                          PyTuple_GetItem(slots->param->shapes, param),
                          PyTuple_GetItem(slots->param->strides, param));
    if (!range->in_shard)
        return Py_NewRef(slots->empty_param);
    PyObject *shape = Py_BuildValue("(L)", (long long)range->numel_in_shard);
    PyObject *part =
        shape ? torch_view(shard, range->offset_in_shard, range->numel_in_shard, shape, Py_None) : NULL;
    Py_XDECREF(shape);
    return part;
}

int slots_point_params_at(struct slots *slots, PyObject *shard) {
    ref_set(&slots->empty_param, PyObject_CallMethod(shard, "new_empty", "(i)", 0));
    if (!slots->empty_param)
        return -1;
    for (int64_t i = 0; i < slots->param->num_params; i++) {
        PyObject *part = shard_part(slots, shard, i);
        int result = part ? torch_set_data(PyList_GetItem(slots->param->params, i), part) : -1;
        Py_XDECREF(part);
        if (result < 0)
            return -1;
    }
    slots->params_are_full = false;
    return 0;
}

/* ---- slots ---- */

PyObject *slots_value(const struct slots *slots, int64_t index) {
    return PyDict_GetItemWithError(slots->all[index].parameters, slots->all[index].name);
}

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

static int put_views(struct slots *slots, PyObject *views) {
    for (int64_t i = 0; i < slots->count; i++) {
        const struct slot *slot = &slots->all[i];
        PyObject *view = PyTuple_GetItem(views, slot->param);
        int result =
            slots->param->use_orig_params ? show_in_parameters(slot, view) : show_as_attribute(slot, view);
        if (result < 0)
            return -1;
    }
    return 0;
}

/* `params`: a list of Parameters. */
static int put_params(struct slots *slots, PyObject *params) {
    for (int64_t i = 0; i < slots->count; i++) {
        const struct slot *slot = &slots->all[i];
        if (show_in_parameters(slot, PyList_GetItem(params, slot->param)) < 0)
            return -1;
        if (slot->setting == SETTING_BY_SETATTR && remove_key(slot->attributes, slot->name) < 0)
            return -1;
    }
    return 0;
}

/* Nothing is shown until all slots agree. */
static int change(struct slots *slots, enum shown to, int (*put)(struct slots *, PyObject *),
                  PyObject *values) {
    if (slots_set_shown(slots, SHOWN_NOTHING) < 0 || put(slots, values) < 0)
        return -1;
    return slots_set_shown(slots, to);
}

int slots_show_nothing(struct slots *slots) {
    return slots_set_shown(slots, SHOWN_NOTHING);
}

static int refuse_assigned(const struct slots *slots, const struct slot *slot) {
    PyObject *fqn = flat_param_fqn(slots->param, slot->param);
    unit_error(PyExc_RuntimeError, slots->param->layout.rank, slots->param->name,
               "something else was assigned to %S after wrapping. With use_orig_params=False it "
               "would be trained on each rank alone and never be saved. Assign or tie before wrapping, "
               "change values inside FullyShardedDataParallel.summon_full_params(module), or pass "
               "use_orig_params=True.",
               fqn);
    Py_DECREF(fqn);
    return -1;
}

/* What the slots keep from forward to forward is still there, or was deleted. */
static int check_kept(const struct slots *slots, PyObject *views) {
    for (int64_t i = 0; i < slots->count; i++) {
        const struct slot *slot = &slots->all[i];
        PyObject *value = PyDict_GetItemWithError(slot->attributes, slot->name);
        if (value == PyTuple_GetItem(views, slot->param))
            continue;
        if (!value)
            value = PyDict_GetItemWithError(slot->parameters, slot->name);
        if (value && value != Py_None)
            return refuse_assigned(slots, slot);
        if (PyErr_Occurred())
            return -1;
    }
    return 0;
}

/* In the first two forwards, later in one of eight: to look costs a lookup for each parameter. */
static bool is_looked_at(struct slots *slots) {
    uint32_t shown = slots->num_kept++;
    return shown < 2 || shown % 8 == 0;
}

int slots_show_views(struct slots *slots, PyObject *views) {
    if (slots->wrap_views) {
        if (!slots->wrapped_views && slots_wrap_views(slots, views) < 0)
            return -1;
        return change(slots, SHOWN_VIEWS, put_views, slots->wrapped_views);
    }
    if (slots->shown == SHOWN_VIEWS && !slots->param->use_orig_params && !slots->watched)
        return is_looked_at(slots) ? check_kept(slots, views) : 0;
    return change(slots, SHOWN_VIEWS, put_views, views);
}

int slots_show_sharded(struct slots *slots, PyObject *shard, PyObject *views) {
    if (slots->shown == SHOWN_SHARDED && !slots->params_are_full)
        return 0;
    if (!slots->param->use_orig_params)
        return slots->shown == SHOWN_VIEWS ? 0 : slots_show_views(slots, views);
    if (slots->params_are_full && slots_point_params_at(slots, shard) < 0)
        return -1;
    return change(slots, SHOWN_SHARDED, put_params, slots->param->params);
}

/* ---- full parameters ---- */

static PyObject *new_parameter(PyObject *view, PyObject *model) {
    PyObject *requires_grad = PyObject_GetAttr(model, torch_names.requires_grad);
    PyObject *param =
        requires_grad ? PyObject_CallFunctionObjArgs(torch_names.parameter_type, view, requires_grad, NULL)
                      : NULL;
    Py_XDECREF(requires_grad);
    return param;
}

/* What stands for one parameter in full, new reference: the original Parameter where it can take `view` for
 * its data, which is not so for a DTensor; else what the wrapper made of the view, as a Parameter. */
static PyObject *full_param(struct slots *slots, int64_t i, PyObject *view, PyObject *value) {
    int is_param = value == view ? 0 : PyObject_IsInstance(value, torch_names.parameter_type);
    if (is_param < 0)
        return NULL;
    if (!slots->param->use_orig_params)
        return is_param ? Py_NewRef(value) : new_parameter(value, slots->param->tensor);
    PyObject *param = PyList_GetItem(slots->param->params, i);
    if (value != view && !is_param)
        return new_parameter(value, param);
    return torch_set_data(param, view) < 0 ? NULL : Py_NewRef(param);
}

static PyObject *full_params(struct slots *slots, PyObject *views, PyObject *values) {
    PyObject *params = PyList_New(slots->param->num_params);
    slots->params_are_full = true;
    for (int64_t i = 0; params && i < slots->param->num_params; i++) {
        PyObject *param = full_param(slots, i, PyTuple_GetItem(views, i), PyTuple_GetItem(values, i));
        if (!param || PyList_SetItem(params, i, param) < 0)
            Py_CLEAR(params);
    }
    return params;
}

/* One Parameter per parameter; a shared one appears under all its names. */
static int put_full_params(struct slots *slots, PyObject *params) {
    for (int64_t i = 0; !slots->param->use_orig_params && i < slots->count; i++)
        if (remove_key(slots->all[i].attributes, slots->all[i].name) < 0)
            return -1;
    return put_params(slots, params);
}

int slots_show_full_params(struct slots *slots, PyObject *full) {
    PyObject *views = flat_param_views(slots->param, full), *values = views ? wrapped(slots, views) : NULL;
    PyObject *params = values ? full_params(slots, views, values) : NULL;
    int result = params ? change(slots, SHOWN_FULL_PARAMS, put_full_params, params) : -1;
    Py_XDECREF(views);
    Py_XDECREF(values);
    Py_XDECREF(params);
    return result;
}

int slots_show_wrapped_grads(struct slots *slots, PyObject *full) {
    PyObject *views = slots->wrap_views ? flat_param_views(slots->param, full) : NULL;
    PyObject *values = views ? wrapped(slots, views) : NULL;
    int result = values || !slots->wrap_views ? 0 : -1;
    for (int64_t i = 0; values && !result && i < slots->param->num_params; i++) {
        PyObject *value = PyTuple_GetItem(values, i), *param = slots_value(slots, i);
        int requires_grad = param ? torch_requires_grad(param) : PyErr_Occurred() ? -1 : 0;
        bool is_wrapped = value != PyTuple_GetItem(views, i);
        result = requires_grad > 0 && is_wrapped ? torch_set_grad(param, value) : requires_grad < 0 ? -1 : 0;
    }
    Py_XDECREF(views);
    Py_XDECREF(values);
    return result;
}
