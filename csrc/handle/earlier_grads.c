/* What `.grad` holds of earlier backwards: set aside as a backward begins, hidden amid it, and forgotten
 * where the user clears it; and where the gradient of one parameter lies in that of its unit.
 *
 * [Note: terms beside the units] A loss may have terms of the parameters as they are between steps:
 * sum(p.square().sum() for p in model.parameters()). Where such a term was made before the forward, its
 * gradient comes after the unit's own has been packed, and autograd sets or adds to `.grad`. It is of the
 * shard, and nobody reduces it, as nobody does where the term was made after the forward and the gradient was
 * there before the backward came to the unit.
 *
 * What parameters show of earlier backwards is hidden meanwhile, as a reduction on another stream adds to
 * it. */
#include "handle/gradients.h"

#include "base/check.h"
#include "torch/names.h"
#include "torch/tensor.h"

/* ---- what `.grad` holds between backwards ---- */

static const bool grad_allowed[GRAD_KINDS][GRAD_KINDS] = {
    [GRAD_NONE] = {[GRAD_NONE] = true,        /* the user has set none */
                   [GRAD_SHARDED] = true,     /* a reduced one is handed over */
                   [GRAD_UNSHARDED] = true},  /* after no_sync */
    [GRAD_SHARDED] = {[GRAD_NONE] = true,     /* set aside in a backward, or cleared by the user */
                      [GRAD_SHARDED] = true}, /* the user has set others */
    [GRAD_UNSHARDED] = {[GRAD_NONE] = true,   /* packed, cleared by the user, or by the user's hooks */
                        [GRAD_SHARDED] = true /* the user has set others */},
};

static const char *const grad_names[GRAD_KINDS] = {"GRAD_NONE", "GRAD_SHARDED", "GRAD_UNSHARDED"};

int gradients_set_kind(struct gradients *gradients, enum grad_kind kind) {
    if (!grad_allowed[gradients->kind][kind])
        return flat_param_refuse(gradients->param, grad_names[gradients->kind], grad_names[kind], "");
    gradients->kind = kind;
    CHECKED(gradients_check(gradients));
    return 0;
}

void gradients_check(const struct gradients *gradients) {
    INVARIANT(gradients->kind != GRAD_SHARDED || !gradients->in_backward);
    INVARIANT(gradients->kind != GRAD_UNSHARDED || gradients->param->sharded);
    INVARIANT(!gradients->work || gradients->reduce_output);
    INVARIANT(!gradients->offloaded || gradients->storage->offload);
    INVARIANT(!gradients->shown || gradients->kind == GRAD_SHARDED);
}

/* ---- where a parameter's gradient lies in that of its unit ---- */

static bool is_full_size(const struct gradients *gradients) {
    return !gradients->param->sharded || gradients->kind == GRAD_UNSHARDED;
}

int64_t gradients_offset(const struct gradients *gradients, int64_t index) {
    if (is_full_size(gradients))
        return layout_param_offset(&gradients->param->layout, index);
    const struct layout_shard_range *range = &gradients->param->layout.shard_ranges[index];
    return range->in_shard && range->numel_in_shard ? range->offset_in_shard : -1;
}

PyObject *gradients_part(const struct gradients *gradients, PyObject *flat_grad, int64_t index) {
    int64_t offset = gradients_offset(gradients, index);
    if (is_full_size(gradients))
        return torch_view(flat_grad, offset, layout_param_numel(&gradients->param->layout, index),
                          PyTuple_GetItem(gradients->param->shapes, index),
                          PyTuple_GetItem(gradients->param->strides, index));
    return PyObject_CallMethod(flat_grad, "narrow", "iLL", 0, (long long)offset,
                               (long long)gradients->param->layout.shard_ranges[index].numel_in_shard);
}

int gradients_is_zero(PyObject *tensor) {
    OWNED *any = PyObject_CallMethod(tensor, "any", NULL);
    return any ? PyObject_Not(any) : -1;
}

/* ---- hidden amid a backward ---- */

static bool is_part_of(PyObject *grad, const struct tensor_view *whole) {
    struct tensor_view view;
    if (tensor_view_of(grad, &view) < 0) {
        PyErr_Clear();
        return false;
    }
    uintptr_t nbytes = (uintptr_t)(tensor_view_numel(whole) * dtype_nbytes(whole->dtype));
    return (uintptr_t)view.data - (uintptr_t)whole->data < nbytes;
}

