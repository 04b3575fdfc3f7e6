/* Packing of a unit's gradients, and their reduction by a collective or a communication hook. Under no_sync
 * the gradients are accumulated unsharded. */
#include "handle/grads.h"

#include "torch/py_torch.h"
#include "torch/tensor.h"

#include "base/check.h"

/* ---- received contributions ---- */

int grads_refuse(const struct grads *grads, int64_t index) {
    PyErr_Clear(); /* clear the tensor's own error: Python code must not run with an exception set */
    OWNED *fqn = flat_param_fqn(grads->param, index);
    if (!fqn)
        return -1;
    return flat_param_error(
        grads->param, PyExc_RuntimeError,
        "cannot use the gradient of %S: only dense strided gradients on %S are supported. Sparse gradients "
        "(nn.Embedding(sparse=True)) need an unsharded module: pass it in ignored_modules, give all ranks "
        "equal initial values, and average its gradients yourself.",
        fqn, grads->param->device);
}

/* Point the sources at the gradients of the latest contribution. */
static int fill_sources(struct grads *grads) {
    for (int64_t i = 0; i < grads->param->num_params; i++) {
        PyObject *grad = PyTuple_GetItem(grads->pending, i + 1);
        struct tensor_view *view = &grads->sources[i].view;
        if (grad == Py_None) {
            view->data = NULL;
            continue;
        }
        if (tensor_view_of(grad, view) < 0)
            return grads_refuse(grads, i);
    }
    return 0;
}

/* Write pending / divisor to `output`. */
static int pack_pending(struct grads *grads, PyObject *output, double divisor) {
    struct tensor_view view;
    if (fill_sources(grads) < 0 || tensor_view_of(output, &view) < 0)
        return -1;
    return tensor_check(grads->storage->kernels->pack(view.data, view.dtype, tensor_view_numel(&view),
                                                      grads->sources, grads->param->num_params, divisor,
                                                      storage_stream(grads->storage)),
                        "packing of gradients");
}

int grads_add_pending(struct grads *grads, PyObject *output) {
    struct tensor_view view;
    if (fill_sources(grads) < 0 || tensor_view_of(output, &view) < 0)
        return -1;
    return tensor_check(grads->storage->kernels->pack_add(view.data, view.dtype, grads->sources,
                                                          grads->param->num_params,
                                                          storage_stream(grads->storage)),
                        "accumulation of gradients");
}

PyObject *grads_take_received(struct grads *grads) {
    const PyObject *sum = grads->sum;
    OWNED *total = sum ? Py_NewRef(grads->sum) : torch_empty_like(grads->storage->copy->gradient_like);
    if (!total || (sum ? grads_add_pending(grads, total) : pack_pending(grads, total, 1.0)) < 0)
        return NULL;
    Py_CLEAR(grads->sum);
    Py_CLEAR(grads->pending);
    return Py_NewRef(total);
}

/* Add all contributions to `target`, and drop them. */
static int add_received(struct grads *grads, PyObject *target) {
    PyObject *sum = grads->sum;
    int result = grads_add_pending(grads, sum ? sum : target);
    if (!result && sum)
        result = storage_apply(grads->storage, grads->storage->kernels->accumulate, target, sum, 1.0,
                               "accumulation of gradients");
    Py_CLEAR(grads->sum);
    Py_CLEAR(grads->pending);
    return result;
}

/* ---- communication hooks ---- */

/* [Note: communication hooks] A custom hook of register_comm_hook does all of the reduction. The hook
 * receives the padded full gradient and an empty shard to fill (under NO_SHARD the gradient alone), and no
 * factor is applied. torch's fp16 and bf16 hooks are recognised by identity and run as this library's own
 * reduction, in the hook's dtype, with the group and factors of its state: torch's implementations use an
 * operation that the CPU lacks. */
void grads_set_comm_hook(struct grads *grads, PyObject *function, PyObject *state, bool native) {
    grads->comm_hook.native = native;
    ref_set(&grads->comm_hook.function, Py_NewRef(function));
    ref_set(&grads->comm_hook.state, Py_NewRef(state));
    grads->predivide = grads->postdivide = 1.0;
}

/* ---- a low-precision hook, run here ---- */

/* Only factors above 1 divide, as in torch's hooks. */
static int read_factor(PyObject *state, const char *name, double *factor) {
    PyObject *value = PyObject_GetAttrString(state, name);
    double number = value ? PyFloat_AsDouble(value) : 1.0;
    Py_XDECREF(value);
    *factor = number > 1.0 ? number : 1.0;
    return PyErr_Occurred() ? -1 : 0;
}

