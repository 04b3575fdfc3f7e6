/* Building and dropping a handle. */
#include "handle/handle.h"

#include <string.h>

#include "handle/handle_ops.h"
#include "torch/names.h"
#include "torch/tensor.h"

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

static int init_slots(struct handle *handle, PyObject *slots) {
    handle->num_slots = PyList_Size(slots);
    handle->slots = PyMem_Calloc((size_t)handle->num_slots + 1, sizeof *handle->slots);
    if (!handle->slots)
        return tensor_check(STATUS_NO_MEMORY, "slots of a unit");
    for (int64_t i = 0; i < handle->num_slots; i++)
        if (slot_init(&handle->slots[i], PyList_GetItem(slots, i)) < 0)
            return -1;
    for (int64_t i = 0; i < handle->num_slots; i++)
        handle->watched = handle->watched || handle->slots[i].setting == SETTING_BY_SETATTR;
    return 0;
}

static int64_t *integers_from(PyObject *tuple) {
    Py_ssize_t count = PyTuple_Size(tuple);
    int64_t *integers = PyMem_Calloc((size_t)count + 1, sizeof *integers);
    for (Py_ssize_t i = 0; integers && i < count; i++)
        integers[i] = PyLong_AsLongLong(PyTuple_GetItem(tuple, i));
    return integers;
}

static int init_shapes(struct handle *handle) {
    handle->param_shapes = PyMem_Calloc((size_t)handle->num_params + 1, sizeof *handle->param_shapes);
    if (!handle->param_shapes)
        return tensor_check(STATUS_NO_MEMORY, "shapes of a unit");
    for (int64_t i = 0; i < handle->num_params; i++) {
        struct param_shape *shape = &handle->param_shapes[i];
        PyObject *sizes = PyTuple_GetItem(handle->shapes, i), *strides = PyTuple_GetItem(handle->strides, i);
        if (!sizes || !strides)
            return -1;
        shape->ndim = PyTuple_Size(sizes);
        shape->sizes = integers_from(sizes);
        shape->strides = strides == Py_None ? NULL : integers_from(strides);
        if (!shape->sizes || (strides != Py_None && !shape->strides))
            return tensor_check(STATUS_NO_MEMORY, "shapes of a unit");
    }
    return PyErr_Occurred() ? -1 : 0;
}

static int init_groups(struct handle *handle, const struct handle_spec *spec) {
    if (collective_group_init(&handle->shard_group, spec->process_group) < 0)
        return -1;
    if (spec->replicate_group == Py_None)
        return 0;
    return collective_group_init(&handle->replicate_group, spec->replicate_group);
}

static void init_references(struct handle *handle, const struct handle_spec *spec) {
    handle->name = Py_NewRef(spec->name);
    handle->flat_param = Py_NewRef(spec->flat_param);
    handle->params = spec->params == Py_None ? NULL : Py_NewRef(spec->params);
    handle->shapes = Py_NewRef(spec->shapes);
    handle->strides = Py_NewRef(spec->strides);
    handle->device = Py_NewRef(spec->device);
    handle->flat_param_owner = spec->flat_param_owner == Py_None ? NULL : Py_NewRef(spec->flat_param_owner);
    handle->wrap_views = spec->wrap_views == Py_None ? NULL : Py_NewRef(spec->wrap_views);
    handle->fallback_dtypes = PyTuple_Pack(2, spec->param_dtype, spec->reduce_dtype);
}

int handle_init(struct handle *handle, const struct handle_spec *spec) {
    memset(handle, 0, sizeof *handle);
    handle->form = &handle->forms[PRECISION_COMPUTE];
    handle->layout = *spec->layout;
    handle->layout_owner = Py_NewRef(spec->layout_owner);
    handle->num_params = spec->layout->num_params;
    handle->strategy = (enum sharding_strategy)spec->strategy;
    handle->sharded = handle->strategy != NO_SHARD;
    handle->use_orig_params = spec->use_orig_params;
    handle->keep_low_precision_grads = spec->keep_low_precision_grads;
    handle->skip_writeback_check = spec->skip_writeback_check;
    handle->verbose = spec->verbose;
    handle->may_offload = spec->offload;
    handle->predivide = spec->predivide;
    handle->postdivide = spec->postdivide;
    init_references(handle, spec);
    if (!handle->fallback_dtypes)
        goto fail;
    if (init_slots(handle, spec->slots) < 0 || init_shapes(handle) < 0 || init_groups(handle, spec) < 0)
        goto fail;
    if ((handle->op_id = handle_ops_add(handle)) < 0)
        goto fail;
    return 0;
fail:
    handle_fini(handle);
    return -1;
}

