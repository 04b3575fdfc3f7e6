/* Gradients of a unit: received from autograd, stashed during a backward, and exposed to the user as `.grad`.
 *
 * [Note: order of addition] Sums follow torch's FSDP1 bit for bit. Contributions of one backward are added to
 * each other first, in order of arrival (autograd's input buffer), and the sum to the gradient of earlier
 * backwards. FSDP1 in low precision has one AccumulateGrad node per forward, so each contribution is added to
 * .grad separately.
 *
 * [Note: terms beside the units] A loss may contain terms of the parameters between steps:
 * sum(p.square().sum() for p in model.parameters()). The gradients of such terms are sharded, and autograd
 * accumulates them into `.grad` itself, without a reduction. A term made before the forward has its gradient
 * after the unit's own gradient was packed; a term made after it, before the backward reaches the unit.
 *
 * The gradients of earlier backwards are stashed in the meantime, because a reduction on another stream adds
 * to them. */
#include "handle/grads.h"

#include "base/check.h"
#include "torch/py_torch.h"
#include "torch/tensor.h"

/* ---- kind of `.grad` between backwards ---- */

static const bool grad_allowed[GRAD_KINDS][GRAD_KINDS] = {
    [GRAD_NONE] = {[GRAD_NONE] = true,        /* the user set no gradient */
                   [GRAD_SHARDED] = true,     /* a reduced gradient is exposed */
                   [GRAD_UNSHARDED] = true},  /* a backward ended under no_sync */
    [GRAD_SHARDED] = {[GRAD_NONE] = true,     /* stashed in a backward, or cleared by the user */
                      [GRAD_SHARDED] = true}, /* replaced by the user */
    [GRAD_UNSHARDED] = {[GRAD_NONE] = true,   /* packed, cleared by the user, or consumed by hooks */
                        [GRAD_SHARDED] = true /* replaced by the user */},
};

static const char *const grad_names[GRAD_KINDS] = {"GRAD_NONE", "GRAD_SHARDED", "GRAD_UNSHARDED"};

int grads_set_kind(struct grads *grads, enum grad_kind kind) {
    if (!grad_allowed[grads->kind][kind])
        return flat_param_refuse(grads->param, grad_names[grads->kind], grad_names[kind], "");
    grads->kind = kind;
    CHECKED(grads_check(grads));
    return 0;
}

void grads_check(const struct grads *grads) {
    INVARIANT(grads->kind != GRAD_SHARDED || !grads->in_backward);
    INVARIANT(grads->kind != GRAD_UNSHARDED || grads->param->sharded);
    INVARIANT(!grads->work || grads->reduce_output);
    INVARIANT(!grads->offloaded || grads->storage->offload);
    INVARIANT(!grads->watched || grads->kind == GRAD_SHARDED);
}

/* ---- free .grad with its last exposed view ---- */

static int watch_grad(struct grads *grads, PyObject *part, int64_t index) {
    grads->watched_param = index;
    ref_set(&grads->watched, PyWeakref_NewRef(part, grads->watch_callback));
    return grads->watched ? 0 : -1;
}

enum { NO_PARAM = -1 }; /* no index of a parameter */

/* Watch the last parameter whose .grad is a view of the flat gradient, other than parameter `gone`:
 * zero_grad() clears gradients in order. */
static int watch_exposed(struct grads *grads, int64_t gone) {
    OWNED *flat_grad = torch_get_grad(grads->param->tensor);
    struct tensor_view flat, view;
    if (!flat_grad || flat_grad == Py_None)
        return flat_grad ? 0 : -1;
    if (tensor_view_of(flat_grad, &flat) < 0)
        return -1;
    for (int64_t i = grads->param->num_params - 1; i >= 0; i--) {
        int64_t offset = i == gone ? -1 : grads_offset(grads, i);
        if (offset < 0)
            continue;
        OWNED *part = torch_get_grad(PyList_GetItem(grads->param->params, i));
        if (!part || (part != Py_None && tensor_view_of(part, &view) < 0))
            return -1;
        if (part != Py_None &&
            (const char *)view.data == (const char *)flat.data + offset * dtype_nbytes(flat.dtype))
            return watch_grad(grads, part, i);
    }
    return 0;
}

