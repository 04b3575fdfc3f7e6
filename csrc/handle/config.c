/* Reading a UnitConfig. */
#include "handle/config.h"

#include "torch/ref.h"

/* Converter of PyArg_ParseTuple: read the value of a member of a torch enum, without its property; 0 for
 * None. */
static int enum_value(PyObject *member, void *value) {
    *(int *)value = 0;
    if (member == Py_None)
        return 1;
    OWNED *number = PyObject_GetAttrString(member, "_value_");
    *(int *)value = number ? (int)PyLong_AsLong(number) : 0;
    return !PyErr_Occurred();
}

int config_read(struct config *config, PyObject *unit_config) {
    struct unit_options *options = &config->options;
    PyObject *extension;
    if (!PyTuple_Check(unit_config)) {
        PyErr_Format(PyExc_TypeError, "expected a UnitConfig, got %R", (PyObject *)Py_TYPE(unit_config));
        return -1;
    }
    return PyArg_ParseTuple(unit_config, "OOOO&ppOOpddppppO&pppO", &config->shard_group,
                            &config->replicate_group, &config->device, enum_value, &config->strategy,
                            &config->use_orig_params, &config->offload_params, &config->param_dtype,
                            &config->reduce_dtype, &config->keep_low_precision_grads, &config->predivide,
                            &config->postdivide, &config->skip_writeback_check, &config->verbose,
                            &options->cast_forward_inputs, &options->cast_root_forward_inputs, enum_value,
                            &options->backward_prefetch, &options->forward_prefetch,
                            &options->limit_all_gathers, &options->full_precision_in_eval, &extension)
               ? 0
               : -1;
}
