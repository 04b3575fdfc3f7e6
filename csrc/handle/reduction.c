/* From what a unit has received to its reduced shard: packing, then a collective or the hook that the user
 * has registered. Under no_sync what was received is added up in full size. */
#include "handle/gradients.h"

#include "torch/names.h"
#include "torch/tensor.h"

#include "base/check.h"

/* ---- what was received ---- */

int gradients_refuse(const struct gradients *gradients, int64_t index) {
    PyErr_Clear(); /* of the tensor alone; nothing of Python's is called with an exception set */
    OWNED *fqn = flat_param_fqn(gradients->param, index);
    if (!fqn)
        return -1;
    return flat_param_error(
        gradients->param, PyExc_RuntimeError,
        "cannot use the gradient of %S: dense strided gradients on %S are supported. Sparse gradients "
        "(nn.Embedding(sparse=True)) need an unsharded module: pass it in ignored_modules, give all ranks "
        "equal "
        "values at the start, and average its gradients by hand.",
        fqn, gradients->param->device);
}

/* Point the sources at the latest contribution. */
static int fill_sources(struct gradients *gradients) {
    for (int64_t i = 0; i < gradients->param->num_params; i++) {
        PyObject *grad = PyTuple_GetItem(gradients->pending, i + 1);
        struct tensor_view *view = &gradients->sources[i].view;
        if (grad == Py_None) {
            view->data = NULL;
            continue;
        }
        if (tensor_view_of(grad, view) < 0)
            return gradients_refuse(gradients, i);
    }
    return 0;
}

/* output = pending / divisor */
static int pack_pending(struct gradients *gradients, PyObject *output, double divisor) {
    struct tensor_view view;
    if (fill_sources(gradients) < 0 || tensor_view_of(output, &view) < 0)
        return -1;
    return tensor_check(gradients->storage->kernels->pack(view.data, view.dtype, tensor_view_numel(&view),
                                                          gradients->sources, gradients->param->num_params,
                                                          divisor, storage_stream(gradients->storage)),
                        "packing of gradients");
}

int gradients_add_pending(struct gradients *gradients, PyObject *output) {
    struct tensor_view view;
    if (fill_sources(gradients) < 0 || tensor_view_of(output, &view) < 0)
        return -1;
    return tensor_check(gradients->storage->kernels->pack_add(view.data, view.dtype, gradients->sources,
                                                              gradients->param->num_params,
                                                              storage_stream(gradients->storage)),
                        "accumulation of gradients");
}

PyObject *gradients_take_received(struct gradients *gradients) {
    const PyObject *sum = gradients->sum;
    OWNED *total =
        sum ? Py_NewRef(gradients->sum) : torch_empty_like(gradients->storage->copy->gradient_like);
    if (!total || (sum ? gradients_add_pending(gradients, total) : pack_pending(gradients, total, 1.0)) < 0)
        return NULL;
    Py_CLEAR(gradients->sum);
    Py_CLEAR(gradients->pending);
    return Py_NewRef(total);
}

/* target += all received, which is released. */
static int add_received(struct gradients *gradients, PyObject *target) {
    PyObject *sum = gradients->sum;
    int result = gradients_add_pending(gradients, sum ? sum : target);
    if (!result && sum)
        result = storage_apply(gradients->storage, gradients->storage->kernels->accumulate, target, sum, 1.0,
                               "accumulation of gradients");
    Py_CLEAR(gradients->sum);
    Py_CLEAR(gradients->pending);
    return result;
}

/* ---- communication hooks ---- */

/* [Note: communication hooks] A custom hook of register_comm_hook does everything: it gets the padded full
 * gradient and an empty shard to fill (NO_SHARD: the gradient alone), and no factor is applied. torch's fp16
 * and bf16 hooks are known by identity and run as the reduction of this library, in the hook's dtype and with
 * the group and factors of its state: torch's own end in an operation that the CPU does not have. */