/* Watch the next .grad, or drop the gradient if none is left. The parameter's own .grad cannot be read here,
 * as this call is part of its deallocation. */
static PyObject *on_watched_freed(PyObject *capsule, PyObject *reference) {
    (void)reference;
    if (!PyCapsule_IsValid(capsule, NULL))
        Py_RETURN_NONE; /* the unit was freed first */
    struct grads *grads = PyCapsule_GetPointer(capsule, NULL);
    OWNED *object = Py_NewRef(grads->param->object); /* a dropped model may be collected in any call */
    Py_CLEAR(grads->watched);
    int result = watch_exposed(grads, grads->watched_param);
    if (!result && !grads->watched)
        result = grads_clear_accumulated(grads);
    return result < 0 ? NULL : Py_NewRef(Py_None);
}

static PyMethodDef on_watched_freed_def = {"on_watched_freed", on_watched_freed, METH_O, NULL};

void grads_unwatch(struct grads *grads) {
    Py_CLEAR(grads->watched);
}

/* ---- init and fini ---- */

void grads_init(struct grads *grads, const struct config *config) {
    grads->predivide = config->predivide;
    grads->postdivide = config->postdivide;
}

void grads_fini(struct grads *grads) {
    grads_discard(grads);
    Py_CLEAR(grads->stashed);
    grads_unwatch(grads);
    if (grads->watch_callback)
        PyCapsule_SetName(PyCFunction_GetSelf(grads->watch_callback), "freed unit");
    Py_CLEAR(grads->watch_callback);
    Py_CLEAR(grads->unsharded);
    Py_CLEAR(grads->shard_sizes);
    Py_CLEAR(grads->hooks_seen);
    Py_CLEAR(grads->stashed_hooks);
    Py_CLEAR(grads->comm_hook.function);
    Py_CLEAR(grads->comm_hook.state);
    collective_group_fini(&grads->comm_hook.group);
    PyMem_Free(grads->sources);
    PyMem_Free(grads->shard_pieces);
}

int grads_lazy_init(struct grads *grads) {
    const struct flat_param *param = grads->param;
    const struct flat_layout *layout = &param->layout;
    PyMem_Free(grads->sources);
    PyMem_Free(grads->shard_pieces);
    grads->sources = PyMem_Calloc((size_t)param->num_params + 1, sizeof *grads->sources);
    grads->shard_pieces = PyMem_Calloc((size_t)param->num_params + 1, sizeof *grads->shard_pieces);
    ref_set(&grads->shard_sizes, PyList_New(0));
    if (!grads->sources || !grads->shard_pieces || !grads->shard_sizes)
        return tensor_check(STATUS_NO_MEMORY, "gradients of a unit");
    /* split a shard (or, unsharded, the full tensor) so that each parameter is one piece */
    int64_t end = 0, pieces = 0;
    for (int64_t i = 0; i < param->num_params; i++) {
        const struct layout_shard_range *range = &layout->shard_ranges[i];
        grads->sources[i].offset = layout_param_offset(layout, i);
        grads->sources[i].numel = layout_param_numel(layout, i);
        grads->sources[i].output_strides = param->param_shapes[i].strides;
        grads->shard_pieces[i] = -1;
        if (!range->in_shard)
            continue;
        int64_t gap = range->offset_in_shard - end;
        pieces += gap > 0;
        if ((gap > 0 && ref_append(grads->shard_sizes, PyLong_FromLongLong(gap)) < 0) ||
            ref_append(grads->shard_sizes, PyLong_FromLongLong(range->numel_in_shard)) < 0)
            return -1;
        grads->shard_pieces[i] = pieces++;
        end = range->offset_in_shard + range->numel_in_shard;
    }
    if (layout->shard_numel > end &&
        ref_append(grads->shard_sizes, PyLong_FromLongLong(layout->shard_numel - end)) < 0)
        return -1;
    OWNED *capsule = grads->watch_callback ? NULL : PyCapsule_New(grads, NULL, NULL);
    if (capsule)
        grads->watch_callback = PyCFunction_New(&on_watched_freed_def, capsule);
    if (!grads->watch_callback || !param->keep_low_precision_grads ||
        !grads->storage->copies[PRECISION_COMPUTE].low_precision)
        return grads->watch_callback ? 0 : -1;
    /* torch rejects a gradient of another dtype unless the leaf's grad_dtype is None */
    int result = PyObject_SetAttr(param->tensor, torch_names.grad_dtype, Py_None);
    for (int64_t i = 0; !result && param->params && i < param->num_params; i++)
        result = PyObject_SetAttr(PyList_GetItem(param->params, i), torch_names.grad_dtype, Py_None);
    return result;
}