/* Read group and factors before each packing: the user may change the state between reductions. */
static int read_comm_hook(struct grads *grads) {
    struct comm_hook *hook = &grads->comm_hook;
    if (!hook->native)
        return 0;
    if (read_factor(hook->state, "gradient_predivide_factor", &grads->predivide) < 0 ||
        read_factor(hook->state, "gradient_postdivide_factor", &grads->postdivide) < 0)
        return -1;
    OWNED *group = PyObject_GetAttrString(hook->state, "process_group");
    if (!group || group == hook->group.group)
        return group ? 0 : -1;
    collective_group_fini(&hook->group);
    return collective_group_init(&hook->group, group);
}

/* ---- packing ---- */

int grads_alloc_reduce_input(struct grads *grads) {
    ref_set(&grads->reduce_input, torch_empty_like(grads->storage->copy->reduce_input_like));
    return grads->reduce_input ? 0 : -1;
}

int64_t grads_reduce_input_nbytes(const struct grads *grads) {
    if (grads->comm_hook.function && !grads->comm_hook.native)
        return 0;
    return grads->param->layout.padded_numel * dtype_nbytes(grads->storage->copy->reduce_kind);
}

int grads_pack_on_side_stream(struct grads *grads, PyObject **packed) {
    if (read_comm_hook(grads) < 0)
        return -1;
    grads->unreduced = grads->hooked = false;
    if (!grads->reduce_input && grads_alloc_reduce_input(grads) < 0)
        return -1;
    if (pack_pending(grads, grads->reduce_input, grads->predivide) < 0)
        return -1;
    *packed = grads->pending;
    grads->pending = NULL;
    return 0;
}

int grads_pack(struct grads *grads) {
    const struct precision_copy *copy = grads->storage->copy;
    PyObject **previous = grads_accumulator(grads);
    OWNED *total = NULL;
    struct tensor_view from;
    if (read_comm_hook(grads) < 0)
        return -1;
    grads->unreduced = grads->hooked = false;
    if (*previous) {
        if ((grads->pending && add_received(grads, *previous) < 0) || grads_unexpose_unsharded(grads) < 0)
            return -1;
        total = *previous;
        *previous = NULL;
    } else if (grads->sum) {
        total = grads_take_received(grads);
    } else { /* the usual step: copy, cast and pre-divide one contribution in one pass */
        int result = grads->reduce_input ? 0 : grads_alloc_reduce_input(grads);
        if (!result)
            result = pack_pending(grads, grads->reduce_input, grads->predivide);
        Py_CLEAR(grads->pending);
        return result;
    }
    if (!total || tensor_view_of(total, &from) < 0)
        return -1;
    /* cast and divide, in place if the dtypes agree */
    OWNED *input =
        from.dtype == copy->reduce_kind ? Py_NewRef(total) : torch_empty_like(copy->reduce_input_like);
    if (!input || storage_apply(grads->storage, grads->storage->kernels->cast_divide, input, total,
                                grads->predivide, "pre-division of gradients") < 0)
        return -1;
    ref_set(&grads->reduce_input, Py_NewRef(input));
    return 0;
}

int grads_accumulate_unsharded(struct grads *grads) {
    PyObject **total = grads_accumulator(grads);
    grads->unreduced = true;
    grads->hooked = false;
    if (!*total)
        return (*total = grads_take_received(grads)) ? 0 : -1;
    return grads->pending ? add_received(grads, *total) : 0;
}

/* ---- custom hooks ---- */

/* Return None as the finished work, or NULL with an exception. */
static PyObject *call_comm_hook(struct grads *grads) {
    struct comm_hook *hook = &grads->comm_hook;
    /* Keep the input's memory alive: kernels of the hook may read it after the hook sets `.data`. */
    ref_set(&grads->hook_input, PyObject_GetAttrString(grads->reduce_input, "data"));
    if (!grads->hook_input)
        return NULL;
    /* no second argument under NO_SHARD: NULL ends the list */
    PyObject *output = grads->param->sharded ? grads->reduce_output : NULL;
    OWNED *done =
        PyObject_CallFunctionObjArgs(hook->function, hook->state, grads->reduce_input, output, NULL);
    /* `output.data = ...` may change the dtype, but not the size */
    const struct flat_param *param = grads->param;
    int64_t want = param->sharded ? param->layout.shard_numel : param->layout.padded_numel;
    struct tensor_view view;
    if (!done || tensor_view_of(grads->reduce_output, &view) < 0)
        return NULL;
    if (tensor_view_numel(&view) == want && tensor_view_is_contiguous(&view) && dtype_is_known(view.dtype) &&
        view.device == grads->storage->compute_view.device)
        return Py_NewRef(Py_None);
    flat_param_error(param, PyExc_RuntimeError,
                     "the communication hook left a gradient of %R, expected a dense tensor of %lld elements "
                     "on %S. Fill the output that the hook is given.",
                     (PyObject *)Py_TYPE(grads->reduce_output), (long long)want, param->device);
    return NULL;
}

