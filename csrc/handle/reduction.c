/* The reduction of a unit's gradients: by a collective, or by the hook that the user has registered. */
#include "handle/gradients.h"

#include "handle/unit_error.h"
#include "torch/names.h"
#include "torch/tensor.h"

#include "base/check.h"

/* ---- communication hooks ---- */

/* [Note: communication hooks] A custom hook of register_comm_hook does everything: it gets the padded full
 * gradient and an empty shard to fill (NO_SHARD: the gradient alone), and no factor is applied. torch's fp16
 * and bf16 hooks are known by identity and run as the reduction of this library, in the hook's dtype and with
 * the group and factors of its state: torch's own end in an operation that the CPU does not have. */
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

/* The state is the user's, who may change it between reductions. */
int gradients_read_comm_hook(struct gradients *gradients) {
    struct comm_hook *hook = &gradients->comm_hook;
    if (!hook->native)
        return 0;
    if (read_factor(hook->state, "gradient_predivide_factor", &gradients->predivide) < 0 ||
        read_factor(hook->state, "gradient_postdivide_factor", &gradients->postdivide) < 0)
        return -1;
    OWNED *group = PyObject_GetAttrString(hook->state, "process_group");
    if (!group || group == hook->group.group)
        return group ? 0 : -1;
    collective_group_fini(&hook->group);
    return collective_group_init(&hook->group, group);
}

/* ---- a custom hook ---- */

/* A hook may have given the tensor other data (`output.data = ...`): another dtype is welcome, another size
 * is not. */
static int check_result(struct gradients *gradients, PyObject *result) {
    const struct flat_param *param = gradients->param;
    int64_t want = param->sharded ? param->layout.shard_numel : param->layout.padded_numel;
    struct tensor_view view;
    if (tensor_view_of(result, &view) < 0)
        return -1;
    if (tensor_view_numel(&view) == want && tensor_view_is_contiguous(&view) && dtype_is_known(view.dtype) &&
        view.device == gradients->storage->compute_view.device)
        return 0;
    return unit_error(PyExc_RuntimeError, param->layout.rank, param->name,
                      "its communication hook left a gradient of %R, expected a dense one of %lld elements "
                      "on %S",
                      (PyObject *)Py_TYPE(result), (long long)want, param->device);
}

/* None, or NULL with an exception. */
static PyObject *call_comm_hook(struct gradients *gradients) {
    struct comm_hook *hook = &gradients->comm_hook;
    /* what the hook has enqueued may read that memory when the hook gives the tensor other data */
    ref_set(&gradients->hook_input, PyObject_GetAttrString(gradients->reduce_input, "data"));
    if (!gradients->hook_input)
        return NULL;
    /* NULL ends the arguments */
    PyObject *output = gradients->param->sharded ? gradients->reduce_output : NULL;
    OWNED *done =
        PyObject_CallFunctionObjArgs(hook->function, hook->state, gradients->reduce_input, output, NULL);
    return done && check_result(gradients, gradients->reduce_output) == 0 ? Py_NewRef(Py_None) : NULL;
}

/* ---- reduction ---- */

int gradients_take_memory(struct gradients *gradients) {
    /* A hook may give the output other memory. */
    bool is_hooked = gradients->comm_hook.function && !gradients->comm_hook.native;
    if (!gradients->param->sharded || gradients->saved_shard || is_hooked ||
        gradients_reduce_twice(gradients))
        return 0;
    const struct storage *storage = gradients->storage;
    bool is_output = storage->copy->reduce_kind == storage->orig_kind;
    PyObject **memory = is_output ? &gradients->reduce_output : &gradients->cast_output;
    ref_set(memory, torch_empty_like(storage->shard_like));
    return *memory ? 0 : -1;
}