void grads_discard(struct grads *grads) {
    Py_CLEAR(grads->pending);
    Py_CLEAR(grads->sum);
    Py_CLEAR(grads->saved_shard);
    Py_CLEAR(grads->offloaded);
    Py_CLEAR(grads->reduce_input);
    Py_CLEAR(grads->hook_input);
    Py_CLEAR(grads->reduce_output);
    Py_CLEAR(grads->cast_output);
    Py_CLEAR(grads->work);
    grads->in_backward = grads->hooked = false;
}

/* ---- receive ---- */

PyObject **grads_accumulator(struct grads *grads) {
    return grads->param->sharded ? &grads->unsharded : &grads->saved_shard;
}

static bool has_gradient(PyObject *args, int64_t num_params) {
    for (int64_t i = 0; i < num_params; i++)
        if (PyTuple_GetItem(args, i + 1) != Py_None)
            return true;
    return false;
}

bool grads_have_received(const struct grads *grads) {
    return grads->pending || grads->hooked;
}

int grads_receive(struct grads *grads, PyObject *args) {
    if (!has_gradient(args, grads->param->num_params))
        return 0;
    /* add up the first contribution when a second one arrives: see [Note: order of addition] */
    bool low_precision = grads->storage->copy->low_precision;
    if (grads->pending && low_precision && grads_call_param_hooks(grads) < 0)
        return -1;
    PyObject *previous = *grads_accumulator(grads);
    if (grads->pending && low_precision && previous) {
        if (grads_add_pending(grads, previous) < 0)
            return -1;
    } else if (grads->pending) {
        PyObject *sum = grads_take_received(grads);
        if (!sum)
            return -1;
        grads->sum = sum;
    }
    ref_set(&grads->pending, Py_NewRef(args));
    return 0;
}

PyObject *grads_flat_of(struct grads *grads, PyObject *args) {
    const struct flat_param *param = grads->param;
    if (param->sharded) {
        flat_param_error(
            param, PyExc_RuntimeError,
            "torch.autograd.grad() cannot return the gradient of the flat parameter, which is sharded over "
            "%lld ranks. Call backward() or backward(inputs=...), and read .grad. Schedules that compute the "
            "gradients of inputs and weights separately need FSDP units with a process group of one rank.",
            (long long)param->shard_group.world_size);
        return NULL;
    }
    if (!has_gradient(args, param->num_params))
        return Py_NewRef(Py_None);
    /* save the contributions of another backward */
    PyObject *pending = grads->pending, *sum = grads->sum;
    grads->pending = Py_NewRef(args);
    grads->sum = NULL;
    OWNED *total = grads_take_received(grads);
    ref_set(&grads->pending, pending);
    grads->sum = sum;
    return total ? torch_part(total, 0, param->layout.shard_numel) : NULL;
}