static void fini_slots(struct handle *handle) {
    for (int64_t i = 0; handle->slots && i < handle->num_slots; i++) {
        Py_CLEAR(handle->slots[i].module);
        Py_CLEAR(handle->slots[i].parameters);
        Py_CLEAR(handle->slots[i].attributes);
        Py_CLEAR(handle->slots[i].name);
    }
    PyMem_Free(handle->slots);
}

static void fini_shapes(struct handle *handle) {
    for (int64_t i = 0; handle->param_shapes && i < handle->num_params; i++) {
        PyMem_Free(handle->param_shapes[i].sizes);
        PyMem_Free(handle->param_shapes[i].strides);
    }
    PyMem_Free(handle->param_shapes);
}

static void fini_lazy(struct handle *handle) {
    Py_CLEAR(handle->unshard_work);
    Py_CLEAR(handle->wrapped_views);
    Py_CLEAR(handle->local_shard);
    Py_CLEAR(handle->shard_sizes);
    Py_CLEAR(handle->orig_dtype);
    handle_fini_forms(handle);
    Py_CLEAR(handle->shard_like.tensor);
    if (retirement_forget(handle->input_retirement, &handle->device_shard) < 0)
        PyErr_WriteUnraisable(handle->name);
    buffer_fini(&handle->device_shard);
    PyMem_Free(handle->sources);
    PyMem_Free(handle->shard_pieces);
}

void handle_fini(struct handle *handle) {
    handle_drop_gradients(handle);
    Py_CLEAR(handle->gradients.unsharded);
    fini_lazy(handle);
    fini_slots(handle);
    fini_shapes(handle);
    handle_ops_remove(handle->op_id);
    collective_group_fini(&handle->shard_group);
    collective_group_fini(&handle->replicate_group);
    comm_hook_fini(&handle->comm_hook);
    Py_CLEAR(handle->layout_owner);
    Py_CLEAR(handle->name);
    Py_CLEAR(handle->published);
    Py_CLEAR(handle->flat_param);
    Py_CLEAR(handle->params);
    Py_CLEAR(handle->shapes);
    Py_CLEAR(handle->strides);
    Py_CLEAR(handle->device);
    Py_CLEAR(handle->flat_param_owner);
    Py_CLEAR(handle->wrap_views);
    Py_CLEAR(handle->summon_full);
    Py_CLEAR(handle->summon_grad);
    Py_CLEAR(handle->hooks_seen);
    Py_CLEAR(handle->empty_param);
    Py_CLEAR(handle->fallback_dtypes);
    memset(handle, 0, sizeof *handle);
    handle->form = &handle->forms[PRECISION_COMPUTE];
}

PyObject *handle_fqn(const struct handle *handle, int64_t param) {
    PyObject *fqns = PyObject_GetAttrString(handle->flat_param, "_fqns");
    PyObject *fqn = fqns ? PySequence_GetItem(fqns, param) : NULL;
    Py_XDECREF(fqns);
    if (fqn)
        return fqn;
    PyErr_Clear();
    return Py_NewRef(handle->slots[param].name);
}

int handle_visit(struct handle *handle, visitproc visit, void *arg) {
    for (int64_t i = 0; handle->slots && i < handle->num_slots; i++) {
        Py_VISIT(handle->slots[i].module);
        Py_VISIT(handle->slots[i].parameters);
        Py_VISIT(handle->slots[i].attributes);
    }
    Py_VISIT(handle->flat_param_owner);
    Py_VISIT(handle->comm_hook.function);
    Py_VISIT(handle->comm_hook.state);
    Py_VISIT(handle->flat_param);
    Py_VISIT(handle->published);
    Py_VISIT(handle->params);
    for (int i = 0; i < PRECISIONS; i++)
        Py_VISIT(handle->forms[i].views);
    Py_VISIT(handle->wrapped_views);
    Py_VISIT(handle->wrap_views);
    Py_VISIT(handle->gradients.pending);
    return 0;
}