/* No original parameter's .grad is a part of `whole_grad` any longer; `aside`: until they are shown again. 0
 * or -1. */
static int hide(struct gradients *gradients, PyObject *whole_grad, bool aside) {
    struct tensor_view whole;
    if (!gradients->param->use_orig_params)
        return 0;
    ref_set(&gradients->hidden, PyList_New(0));
    if (!gradients->hidden || tensor_view_of(whole_grad, &whole) < 0)
        return -1;
    for (int64_t i = 0; i < gradients->param->num_params; i++) {
        PyObject *param = PyList_GetItem(gradients->param->params, i);
        OWNED *grad = torch_get_grad(param);
        bool hides = grad && grad != Py_None && is_part_of(grad, &whole);
        if (!grad ||
            PyList_Append(gradients->hidden, !hides  ? Py_None
                                             : aside ? grad
                                                     : Py_True) < 0 ||
            (hides && torch_set_grad(param, Py_None) < 0))
            return -1;
    }
    return 0;
}

int gradients_hide_unsharded(struct gradients *gradients) {
    if (gradients->kind != GRAD_UNSHARDED)
        return 0;
    if (hide(gradients, gradients->unsharded, false) < 0 ||
        torch_set_grad(gradients->param->tensor, Py_None) < 0)
        return -1;
    return gradients_set_kind(gradients, GRAD_NONE);
}

int gradients_show_again(struct gradients *gradients) {
    OWNED *hidden = gradients->hidden;
    gradients->hidden = NULL;
    int result = 0;
    for (Py_ssize_t i = 0; hidden && !result && i < PyList_Size(hidden); i++)
        if (torch_is_tensor(PyList_GetItem(hidden, i)))
            result = torch_set_foreign_grad(PyList_GetItem(gradients->param->params, i),
                                            PyList_GetItem(hidden, i));
    return result;
}

static int add(const struct gradients *gradients, PyObject **shard, PyObject *late, int64_t index) {
    if (!*shard && !(*shard = torch_zeros_like(gradients->storage->shard_like)))
        return -1;
    OWNED *part = index < 0 ? Py_NewRef(*shard) : gradients_part(gradients, *shard, index);
    OWNED *there = part ? PyObject_CallMethod(late, "to", "O", part) : NULL; /* its device and dtype */
    return ref_done(there ? PyObject_CallMethod(part, "add_", "O", there) : NULL);
}

int gradients_add_late(struct gradients *gradients, PyObject **shard) {
    const struct flat_param *param = gradients->param;
    int64_t begin = param->use_orig_params ? 0 : -1; /* the flat parameter */
    int64_t end = param->use_orig_params ? param->num_params : 0;
    int result = 0;
    for (int64_t i = begin; !result && i < end; i++) {
        if (i >= 0 && gradients_offset(gradients, i) < 0)
            continue;
        OWNED *late = torch_get_grad(i < 0 ? param->tensor : PyList_GetItem(param->params, i));
        if (late != Py_None)
            result = !late ? -1 : shard ? add(gradients, shard, late, i) : 1;
    }
    return result;
}

/* ---- set aside ---- */

/* A gradient in CPU memory, where computation is. New reference. */
static PyObject *upload(struct gradients *gradients, PyObject *grad) {
    struct tensor_view view;
    if (tensor_view_of(grad, &view) < 0)
        return NULL;
    OWNED *dtype = PyObject_GetAttr(grad, torch_names.dtype);
    PyObject *copy = dtype ? torch_empty(tensor_view_numel(&view), dtype, gradients->param->device) : NULL;
    if (copy && torch_enqueue_copy(copy, grad) < 0)
        Py_CLEAR(copy);
    return copy;
}

PyObject *gradients_cast_to_shard_dtype(struct gradients *gradients, PyObject *input) {
    PyObject *output = gradients->cast_output;
    gradients->cast_output = NULL;
    if (!output)
        output = torch_empty_like(gradients->storage->shard_like);
    if (output && storage_apply(gradients->storage, gradients->storage->kernels->cast_divide, output, input,
                                1.0, "cast of a gradient") < 0)
        Py_CLEAR(output);
    return output;
}