/* Packing treats None as zeros. */
int grads_receive_zeros(struct grads *grads) {
    if (grads->pending || grads->sum || *grads_accumulator(grads))
        return 0;
    Py_ssize_t count = (Py_ssize_t)grads->param->num_params + 1;
    grads->pending = PyTuple_New(count);
    for (Py_ssize_t i = 0; grads->pending && i < count; i++)
        PyTuple_SetItem(grads->pending, i, Py_NewRef(Py_None));
    return grads->pending ? 0 : -1;
}

/* ---- offset of a parameter's gradient in the flat gradient ---- */

static bool is_full_size(const struct grads *grads) {
    return !grads->param->sharded || grads->kind == GRAD_UNSHARDED;
}

int64_t grads_offset(const struct grads *grads, int64_t index) {
    if (is_full_size(grads))
        return layout_param_offset(&grads->param->layout, index);
    const struct layout_shard_range *range = &grads->param->layout.shard_ranges[index];
    return range->in_shard && range->numel_in_shard ? range->offset_in_shard : -1;
}

PyObject *grads_part(const struct grads *grads, PyObject *flat_grad, int64_t index) {
    int64_t offset = grads_offset(grads, index);
    if (is_full_size(grads))
        return torch_view(flat_grad, offset, layout_param_numel(&grads->param->layout, index),
                          PyTuple_GetItem(grads->param->shapes, index),
                          PyTuple_GetItem(grads->param->strides, index));
    return PyObject_CallMethod(flat_grad, "narrow", "iLL", 0, (long long)offset,
                               (long long)grads->param->layout.shard_ranges[index].numel_in_shard);
}

int grads_is_zero(PyObject *tensor) {
    OWNED *any = PyObject_CallMethod(tensor, "any", NULL);
    return any ? PyObject_Not(any) : -1;
}

/* ---- stash during a backward ---- */

/* Set each original parameter's .grad to None if it is a view of `full_grad`. `stash`: keep the views, to
 * restore them after an exception. Return 0 or -1. */
static int unexpose(struct grads *grads, PyObject *full_grad, bool stash) {
    struct tensor_view full, view;
    if (!grads->param->use_orig_params)
        return 0;
    ref_set(&grads->stashed, PyList_New(0));
    if (!grads->stashed || tensor_view_of(full_grad, &full) < 0)
        return -1;
    uintptr_t nbytes = (uintptr_t)(tensor_view_numel(&full) * dtype_nbytes(full.dtype));
    for (int64_t i = 0; i < grads->param->num_params; i++) {
        PyObject *param = PyList_GetItem(grads->param->params, i);
        OWNED *grad = torch_get_grad(param);
        bool is_part = false;
        if (!grad)
            return -1;
        if (grad != Py_None && tensor_view_of(grad, &view) == 0)
            is_part = (uintptr_t)view.data - (uintptr_t)full.data < nbytes;
        PyErr_Clear(); /* raised for a gradient without memory */
        PyObject *entry = !is_part ? Py_None : stash ? grad : Py_True;
        if (PyList_Append(grads->stashed, entry) < 0 || (is_part && torch_set_grad(param, Py_None) < 0))
            return -1;
    }
    return 0;
}

int grads_unexpose_unsharded(struct grads *grads) {
    if (grads->kind != GRAD_UNSHARDED)
        return 0;
    if (unexpose(grads, grads->unsharded, false) < 0 || torch_set_grad(grads->param->tensor, Py_None) < 0)
        return -1;
    return grads_set_kind(grads, GRAD_NONE);
}

int grads_restore_stashed(struct grads *grads) {
    OWNED *stashed = grads->stashed;
    grads->stashed = NULL;
    int result = 0;
    for (Py_ssize_t i = 0; stashed && !result && i < PyList_Size(stashed); i++)
        if (torch_is_tensor(PyList_GetItem(stashed, i)))
            result =
                torch_set_foreign_grad(PyList_GetItem(grads->param->params, i), PyList_GetItem(stashed, i));
    return result;
}

