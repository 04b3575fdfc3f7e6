/* Gradients reduced the way the user asked for with register_comm_hook, and the low-precision hooks of torch.
 *
 * A custom hook does everything: it gets the padded full gradient and an empty shard to fill (NO_SHARD: the gradient alone), and
 * no factor is applied. torch's fp16 and bf16 hooks are known by identity and run as the reduction of this library, in the
 * hook's dtype and with the group and factors of its state: torch's own end in an operation that the CPU does not have. */
#include "handle/handle.h"
#include "torch/names.h"
#include "torch/tensor.h"

/* The reduction from now on is in `dtype`, also when lazy init comes later or comes again. */
static int reduce_in(struct handle *handle, PyObject *dtype) {
    PyObject *param_dtype = PyTuple_GetItem(handle->fallback_dtypes, 0);
    PyObject *dtypes = param_dtype ? PyTuple_Pack(2, param_dtype, dtype) : NULL;
    if (!dtypes)
        return -1;
    ref_set(&handle->fallback_dtypes, dtypes);
    return handle->ready ? handle_set_reduce_dtype(handle, dtype) : 0;
}

int handle_set_comm_hook(struct handle *handle, PyObject *function, PyObject *state, PyObject *dtype) {
    struct comm_hook *hook = &handle->comm_hook;
    if (hook->function || handle->gradients.in_backward) {
        PyErr_Format(PyExc_RuntimeError,
                     "rank %lld, unit %S: a communication hook is registered once, before a backward",
                     (long long)handle->layout.rank, handle->name);
        return -1;
    }
    if (dtype != Py_None && reduce_in(handle, dtype) < 0)
        return -1;
    hook->native = dtype != Py_None;
    hook->function = Py_NewRef(function);
    hook->state = Py_NewRef(state);
    handle->predivide = handle->postdivide = 1.0;
    return 0;
}

void comm_hook_fini(struct comm_hook *hook) {
    Py_CLEAR(hook->function);
    Py_CLEAR(hook->state);
    collective_group_fini(&hook->group);
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
int handle_read_comm_hook(struct handle *handle) {
    struct comm_hook *hook = &handle->comm_hook;
    if (!hook->native)
        return 0;
    if (read_factor(hook->state, "gradient_predivide_factor", &handle->predivide) < 0)
        return -1;
    if (read_factor(hook->state, "gradient_postdivide_factor", &handle->postdivide) < 0)
        return -1;
    return read_group(hook);
}

/* ---- a custom hook ---- */

static int refuse_result(struct handle *handle, PyObject *result) {
    int64_t want = handle->sharded ? handle->layout.shard_numel : handle->layout.padded_numel;
    PyErr_Format(
        PyExc_RuntimeError,
        "rank %lld, unit %S: its communication hook left a gradient of %R, expected a dense one of %lld elements "
        "on %S",
        (long long)handle->layout.rank, handle->name, (PyObject *)Py_TYPE(result), (long long)want, handle->device);
    return -1;
}

/* A hook may have given the tensor other data (`output.data = ...`): another dtype is welcome, another size is not. */
static int check_result(struct handle *handle, PyObject *result) {
    int64_t want = handle->sharded ? handle->layout.shard_numel : handle->layout.padded_numel;
    struct tensor_view view;
    if (tensor_view_of(result, &view) < 0)
        return -1;
    bool fits = tensor_view_numel(&view) == want && tensor_view_is_contiguous(&view) && view.dtype != DTYPE_OTHER &&
                view.device == handle->compute_view.device;
    return fits ? 0 : refuse_result(handle, result);
}

PyObject *handle_call_comm_hook(struct handle *handle) {
    struct comm_hook *hook = &handle->comm_hook;
    struct gradients *gradients = &handle->gradients;
    PyObject *output = handle->sharded ? gradients->reduce_output : NULL; /* NULL ends the arguments */
    PyObject *done = PyObject_CallFunctionObjArgs(hook->function, hook->state, gradients->reduce_input, output, NULL);
    Py_XDECREF(done);
    return done && check_result(handle, gradients->reduce_output) == 0 ? Py_NewRef(Py_None) : NULL;
}