int gradients_reduce_enqueue(struct gradients *gradients) {
    const struct flat_param *param = gradients->param;
    const struct comm_hook *hook = &gradients->comm_hook;
    if (!gradients->reduce_output)
        gradients->reduce_output = param->sharded
                                       ? torch_empty_like(gradients->storage->copy->reduce_output_like)
                                       : Py_NewRef(gradients->reduce_input);
    if (!gradients->reduce_output)
        return -1;
    /* A hybrid strategy whose shard group has one rank is NO_SHARD over its replicas. */
    bool over_replicas = !param->sharded && param->replicate_group.group;
    const struct collective_group *group = hook->native    ? &hook->group
                                           : over_replicas ? &param->replicate_group
                                                           : &param->shard_group;
    if (hook->function && !hook->native)
        gradients->work = call_comm_hook(gradients);
    else if (param->sharded)
        gradients->work = collective_reduce_scatter(group, gradients->reduce_output, gradients->reduce_input);
    else
        gradients->work = collective_all_reduce(group, gradients->reduce_output);
    if (!gradients->work || storage_wait_in_stream(gradients->storage, &gradients->work) < 0)
        return -1;
    CHECKED(gradients_check(gradients));
    return 0;
}

PyObject *gradients_cast_to_shard_dtype(struct gradients *gradients, PyObject *input) {
    PyObject *output = gradients->cast_output;
    gradients->cast_output = NULL;
    if (!output)
        output = torch_empty_like(gradients->storage->shard_like);
    if (output && gradients_apply(gradients, gradients->storage->kernels->cast_divide, output, input, 1.0,
                                  "cast of a gradient") < 0)
        Py_CLEAR(output);
    return output;
}

bool gradients_reduce_twice(const struct gradients *gradients) {
    return gradients->param->sharded && gradients->param->replicate_group.group;
}

int gradients_reduce_wait(struct gradients *gradients) {
    PyObject *work = gradients->work;
    gradients->work = NULL;
    if (collective_wait(work) < 0)
        return -1;
    if (!gradients_reduce_twice(gradients))
        return 0;
    work = collective_all_reduce(&gradients->param->replicate_group, gradients->reduce_output);
    return work ? collective_wait(work) : -1;
}

/* See [Note: offload]. The host waits for it before the gradient is handed over. */
static int enqueue_download(struct gradients *gradients) {
    if (!gradients->storage->offload)
        return 0;
    if (!gradients->offloaded)
        gradients->offloaded = torch_empty_pinned_like(gradients->saved_shard);
    return gradients->offloaded ? torch_enqueue_copy(gradients->offloaded, gradients->saved_shard) : -1;
}

/* A custom hook may have left another dtype than it was given. */
int gradients_save_reduced(struct gradients *gradients) {
    const struct kernel_table *kernels = gradients->storage->kernels;
    const struct flat_param *param = gradients->param;
    PyObject *output = gradients->reduce_output;
    struct tensor_view view = {.dtype = gradients->storage->copy->reduce_kind};
    if (param->sharded && gradients->saved_shard) {
        if (gradients_apply(gradients, kernels->accumulate, gradients->saved_shard, output,
                            gradients->postdivide, "accumulation of a reduced gradient") < 0)
            return -1;
        return enqueue_download(gradients);
    }
    if (gradients->postdivide != 1.0 &&
        gradients_apply(gradients, kernels->cast_divide, output, output, gradients->postdivide,
                        "post-division of gradients") < 0)
        return -1;
    if (gradients->comm_hook.function && tensor_view_of(output, &view) < 0)
        return -1;
    bool keeps_low = !param->sharded && param->keep_low_precision_grads && !gradients->comm_hook.native;
    bool keep = view.dtype == gradients->storage->orig_kind || keeps_low;
    ref_set(&gradients->saved_shard,
            keep ? Py_NewRef(output) : gradients_cast_to_shard_dtype(gradients, output));
    return gradients->saved_shard ? enqueue_download(gradients) : -1;
}

PyObject *gradients_take_reduce_output(struct gradients *gradients) {
    PyObject *output = gradients->reduce_output;
    gradients->reduce_output = NULL;
    if (output == gradients->saved_shard)
        Py_CLEAR(output);
    return output;
}

void gradients_release_reduce_input(struct gradients *gradients) {
    if (!gradients->comm_hook.function || gradients->comm_hook.native)
        Py_CLEAR(gradients->reduce_input);
}

void gradients_reduce_release(struct gradients *gradients) {
    Py_CLEAR(gradients->reduce_input);
    Py_CLEAR(gradients->hook_input);
    Py_CLEAR(gradients->reduce_output);
    Py_CLEAR(gradients->cast_output);
}
