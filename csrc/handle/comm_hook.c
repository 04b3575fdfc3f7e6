/* Gradients reduced the way the user asked for with register_comm_hook, and the low-precision hooks of torch.
 *
 * A custom hook does everything: it gets the padded full gradient and an empty shard to fill (NO_SHARD: the gradient alone), and
 * no factor is applied. torch's fp16 and bf16 hooks are known by identity and run as the reduction of this library, in the
 * hook's dtype and with the group and factors of its state: torch's own end in an operation that the CPU does not have. */
#include "handle/gradients.h"
#include "handle/unit_error.h"
#include "torch/names.h"
#include "torch/tensor.h"

int gradients_check_hookless(const struct gradients *gradients) {
    if (!gradients->comm_hook.function && !gradients->in_backward)
        return 0;
    return unit_error(PyExc_RuntimeError, gradients->param->layout.rank, gradients->param->name,
                      "a communication hook is registered once, before a backward");
}

void gradients_set_comm_hook(struct gradients *gradients, PyObject *function, PyObject *state, bool native) {
    gradients->comm_hook.native = native;
    gradients->comm_hook.function = Py_NewRef(function);
    gradients->comm_hook.state = Py_NewRef(state);
    gradients->predivide = gradients->postdivide = 1.0;
}

/* ---- a low-precision hook, run here ---- */

/* torch divides by a factor above 1 only. */
static int read_factor(PyObject *state, const char *name, double *factor) {
    PyObject *value = PyObject_GetAttrString(state, name);
    double number = value ? PyFloat_AsDouble(value) : 1.0;
    Py_XDECREF(value);
    *factor = number > 1.0 ? number : 1.0;
    return PyErr_Occurred() ? -1 : 0;
}

static int read_group(struct comm_hook *hook) {
    PyObject *group = PyObject_GetAttrString(hook->state, "process_group");
    int result = group ? 0 : -1;
    if (group && group != hook->group.group) {
        collective_group_fini(&hook->group);
        result = collective_group_init(&hook->group, group);
    }
    Py_XDECREF(group);
    return result;
}

/* The state is the user's, who may change it between reductions. */
int gradients_read_comm_hook(struct gradients *gradients) {
    struct comm_hook *hook = &gradients->comm_hook;
    if (!hook->native)
        return 0;
    if (read_factor(hook->state, "gradient_predivide_factor", &gradients->predivide) < 0)
        return -1;
    if (read_factor(hook->state, "gradient_postdivide_factor", &gradients->postdivide) < 0)
        return -1;
    return read_group(hook);
}

/* ---- a custom hook ---- */

static int refuse_result(struct gradients *gradients, PyObject *result) {
    int64_t want =
        gradients->param->sharded ? gradients->param->layout.shard_numel : gradients->param->layout.padded_numel;
    return unit_error(PyExc_RuntimeError, gradients->param->layout.rank, gradients->param->name,
                      "its communication hook left a gradient of %R, expected a dense one of %lld elements "
                      "on %S",
                      (PyObject *)Py_TYPE(result), (long long)want, gradients->param->device);
}

/* A hook may have given the tensor other data (`output.data = ...`): another dtype is welcome, another size is not. */
static int check_result(struct gradients *gradients, PyObject *result) {
    int64_t want =
        gradients->param->sharded ? gradients->param->layout.shard_numel : gradients->param->layout.padded_numel;
    struct tensor_view view;
    if (tensor_view_of(result, &view) < 0)
        return -1;
    bool fits = tensor_view_numel(&view) == want && tensor_view_is_contiguous(&view) && dtype_is_known(view.dtype) &&
                view.device == gradients->storage->compute_view.device;
    return fits ? 0 : refuse_result(gradients, result);
}

PyObject *gradients_call_comm_hook(struct gradients *gradients) {
    struct comm_hook *hook = &gradients->comm_hook;
    /* what the hook has enqueued may read that memory when the hook gives the tensor other data */
    ref_set(&gradients->hook_input, PyObject_GetAttrString(gradients->reduce_input, "data"));
    if (!gradients->hook_input)
        return NULL;
    PyObject *output = gradients->param->sharded ? gradients->reduce_output : NULL; /* NULL ends the arguments */
    PyObject *done = PyObject_CallFunctionObjArgs(hook->function, hook->state, gradients->reduce_input, output, NULL);
    Py_XDECREF(done);
    return done && check_result(gradients, gradients->reduce_output) == 0 ? Py_NewRef(Py_None) : NULL;
}