int grads_add_from_autograd(struct grads *grads, PyObject **shard) {
    const struct flat_param *param = grads->param;
    int64_t begin = param->use_orig_params ? 0 : -1; /* -1: the flat parameter itself */
    int64_t end = param->use_orig_params ? param->num_params : 0;
    for (int64_t i = begin; i < end; i++) {
        if (i >= 0 && grads_offset(grads, i) < 0)
            continue;
        OWNED *accumulated = torch_get_grad(i < 0 ? param->tensor : PyList_GetItem(param->params, i));
        if (!accumulated)
            return -1;
        if (accumulated == Py_None)
            continue;
        if (!shard)
            return 1;
        if (!*shard && !(*shard = torch_zeros_like(grads->storage->shard_like)))
            return -1;
        OWNED *part = i < 0 ? Py_NewRef(*shard) : grads_part(grads, *shard, i);
        /* same device and dtype as `part` */
        OWNED *moved = part ? PyObject_CallMethod(accumulated, "to", "O", part) : NULL;
        if (ref_done(moved ? PyObject_CallMethod(part, "add_", "O", moved) : NULL) < 0)
            return -1;
    }
    return 0;
}

/* ---- stash at the first pre-backward ---- */

PyObject *grads_cast_to_shard_dtype(struct grads *grads, PyObject *input) {
    PyObject *output = grads->cast_output;
    grads->cast_output = NULL;
    if (!output)
        output = torch_empty_like(grads->storage->shard_like);
    if (output && storage_apply(grads->storage, grads->storage->kernels->cast_divide, output, input, 1.0,
                                "cast of a gradient") < 0)
        Py_CLEAR(output);
    return output;
}

int grads_zero_reduced(struct grads *grads, int64_t index) {
    const struct layout_shard_range *range = &grads->param->layout.shard_ranges[index];
    if (!grads->saved_shard || !range->in_shard)
        return 0;
    OWNED *part = torch_part(grads->saved_shard, range->offset_in_shard, range->numel_in_shard);
    return part ? torch_zero(part) : -1;
}

/* The gradient reduced before no_sync and the no_sync gradient are one gradient for the user: if one was
 * zeroed in place, zero the other. FSDP1 adds the old gradient again. */
static int zero_reduced_if_zeroed(struct grads *grads) {
    const struct flat_param *param = grads->param;
    for (int64_t i = 0; grads->saved_shard && i < param->num_params; i++) {
        OWNED *exposed =
            torch_get_grad(param->use_orig_params ? PyList_GetItem(param->params, i) : param->tensor);
        /* version of the exposed tensor: number of writes by users and optimizers */
        int64_t writes = !exposed ? -1 : exposed == Py_None ? 0 : torch_version(exposed);
        OWNED *part = writes > 0 ? grads_part(grads, grads->unsharded, i) : NULL;
        int zeroed = writes <= 0 ? (int)writes : part ? grads_is_zero(part) : -1;
        if (zeroed < 0 || (zeroed && grads_zero_reduced(grads, i) < 0))
            return -1;
    }
    return 0;
}

int grads_clear_accumulated(struct grads *grads) {
    Py_CLEAR(grads->watched);
    grads->unreduced = false;
    Py_CLEAR(grads->unsharded);
    Py_CLEAR(grads->saved_shard);
    if (grads->kind == GRAD_NONE)
        return 0;
    if (torch_set_grad(grads->param->tensor, Py_None) < 0)
        return -1;
    return grads_set_kind(grads, GRAD_NONE);
}