int gradients_forget_reduced(struct gradients *gradients, int64_t index) {
    const struct layout_shard_range *range = &gradients->param->layout.shard_ranges[index];
    if (!gradients->saved_shard || !range->in_shard)
        return 0;
    OWNED *part = torch_part(gradients->saved_shard, range->offset_in_shard, range->numel_in_shard);
    return part ? torch_zero(part) : -1;
}

static int forget_if_zeroed(struct gradients *gradients, PyObject *shown, int64_t index) {
    /* by anything but this library, since it is shown */
    int64_t writes = shown == Py_None ? 0 : torch_version(shown);
    if (writes <= 0)
        return (int)writes;
    OWNED *part = gradients_part(gradients, gradients->unsharded, index);
    int zeroed = part ? gradients_is_zero(part) : -1;
    return zeroed > 0 ? gradients_forget_reduced(gradients, index) : zeroed;
}

/* What no_sync left is what the user sees, and what was reduced before is a part of the same gradient: where
 * the one was zeroed in place, the other goes as well (parity 41). */
static int forget_zeroed(struct gradients *gradients) {
    const struct flat_param *param = gradients->param;
    for (int64_t i = 0; gradients->saved_shard && i < param->num_params; i++) {
        OWNED *shown =
            torch_get_grad(param->use_orig_params ? PyList_GetItem(param->params, i) : param->tensor);
        if (!shown || forget_if_zeroed(gradients, shown, i) < 0)
            return -1;
    }
    return 0;
}

int gradients_drop_shown(struct gradients *gradients) {
    Py_CLEAR(gradients->shown);
    gradients->unreduced = false;
    Py_CLEAR(gradients->unsharded);
    Py_CLEAR(gradients->saved_shard);
    if (gradients->kind == GRAD_NONE)
        return 0;
    if (torch_set_grad(gradients->param->tensor, Py_None) < 0)
        return -1;
    return gradients_set_kind(gradients, GRAD_NONE);
}

static int take_flat_grad(struct gradients *gradients) {
    Py_CLEAR(gradients->shown);
    OWNED *grad = torch_get_grad(gradients->param->tensor);
    struct tensor_view view;
    if (!grad)
        return -1;
    if (grad == Py_None)
        return gradients_drop_shown(gradients);
    if (gradients->kind == GRAD_UNSHARDED)
        return forget_zeroed(gradients);
    if (gradients_set_kind(gradients, GRAD_NONE) < 0 || hide(gradients, grad, true) < 0)
        return -1;
    if (gradients->storage->offload)
        ref_set(&grad, upload(gradients, grad));
    if (!grad || tensor_view_of(grad, &view) < 0)
        return -1;
    if (gradients->param->sharded && view.dtype != gradients->storage->orig_kind)
        ref_set(&grad, gradients_cast_to_shard_dtype(gradients, grad));
    ref_set(&gradients->saved_shard, Py_XNewRef(grad));
    return grad ? torch_set_grad(gradients->param->tensor, Py_None) : -1;
}

int gradients_prepare(struct gradients *gradients) {
    bool begins = !gradients->in_backward;
    gradients->in_backward = true;
    return begins ? take_flat_grad(gradients) : 0;
}

/* ---- made of nothing ---- */

PyObject *gradients_zeros(struct gradients *gradients) {
    PyObject *left, *zeros;
    if (torch_leave_inference_mode(&left) < 0)
        return NULL;
    zeros = torch_zeros_like(gradients->storage->local_shard);
    if (zeros && torch_set_foreign_grad(gradients->param->tensor, zeros) < 0)
        Py_CLEAR(zeros);
    if (torch_return_to_inference_mode(left) < 0)
        Py_CLEAR(zeros);
    return zeros;
}

PyObject *gradients_flat_or_zeros(struct gradients *gradients) {
    PyObject *grad = torch_get_grad(gradients->param->tensor);
    if (!grad || grad != Py_None)
        return grad;
    Py_DECREF(grad);
    return gradients_set_kind(gradients, GRAD_SHARDED) < 0 ? NULL : gradients_zeros(gradients);
}

PyObject *gradients_sharded(const struct gradients *gradients) {
    if (gradients->in_backward && gradients->saved_shard && gradients->param->sharded)
        return Py_NewRef(gradients->offloaded ? gradients->offloaded : gradients->saved_shard);
    return gradients->param->tensor ? torch_get_grad(gradients->param->tensor) : Py_NewRef(Py_None);
}