int gradients_check_hookless(const struct gradients *gradients) {
    if (!gradients->comm_hook.function && !gradients->in_backward)
        return 0;
    return flat_param_error(gradients->param, PyExc_RuntimeError,
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

/* The state is the user's, who may change it between reductions: it is read before gradients are packed. */
static int read_comm_hook(struct gradients *gradients) {
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

/* ---- packing ---- */

/* reduce_input = cast(total) / predivide; the total itself where the dtypes agree. Steals `total`. */
static int divide_total(struct gradients *gradients, PyObject *total) {
    const struct precision_copy *copy = gradients->storage->copy;
    struct tensor_view from;
    PyObject *input = NULL;
    if (tensor_view_of(total, &from) == 0)
        input =
            from.dtype == copy->reduce_kind ? Py_NewRef(total) : torch_empty_like(copy->reduce_input_like);
    int result = input ? storage_apply(gradients->storage, gradients->storage->kernels->cast_divide, input,
                                       total, gradients->predivide, "pre-division of gradients")
                       : -1;
    if (result < 0)
        Py_CLEAR(input);
    else
        ref_set(&gradients->reduce_input, input);
    Py_DECREF(total);
    return result;
}

int gradients_take_reduce_input(struct gradients *gradients) {
    ref_set(&gradients->reduce_input, torch_empty_like(gradients->storage->copy->reduce_input_like));
    return gradients->reduce_input ? 0 : -1;
}

int64_t gradients_reduce_input_nbytes(const struct gradients *gradients) {
    if (gradients->comm_hook.function && !gradients->comm_hook.native)
        return 0;
    return gradients->param->layout.padded_numel * dtype_nbytes(gradients->storage->copy->reduce_kind);
}

bool gradients_pack_directly(const struct gradients *gradients) {
    return gradients->param->sharded && !gradients->unsharded && !gradients->sum;
}

int gradients_pack_beside(struct gradients *gradients, PyObject **packed) {
    if (read_comm_hook(gradients) < 0)
        return -1;
    gradients->unreduced = gradients->hooked = false;
    if (!gradients->reduce_input && gradients_take_reduce_input(gradients) < 0)
        return -1;
    if (pack_pending(gradients, gradients->reduce_input, gradients->predivide) < 0)
        return -1;
    *packed = gradients->pending;
    gradients->pending = NULL;
    return 0;
}

int gradients_pack(struct gradients *gradients) {
    PyObject **previous = gradients_previous(gradients), *total;
    if (read_comm_hook(gradients) < 0)
        return -1;
    gradients->unreduced = gradients->hooked = false;
    if (*previous) {
        if (gradients->pending && add_received(gradients, *previous) < 0)
            return -1;
        if (gradients_hide_unsharded(gradients) < 0)
            return -1;
        total = *previous;
        *previous = NULL;
    } else if (gradients->sum) {
        total = gradients_take_received(gradients);
    } else { /* as in the usual step: one contribution is copied, cast and pre-divided in one pass */
        int result = gradients->reduce_input ? 0 : gradients_take_reduce_input(gradients);
        if (!result)
            result = pack_pending(gradients, gradients->reduce_input, gradients->predivide);
        Py_CLEAR(gradients->pending);
        return result;
    }
    return total ? divide_total(gradients, total) : -1;
}

int gradients_accumulate_unsharded(struct gradients *gradients) {
    PyObject **total = gradients_previous(gradients);
    gradients->unreduced = true;
    gradients->hooked = false;
    if (!*total)
        return (*total = gradients_take_received(gradients)) ? 0 : -1;
    return gradients->pending ? add_received(gradients, *total) : 0;
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
    return flat_param_error(
        param, PyExc_RuntimeError,
        "its communication hook left a gradient of %R, expected a dense one of %lld elements on %S",
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

int gradients_reduce(struct gradients *gradients) {
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

bool gradients_reduce_twice(const struct gradients *gradients) {
    return gradients->param->sharded && gradients->param->replicate_group.group;
}

int gradients_wait_reduce(struct gradients *gradients) {
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
        if (storage_apply(gradients->storage, kernels->accumulate, gradients->saved_shard, output,
                          gradients->postdivide, "accumulation of a reduced gradient") < 0)
            return -1;
        return enqueue_download(gradients);
    }
    if (gradients->postdivide != 1.0 &&
        storage_apply(gradients->storage, kernels->cast_divide, output, output, gradients->postdivide,
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
