#include "handle/flat_param.h"

#include "torch/py_torch.h"
#include "torch/ref.h"
#include "torch/tensor.h"

#include <stdarg.h>

/* ---- init and fini ---- */

static int64_t *integers_from(PyObject *tuple) {
    Py_ssize_t count = PyTuple_Size(tuple);
    int64_t *integers = PyMem_Calloc((size_t)count + 1, sizeof *integers);
    for (Py_ssize_t i = 0; integers && i < count; i++)
        integers[i] = PyLong_AsLongLong(PyTuple_GetItem(tuple, i));
    return integers;
}

static int init_shapes(struct flat_param *param) {
    param->param_shapes = PyMem_Calloc((size_t)param->num_params + 1, sizeof *param->param_shapes);
    if (!param->param_shapes)
        return tensor_check(STATUS_NO_MEMORY, "shapes of a unit");
    for (int64_t i = 0; i < param->num_params; i++) {
        struct param_shape *shape = &param->param_shapes[i];
        PyObject *sizes = PyTuple_GetItem(param->shapes, i), *strides = PyTuple_GetItem(param->strides, i);
        if (!sizes || !strides)
            return -1;
        shape->ndim = PyTuple_Size(sizes);
        shape->sizes = integers_from(sizes);
        shape->strides = strides == Py_None ? NULL : integers_from(strides);
        if (!shape->sizes || (strides != Py_None && !shape->strides))
            return tensor_check(STATUS_NO_MEMORY, "shapes of a unit");
        if (PyErr_Occurred())
            return -1;
    }
    return 0;
}

int flat_param_init(struct flat_param *param, const struct handle_spec *spec) {
    static int64_t last_id;
    const struct config *config = &spec->config;
    param->object = spec->object;
    param->registration_id = ++last_id;
    param->tensor = Py_NewRef(spec->flat_param);
    param->params = spec->params == Py_None ? NULL : Py_NewRef(spec->params);
    param->name = Py_NewRef(spec->name);
    param->device = Py_NewRef(config->device);
    param->layout = *spec->layout;
    param->layout_owner = Py_NewRef(spec->layout_owner);
    param->num_params = spec->layout->num_params;
    param->shapes = Py_NewRef(spec->shapes);
    param->strides = Py_NewRef(spec->strides);
    param->strategy = (enum sharding_strategy)config->strategy;
    param->sharded = param->strategy != NO_SHARD;
    param->use_orig_params = config->use_orig_params;
    param->keep_low_precision_grads = config->keep_low_precision_grads;
    param->skip_writeback_check = config->skip_writeback_check;
    param->verbose = config->verbose;
    param->fqns = PyObject_GetAttrString(param->tensor, "_fqns");
    if (!param->fqns || init_shapes(param) < 0 ||
        collective_group_init(&param->shard_group, config->shard_group) < 0)
        return -1;
    return config->replicate_group == Py_None
               ? 0
               : collective_group_init(&param->replicate_group, config->replicate_group);
}

void flat_param_fini(struct flat_param *param) {
    for (int64_t i = 0; param->param_shapes && i < param->num_params; i++) {
        PyMem_Free(param->param_shapes[i].sizes);
        PyMem_Free(param->param_shapes[i].strides);
    }
    PyMem_Free(param->param_shapes);
    param->param_shapes = NULL;
    collective_group_fini(&param->shard_group);
    collective_group_fini(&param->replicate_group);
    Py_CLEAR(param->layout_owner);
    Py_CLEAR(param->name);
    Py_CLEAR(param->tensor);
    Py_CLEAR(param->params);
    Py_CLEAR(param->shapes);
    Py_CLEAR(param->strides);
    Py_CLEAR(param->fqns);
    Py_CLEAR(param->device);
}

int flat_param_is_trainable(const struct flat_param *param) {
    if (!param->use_orig_params)
        return torch_requires_grad(param->tensor);
    for (int64_t i = 0; i < param->num_params; i++) {
        int requires_grad = torch_requires_grad(PyList_GetItem(param->params, i));
        if (requires_grad)
            return requires_grad;
    }
    return 0;
}

bool flat_param_stays_unsharded(const struct flat_param *param) {
    return param->strategy == SHARD_GRAD_OP || param->strategy == HYBRID_SHARD_ZERO2;
}

/* ---- names ---- */

int flat_param_error(const struct flat_param *param, PyObject *type, const char *format, ...) {
    va_list arguments;
    va_start(arguments, format);
    OWNED *text = PyUnicode_FromFormatV(format, arguments);
    va_end(arguments);
    if (text)
        PyErr_Format(type, "rank %lld, unit %S: %U", (long long)param->layout.rank, param->name, text);
    return -1;
}

int flat_param_refuse(const struct flat_param *param, const char *from, const char *to, const char *remedy) {
    return flat_param_error(param, PyExc_RuntimeError, "illegal transition from %s to %s%s", from, to,
                            remedy);
}

const char *const training_state_names[USE_STATES] = {"IDLE", "FORWARD", "BACKWARD_PRE", "BACKWARD_POST",
                                                      "SUMMON_FULL_PARAMS"};

void flat_param_rename(struct flat_param *param, PyObject *name) {
    ref_set(&param->name, Py_NewRef(name));
}

PyObject *flat_param_fqn(const struct flat_param *param, int64_t index) {
    return PySequence_GetItem(param->fqns, index);
}