int grads_begin_backward(struct grads *grads) {
    if (grads->in_backward)
        return 0;
    grads->in_backward = true;
    Py_CLEAR(grads->watched);
    OWNED *grad = torch_get_grad(grads->param->tensor);
    struct tensor_view view;
    if (!grad)
        return -1;
    if (grad == Py_None)
        return grads_clear_accumulated(grads);
    if (grads->kind == GRAD_UNSHARDED)
        return zero_reduced_if_zeroed(grads);
    if (grads_set_kind(grads, GRAD_NONE) < 0 || unexpose(grads, grad, true) < 0)
        return -1;
    if (tensor_view_of(grad, &view) < 0)
        return -1;
    if (grads->storage->offload) { /* upload to the compute device */
        OWNED *dtype = PyObject_GetAttr(grad, torch_names.dtype);
        OWNED *copy = dtype ? torch_empty(tensor_view_numel(&view), dtype, grads->param->device) : NULL;
        if (!copy || torch_enqueue_copy(copy, grad) < 0)
            return -1;
        ref_set(&grad, Py_NewRef(copy));
    }
    if (grads->param->sharded && view.dtype != grads->storage->orig_kind)
        ref_set(&grad, grads_cast_to_shard_dtype(grads, grad));
    ref_set(&grads->saved_shard, Py_XNewRef(grad));
    return grad ? torch_set_grad(grads->param->tensor, Py_None) : -1;
}

/* ---- zeros ---- */

PyObject *grads_zeros(struct grads *grads) {
    PyObject *inference_guard, *zeros;
    if (torch_leave_inference_mode(&inference_guard) < 0)
        return NULL;
    zeros = torch_zeros_like(grads->storage->local_shard);
    if (zeros && torch_set_foreign_grad(grads->param->tensor, zeros) < 0)
        Py_CLEAR(zeros);
    if (torch_return_to_inference_mode(inference_guard) < 0)
        Py_CLEAR(zeros);
    return zeros;
}

PyObject *grads_sharded(const struct grads *grads) {
    if (grads->in_backward && grads->saved_shard && grads->param->sharded)
        return Py_NewRef(grads->offloaded ? grads->offloaded : grads->saved_shard);
    return grads->param->tensor ? torch_get_grad(grads->param->tensor) : Py_NewRef(Py_None);
}

/* ---- expose ---- */

static int clear_grad(PyObject *param) {
    OWNED *grad = torch_get_grad(param);
    if (!grad || grad == Py_None)
        return grad ? 0 : -1;
    return torch_set_grad(param, Py_None);
}

/* Return 1 if the parameter exposes its part of the gradient, 0 if not, -1 with an exception. A frozen
 * parameter does if it had a gradient before, which the backward must not drop. */
static int exposes_grad(const struct grads *grads, int64_t index) {
    PyObject *param = PyList_GetItem(grads->param->params, index);
    int requires_grad = torch_requires_grad(param);
    if (requires_grad)
        return requires_grad;
    if (grads->stashed)
        return PyList_GetItem(grads->stashed, index) != Py_None;
    OWNED *grad = torch_get_grad(param);
    return grad ? grad != Py_None : -1;
}

/* Expose full-shape gradients on the original parameters: always under NO_SHARD, else under no_sync. */
static int expose_unsharded_grads(struct grads *grads, PyObject *grad) {
    const struct flat_param *param = grads->param;
    OWNED *views = flat_param_views(param, grad);
    for (int64_t i = 0; views && i < param->num_params; i++) {
        PyObject *own = PyList_GetItem(param->params, i), *view = PyTuple_GetItem(views, i);
        /* FSDP1 exposes no empty gradient either */
        bool is_empty = !param->sharded && !layout_param_numel(&param->layout, i);
        int exposes = is_empty ? 0 : exposes_grad(grads, i);
        /* a rank outside the parameter's shard has no former .grad to decide by */
        if (!exposes && !is_empty && !grads->stashed && param->sharded &&
            !param->layout.shard_ranges[i].in_shard) {
            int zero = grads_is_zero(view);
            exposes = zero < 0 ? -1 : !zero;
        }
        if (exposes < 0 || (exposes ? torch_set_foreign_grad(own, view) : clear_grad(own)) < 0)
            return -1;
    }
    return views ? 0 : -1;
}