/* ---- reduction ---- */

int grads_alloc_output(struct grads *grads) {
    /* a custom hook may replace the output's memory */
    bool has_custom_hook = grads->comm_hook.function && !grads->comm_hook.native;
    if (!grads->param->sharded || grads->saved_shard || has_custom_hook || grads_reduce_twice(grads))
        return 0;
    const struct storage *storage = grads->storage;
    bool is_output = storage->copy->reduce_kind == storage->orig_kind;
    PyObject **memory = is_output ? &grads->reduce_output : &grads->cast_output;
    ref_set(memory, torch_empty_like(storage->shard_like));
    return *memory ? 0 : -1;
}

int grads_reduce(struct grads *grads) {
    const struct flat_param *param = grads->param;
    const struct comm_hook *hook = &grads->comm_hook;
    if (!grads->reduce_output)
        grads->reduce_output = param->sharded ? torch_empty_like(grads->storage->copy->reduce_output_like)
                                              : Py_NewRef(grads->reduce_input);
    if (!grads->reduce_output)
        return -1;
    /* HYBRID with one rank per shard group is NO_SHARD over the replicas. */
    bool over_replicas = !param->sharded && param->replicate_group.group;
    const struct collective_group *group = hook->native    ? &hook->group
                                           : over_replicas ? &param->replicate_group
                                                           : &param->shard_group;
    if (hook->function && !hook->native)
        grads->work = call_comm_hook(grads);
    else if (param->sharded)
        grads->work = collective_reduce_scatter(group, grads->reduce_output, grads->reduce_input);
    else
        grads->work = collective_all_reduce(group, grads->reduce_output);
    if (!grads->work || storage_wait_in_stream(grads->storage, &grads->work) < 0)
        return -1;
    CHECKED(grads_check(grads));
    return 0;
}

bool grads_reduce_twice(const struct grads *grads) {
    return grads->param->sharded && grads->param->replicate_group.group;
}

int grads_wait_reduce(struct grads *grads) {
    PyObject *work = grads->work;
    grads->work = NULL;
    if (collective_wait(work) < 0)
        return -1;
    if (!grads_reduce_twice(grads))
        return 0;
    work = collective_all_reduce(&grads->param->replicate_group, grads->reduce_output);
    return work ? collective_wait(work) : -1;
}

/* Download the gradient under offload, see [Note: offload]. The host synchronises before grads_expose. */
static int enqueue_download(struct grads *grads) {
    if (!grads->storage->offload)
        return 0;
    if (!grads->offloaded)
        grads->offloaded = torch_empty_pinned_like(grads->saved_shard);
    return grads->offloaded ? torch_enqueue_copy(grads->offloaded, grads->saved_shard) : -1;
}

/* The output's dtype is read from the tensor: a custom hook may have changed it. */
int grads_save_reduced(struct grads *grads) {
    const struct kernel_table *kernels = grads->storage->kernels;
    const struct flat_param *param = grads->param;
    PyObject *output = grads->reduce_output;
    struct tensor_view view = {.dtype = grads->storage->copy->reduce_kind};
    if (param->sharded && grads->saved_shard) {
        if (storage_apply(grads->storage, kernels->accumulate, grads->saved_shard, output, grads->postdivide,
                          "accumulation of a reduced gradient") < 0)
            return -1;
        return enqueue_download(grads);
    }
    if (grads->postdivide != 1.0 && storage_apply(grads->storage, kernels->cast_divide, output, output,
                                                  grads->postdivide, "post-division of gradients") < 0)
        return -1;
    if (grads->comm_hook.function && tensor_view_of(output, &view) < 0)
        return -1;
    bool keeps_low = !param->sharded && param->keep_low_precision_grads && !grads->comm_hook.native;
    bool keeps_output = view.dtype == grads->storage->orig_kind || keeps_low;
    ref_set(&grads->saved_shard, keeps_output ? Py_NewRef(output) : grads_cast_to_shard_dtype(grads, output));
    return grads->saved_shard ? enqueue_download(grads) : -1;
}

PyObject *grads_take_reduce_output(struct grads *grads) {
    PyObject *output = grads->reduce_output;
    grads->reduce_output = NULL;
    if (output == grads->saved_shard)
        Py_CLEAR(output);
    return output;
}

void grads_release_reduce_input(struct grads *grads) {
    if (!grads->comm_hook.function || grads->comm_hook.native)
        Py_CLEAR(grads->reduce_input);
}

void grads_reduce_release(struct grads *grads) {
    Py_CLEAR(grads->reduce_input);
    Py_CLEAR(grads->hook_input);
    Py_CLEAR(grads->reduce_output);
    Py_CLEAR(grads->cast_output);
}