/* Expose the flat gradient on the original parameters: its views, or the parts of a sharded one; None on
 * parameters outside the shard. */
static int expose_grads(struct grads *grads, PyObject *grad) {
    if (!grads->param->use_orig_params)
        return 0;
    Py_CLEAR(grads->watched); /* the former views are no longer watched */
    if (!grads->param->sharded || grads->kind != GRAD_SHARDED) {
        int result = expose_unsharded_grads(grads, grad);
        return result < 0 || grads->kind != GRAD_SHARDED ? result : watch_exposed(grads, NO_PARAM);
    }
    OWNED *pieces =
        PyObject_CallFunctionObjArgs(torch_names.split_with_sizes, grad, grads->shard_sizes, NULL);
    for (int64_t i = grads->param->num_params - 1; pieces && i >= 0; i--) {
        PyObject *param = PyList_GetItem(grads->param->params, i);
        int exposes = grads->shard_pieces[i] < 0 ? 0 : exposes_grad(grads, i);
        OWNED *piece = exposes > 0 ? PySequence_GetItem(pieces, grads->shard_pieces[i]) : NULL;
        if (!piece && (exposes || clear_grad(param) < 0))
            return -1;
        if (piece &&
            (torch_set_grad(param, piece) < 0 || (!grads->watched && watch_grad(grads, piece, i) < 0)))
            return -1;
    }
    return pieces ? 0 : -1;
}

/* Set flat_param.grad to the no_sync gradient without right padding. */
static int expose_flat_unsharded(struct grads *grads) {
    /* a slice whose version counter starts at 0 */
    OWNED *grad = torch_part(grads->unsharded, 0, grads->param->layout.numel);
    return grad ? torch_set_foreign_grad(grads->param->tensor, grad) : -1;
}

static int expose_reduced(struct grads *grads) {
    const struct flat_param *param = grads->param;
    const struct storage *storage = grads->storage;
    /* Move the gradient to the shard's device. A gradient that was never reduced is downloaded
     * synchronously. */
    OWNED *shard = grads->saved_shard;
    OWNED *offloaded = grads->offloaded;
    struct tensor_view view;
    grads->saved_shard = grads->offloaded = NULL;
    if (storage->offload) {
        ref_set(&shard, offloaded ? Py_NewRef(offloaded) : PyObject_CallMethod(shard, "cpu", NULL));
        if (shard && storage_set_attribute(storage, "_cpu_grad", shard) < 0)
            Py_CLEAR(shard);
    }
    if (grads_set_kind(grads, GRAD_SHARDED) < 0 || !shard || grads_add_from_autograd(grads, &shard) < 0)
        return -1;
    /* NO_SHARD keeps the dtype of the reduction instead, as FSDP1 does */
    bool keeps_low = param->sharded && param->keep_low_precision_grads && storage->copy->low_precision;
    OWNED *grad = keeps_low ? PyObject_CallMethod(shard, "to", "O", storage->copy->dtype) : Py_NewRef(shard);
    if (!grad || tensor_view_of(grad, &view) < 0)
        return -1;
    /* torch_set_grad() requires the shard's dtype and shape, as in a usual step */
    bool fits =
        view.dtype == storage->orig_kind && view.ndim == 1 && view.sizes[0] == param->layout.shard_numel;
    int result = fits ? torch_set_grad(param->tensor, grad) : torch_set_foreign_grad(param->tensor, grad);
    return result < 0 ? -1 : expose_grads(grads, grad);
}

int grads_mark_unexposed(struct grads *grads, int64_t index) {
    int requires_grad = torch_requires_grad(PyList_GetItem(grads->param->params, index));
    grads->has_unexposed_grads = grads->has_unexposed_grads || requires_grad > 0;
    return requires_grad < 0 ? -1 : 0;
}

static int expose_no_sync(struct grads *grads) {
    bool has_unexposed = grads->has_unexposed_grads;
    grads->has_unexposed_grads = false;
    if (grads->kind != GRAD_UNSHARDED) {
        if (grads_add_from_autograd(grads, &grads->saved_shard) < 0)
            return -1;
        int result = expose_flat_unsharded(grads);
        if (grads_set_kind(grads, GRAD_UNSHARDED) < 0 || result < 0)
            return -1;
    } else if (!has_unexposed) {
        return 0; /* accumulated in place */
    }
    return expose_grads(grads, grads->unsharded);
}

int grads_expose(struct grads *grads) {
    grads->in_backward = grads->hooked = false;
    /* A backward that raised and was finalised by hand leaves part of a gradient: drop it. */
    Py_CLEAR(grads->pending);
    Py_CLEAR(grads->sum);
    /* the shard reduced before no_sync stays in saved_shard until the next reduction */
    int result = grads->unsharded ? expose_no_sync(grads) : grads->saved_shard ? expose_reduced(grads) : 0;
    Py_CLEAR(grads->stashed);
    return result;
}

int grads_expose_full_grad(struct grads *grads, PyObject *grad) {
    Py_CLEAR(grads->watched);
    if (grad != Py_None)
        return expose_unsharded_grads(grads, grad);
    for (int64_t i = 0; i < grads->param->num_params; i++)
        if (clear_grad(PyList_GetItem(grads->param->params, i)) < 0)
            return -1;
    return 0;
}

int grads_expose_flat_grad(struct grads *grads) {
    if (!grads->param->use_orig_params)
        return 0;
    if (grads->kind == GRAD_UNSHARDED)
        return expose_unsharded_grads(grads, grads->unsharded);
    OWNED *grad = torch_get_grad(grads->param->tensor);
    if (!grad)
        return -1;
    return grad == Py_None ? grads_expose_full_grad(grads, grad) : expose_grads(grads, grad);
}

/* ---- move ---- */

/* Expose parts of the moved `grad` on all parameters that expose one now. */
static int expose_moved_grads(struct grads *grads, PyObject *grad) {
    Py_CLEAR(grads->watched); /* the former views are no longer watched */
    for (int64_t i = 0; grads->param->use_orig_params && i < grads->param->num_params; i++) {
        PyObject *param = PyList_GetItem(grads->param->params, i);
        OWNED *before = torch_get_grad(param);
        if (!before)
            return -1;
        if (before == Py_None || grads_offset(grads, i) < 0)
            continue;
        OWNED *part = grads_part(grads, grad, i);
        if (!part || torch_set_foreign_grad(param, part) < 0)
            return -1;
    }
    return grads->kind == GRAD_SHARDED ? watch_exposed(grads, NO_PARAM) : 0;
}

int grads_move(struct grads *grads) {
    const struct storage *storage = grads->storage;
    if (grads->in_backward || grads->kind == GRAD_NONE)
        return 0;
    if (grads->kind == GRAD_SHARDED) {
        OWNED *grad = torch_get_grad(grads->param->tensor);
        return !grad ? -1 : grad == Py_None ? 0 : expose_moved_grads(grads, grad);
    }
    /* Move the no_sync gradient to the shard's device, in the shard's dtype unless mixed precision sets
     * one. */
    PyObject *like = storage->may_offload ? grads->unsharded : storage->local_shard;
    PyObject *dtype = PyTuple_GetItem(storage->fallback_dtypes, 0);
    OWNED *device = PyObject_GetAttr(like, torch_names.device);
    PyObject *moved = device ? PyObject_CallMethod(grads->unsharded, "to", "OO", device,
                                                   dtype == Py_None ? storage->orig_dtype : dtype)
                             : NULL;
    if (!moved)
        return -1;
    ref_set(&grads->unsharded, moved);
    return expose_flat_unsharded(grads) < 0 ? -1 : expose_moved_grads(grads, grads->unsharded);
}
