/* The reduction of a unit's gradients, and gradients as the user sees them in `.grad`. */
#include "handle/handle.h"
#include "handle/handle_ops.h"
#include "torch/names.h"
#include "torch/tensor.h"

/* ---- reduction ---- */

/* A hybrid strategy whose shard group has one rank is NO_SHARD over its replicas. */
static const struct collective_group *reduction_group(const struct handle *handle) {
    if (handle->comm_hook.native)
        return &handle->comm_hook.group;
    return !handle->sharded && handle->replicate_group.group ? &handle->replicate_group : &handle->shard_group;
}

static PyObject *enqueue(struct handle *handle) {
    struct gradients *gradients = &handle->gradients;
    if (handle->comm_hook.function && !handle->comm_hook.native)
        return handle_call_comm_hook(handle);
    const struct collective_group *group = reduction_group(handle);
    if (!handle->sharded)
        return collective_all_reduce(group, gradients->reduce_output);
    return collective_reduce_scatter(group, gradients->reduce_output, gradients->reduce_input);
}

int handle_reduce_enqueue(struct handle *handle) {
    struct gradients *gradients = &handle->gradients;
    gradients->reduce_output = handle->sharded ? torch_empty_like(handle->form->reduce_output_like.tensor)
                                               : Py_NewRef(gradients->reduce_input);
    if (gradients->reduce_output)
        gradients->work = enqueue(handle);
    return gradients->work ? handle_wait_in_stream(handle, &gradients->work) : -1;
}

static int cast_divide(struct handle *handle, PyObject *output, PyObject *input, double divisor) {
    struct tensor_view to, from;
    if (tensor_view_of(output, &to) < 0 || tensor_view_of(input, &from) < 0)
        return -1;
    return tensor_check(handle->kernels->cast_divide(to.data, to.dtype, from.data, from.dtype, tensor_view_numel(&from),
                                                     divisor, handle_stream(handle)),
                        "post-division of gradients");
}

/* A new tensor of the values of `input`, in the dtype of the sharded parameter, where computation is. */
static PyObject *cast_to_shard_dtype(struct handle *handle, PyObject *input) {
    PyObject *output = torch_empty_like(handle->shard_like.tensor);
    if (output && cast_divide(handle, output, input, 1.0) < 0)
        Py_CLEAR(output);
    return output;
}

static int accumulate_output(struct handle *handle, PyObject *output) {
    struct tensor_view to, from;
    if (tensor_view_of(handle->gradients.saved_shard, &to) < 0 || tensor_view_of(output, &from) < 0)
        return -1;
    return tensor_check(handle->kernels->accumulate(to.data, to.dtype, from.data, from.dtype,
                                                    handle->layout.shard_numel, handle->postdivide,
                                                    handle_stream(handle)),
                        "accumulation of a reduced gradient");
}

/* A custom hook may have left another dtype than it was given. */
static int output_dtype(const struct handle *handle, PyObject *output, enum dtype *dtype) {
    struct tensor_view view;
    *dtype = handle->form->reduce_kind;
    if (!handle->comm_hook.function)
        return 0;
    if (tensor_view_of(output, &view) < 0)
        return -1;
    *dtype = view.dtype;
    return 0;
}

/* saved_shard = post-divided output, or += it. */
static int save_output(struct handle *handle, PyObject *output) {
    struct gradients *gradients = &handle->gradients;
    if (handle->sharded && gradients->saved_shard)
        return accumulate_output(handle, output);
    if (handle->postdivide != 1.0 && cast_divide(handle, output, output, handle->postdivide) < 0)
        return -1;
    enum dtype dtype;
    if (output_dtype(handle, output, &dtype) < 0)
        return -1;
    bool keeps_low = !handle->sharded && handle->keep_low_precision_grads && !handle->comm_hook.native;
    bool keep = dtype == handle->orig_kind || keeps_low;
    ref_set(&gradients->saved_shard, keep ? Py_NewRef(output) : cast_to_shard_dtype(handle, output));
    return gradients->saved_shard ? 0 : -1;
}

/* See [Note: offload]. The host waits for it before the gradient is handed over. */
static int enqueue_download(struct handle *handle) {
    struct gradients *gradients = &handle->gradients;
    if (!handle->offload)
        return 0;
    if (!gradients->offloaded)
        gradients->offloaded = torch_empty_pinned_like(gradients->saved_shard);
    if (!gradients->offloaded)
        return -1;
    PyObject *done = PyObject_CallMethod(gradients->offloaded, "copy_", "OO", gradients->saved_shard, Py_True);
    Py_XDECREF(done);
    return done ? 0 : -1;
}

bool handle_reduces_twice(const struct handle *handle) {
    return handle->sharded && handle->replicate_group.group;
}

int handle_reduce_finish(struct handle *handle) {
    struct gradients *gradients = &handle->gradients;
    PyObject *work = gradients->work;
    if (!work)
        return 0;
    gradients->work = NULL;
    int result = collective_wait(work);
    if (!result && handle_reduces_twice(handle)) {
        work = collective_all_reduce(&handle->replicate_group, gradients->reduce_output);
        result = work ? collective_wait(work) : -1;
    }
    if (!result)
        result = save_output(handle, gradients->reduce_output);
    if (!result)
        result = enqueue_download(handle);
    if (result < 0)
        handle_reduce_release(handle);
    return result;
}

PyObject *handle_take_reduce_output(struct handle *handle) {
    struct gradients *gradients = &handle->gradients;
    PyObject *output = gradients->reduce_output;
    gradients->reduce_output = NULL;
    if (output == gradients->saved_shard)
        Py_CLEAR(output);
    return output;
}

void handle_reduce_release(struct handle *handle) {
    Py_CLEAR(handle->gradients.reduce_input);
    Py_CLEAR(handle->gradients.reduce_output);
}

/* ---- .grad ---- */

static PyObject *split(PyObject *tensor, PyObject *sizes) {
    return PyObject_CallFunctionObjArgs(torch_names.split_with_sizes, tensor, sizes, NULL);
}

static int clear_grad(PyObject *param) {
    PyObject *grad = torch_get_grad(param);
    int result = grad ? 0 : -1;
    if (grad && grad != Py_None)
        result = torch_set_grad(param, Py_None);
    Py_XDECREF(grad);
    return result;
}

/* The original parameters show their parts of the sharded flat gradient; those outside the shard show None. */
static int show_sharded_grads(struct handle *handle, PyObject *grad) {
    PyObject *pieces = split(grad, handle->shard_sizes);
    int result = pieces ? 0 : -1;
    for (int64_t i = 0; !result && i < handle->num_params; i++) {
        PyObject *param = PyList_GetItem(handle->params, i);
        int requires_grad = handle->shard_pieces[i] < 0 ? 0 : torch_requires_grad(param);
        if (requires_grad > 0) {
            PyObject *piece = PySequence_GetItem(pieces, handle->shard_pieces[i]);
            result = piece ? torch_set_grad(param, piece) : -1;
            Py_XDECREF(piece);
        } else {
            result = requires_grad < 0 ? -1 : clear_grad(param);
        }
    }
    Py_XDECREF(pieces);
    return result;
}

/* The original parameters show full-shape gradients: NO_SHARD always, sharded strategies under no_sync. */
static int show_unsharded_grads(struct handle *handle, PyObject *grad) {
    PyObject *views = handle_segment_views(handle, grad);
    int result = views ? 0 : -1;
    for (int64_t i = 0; !result && i < handle->num_params; i++) {
        PyObject *param = PyList_GetItem(handle->params, i);
        int requires_grad = torch_requires_grad(param);
        if (requires_grad > 0)
            result = torch_set_foreign_grad(param, PyList_GetItem(views, i));
        else
            result = requires_grad < 0 ? -1 : clear_grad(param);
    }
    Py_XDECREF(views);
    return result;
}

static int show_grads(struct handle *handle, PyObject *grad) {
    if (!handle->use_orig_params)
        return 0;
    return handle->sharded && handle->gradients.kind == GRAD_SHARDED ? show_sharded_grads(handle, grad)
                                                                     : show_unsharded_grads(handle, grad);
}

/* The gradient of this backward where the shard lies; new reference. What was never reduced is copied while the host waits. */
static PyObject *take_saved_shard(struct handle *handle) {
    struct gradients *gradients = &handle->gradients;
    PyObject *shard = gradients->saved_shard, *offloaded = gradients->offloaded;
    gradients->saved_shard = gradients->offloaded = NULL;
    if (!handle->offload)
        return shard;
    if (!offloaded)
        offloaded = PyObject_CallMethod(shard, "cpu", NULL);
    Py_DECREF(shard);
    if (offloaded && handle_publish_cpu_grad(handle, offloaded) < 0)
        Py_CLEAR(offloaded);
    return offloaded;
}

/* NO_SHARD keeps the dtype of the reduction instead. */
static PyObject *hand_over_dtype(struct handle *handle, PyObject *grad) {
    if (!handle->sharded || !handle->keep_low_precision_grads || !handle->form->low_precision)
        return Py_NewRef(grad);
    return PyObject_CallMethod(grad, "to", "O", handle->form->dtype);
}

/* flat_param.grad = grad, which has the shape and dtype of the shard in the usual step. */
static int set_flat_grad(struct handle *handle, PyObject *grad) {
    struct tensor_view view;
    if (tensor_view_of(grad, &view) < 0)
        return -1;
    bool fits = view.dtype == handle->orig_kind && view.ndim == 1 && view.sizes[0] == handle->layout.shard_numel;
    return fits ? torch_set_grad(handle->flat_param, grad) : torch_set_foreign_grad(handle->flat_param, grad);
}

static int show_no_sync(struct handle *handle) {
    struct gradients *gradients = &handle->gradients;
    if (gradients->kind == GRAD_UNSHARDED)
        return 0; /* accumulated in place: shown already */
    PyObject *grad =
        PyObject_CallMethod(gradients->unsharded, "narrow", "iLL", 0, 0LL, (long long)handle->layout.numel);
    int result = grad ? torch_set_foreign_grad(handle->flat_param, grad) : -1;
    Py_XDECREF(grad);
    gradients->kind = GRAD_UNSHARDED;
    return result < 0 ? -1 : show_grads(handle, gradients->unsharded);
}

static int show_reduced(struct handle *handle) {
    struct gradients *gradients = &handle->gradients;
    PyObject *shard = take_saved_shard(handle), *grad = shard ? hand_over_dtype(handle, shard) : NULL;
    Py_XDECREF(shard);
    gradients->kind = GRAD_SHARDED;
    int result = grad ? set_flat_grad(handle, grad) : -1;
    if (!result)
        result = show_grads(handle, grad);
    Py_XDECREF(grad);
    return result;
}

int handle_hand_over(struct handle *handle) {
    struct gradients *gradients = &handle->gradients;
    gradients->in_backward = gradients->hooked = false;
    /* left when a backward has raised and is ended by hand: part of a gradient, which nobody will complete */
    Py_CLEAR(gradients->pending);
    Py_CLEAR(gradients->sum);
    if (gradients->unsharded)
        return show_no_sync(handle); /* what was reduced before stays aside until the next reduction */
    return gradients->saved_shard ? show_reduced(handle) : 0;
}

int handle_show_full_grad(struct handle *handle, PyObject *grad) {
    if (grad != Py_None)
        return show_unsharded_grads(handle, grad);
    for (int64_t i = 0; i < handle->num_params; i++)
        if (clear_grad(PyList_GetItem(handle->params, i)) < 0)
            return -1;
    return 0;
}

int handle_show_flat_grad(struct handle *handle) {
    if (!handle->use_orig_params)
        return 0;
    if (handle->gradients.kind == GRAD_UNSHARDED)
        return show_unsharded_grads(handle, handle->gradients.unsharded);
    PyObject *grad = torch_get_grad(handle->flat_param);
    int result = grad ? 0 : -1;
    if (grad)
        result = grad == Py_None ? handle_show_full_grad(handle, grad) : show_grads(handle, grad);
    Py_XDECREF(grad);
    return result;
}

/* ---- from .grad back ---- */

/* A gradient in CPU memory, where computation is. New reference. */
static PyObject *upload(struct handle *handle, PyObject *grad) {
    struct tensor_view view;
    if (tensor_view_of(grad, &view) < 0)
        return NULL;
    PyObject *dtype = PyObject_GetAttr(grad, torch_names.dtype);
    PyObject *copy = dtype ? torch_empty(tensor_view_numel(&view), dtype, handle->device) : NULL;
    PyObject *done = copy ? PyObject_CallMethod(copy, "copy_", "OO", grad, Py_True) : NULL;
    Py_XDECREF(dtype);
    if (!done)
        Py_CLEAR(copy);
    Py_XDECREF(done);
    return copy;
}

static int take_flat_grad(struct handle *handle) {
    struct gradients *gradients = &handle->gradients;
    PyObject *grad = torch_get_grad(handle->flat_param);
    if (!grad)
        return -1;
    if (grad == Py_None) {
        Py_DECREF(grad);
        Py_CLEAR(gradients->unsharded);
        Py_CLEAR(gradients->saved_shard);
        gradients->kind = GRAD_NONE;
        gradients->unreduced = false;
        return 0;
    }
    if (gradients->kind == GRAD_UNSHARDED) {
        Py_DECREF(grad);
        return 0;
    }
    gradients->kind = GRAD_NONE;
    struct tensor_view view;
    if (handle->offload) {
        ref_set(&grad, upload(handle, grad));
        if (!grad)
            return -1;
    }
    int result = tensor_view_of(grad, &view);
    if (!result && handle->sharded && view.dtype != handle->orig_kind)
        ref_set(&grad, cast_to_shard_dtype(handle, grad));
    if (!result && grad)
        result = torch_set_grad(handle->flat_param, Py_None);
    ref_set(&gradients->saved_shard, grad);
    return grad ? result : -1;
}

int handle_prepare_gradient(struct handle *handle) {
    if (handle->gradients.in_backward)
        return 0;
    handle->gradients.in_backward = true;
    return take_flat_grad(handle);
}

/* Where parameter `param` lies in the flat gradient, or -1. */
static int64_t grad_offset(const struct handle *handle, int64_t param) {
    if (!handle->sharded || handle->gradients.kind == GRAD_UNSHARDED)
        return layout_param_offset(&handle->layout, param);
    const struct layout_shard_range *range = &handle->layout.shard_ranges[param];
    return range->in_shard && range->numel_in_shard ? range->offset_in_shard : -1;
}

/* The parameter's own part of the flat gradient, in the shape the parameter's gradient has. */
static PyObject *grad_part(struct handle *handle, PyObject *flat_grad, int64_t param, int64_t offset) {
    if (!handle->sharded || handle->gradients.kind == GRAD_UNSHARDED)
        return torch_view(flat_grad, offset, layout_param_numel(&handle->layout, param),
                          PyTuple_GetItem(handle->shapes, param), PyTuple_GetItem(handle->strides, param));
    return PyObject_CallMethod(flat_grad, "narrow", "iLL", 0, (long long)offset,
                               (long long)handle->layout.shard_ranges[param].numel_in_shard);
}

/* What the user did to one gradient goes into the flat gradient: None is zero there, another tensor's values are copied. */
static int collect_param_grad(struct handle *handle, PyObject *flat_grad, const struct tensor_view *flat, int64_t param,
                              PyObject *grad) {
    int64_t offset = grad_offset(handle, param);
    struct tensor_view view;
    if (offset < 0)
        return 0;
    if (grad != Py_None) {
        if (tensor_view_of(grad, &view) < 0)
            return handle_refuse_gradient(handle, param);
        if ((const char *)view.data == (const char *)flat->data + offset * dtype_nbytes(flat->dtype))
            return 0;
    }
    if (handle_say_writeback(handle, param, "Gradient", grad) < 0)
        return -1;
    PyObject *part = grad_part(handle, flat_grad, param, offset), *done = NULL;
    if (part)
        done =
            grad == Py_None ? PyObject_CallMethod(part, "zero_", NULL) : PyObject_CallMethod(part, "copy_", "O", grad);
    Py_XDECREF(part);
    Py_XDECREF(done);
    return done ? 0 : -1;
}

/* 1 when some original parameter has a gradient, 0 when none has, -1 on error. */
static int any_param_grad(struct handle *handle) {
    for (int64_t i = 0; i < handle->num_params; i++) {
        if (grad_offset(handle, i) < 0)
            continue;
        PyObject *grad = torch_get_grad(PyList_GetItem(handle->params, i));
        if (!grad)
            return -1;
        bool some = grad != Py_None;
        Py_DECREF(grad);
        if (some)
            return 1;
    }
    return 0;
}

static PyObject *flat_grad_or_zeros(struct handle *handle) {
    PyObject *grad = torch_get_grad(handle->flat_param);
    if (!grad || grad != Py_None)
        return grad;
    PyObject *zeros = torch_empty_like(handle->local_shard), *done = NULL;
    Py_DECREF(grad);
    if (zeros)
        done = PyObject_CallMethod(zeros, "zero_", NULL);
    Py_XDECREF(done);
    handle->gradients.kind = GRAD_SHARDED;
    if (!done || torch_set_foreign_grad(handle->flat_param, zeros) < 0)
        Py_CLEAR(zeros);
    return zeros;
}

static int collect_all(struct handle *handle) {
    struct tensor_view view;
    PyObject *flat_grad = flat_grad_or_zeros(handle);
    int result = flat_grad ? tensor_view_of(flat_grad, &view) : -1;
    for (int64_t i = 0; !result && i < handle->num_params; i++) {
        PyObject *grad = torch_get_grad(PyList_GetItem(handle->params, i));
        result = grad ? collect_param_grad(handle, flat_grad, &view, i, grad) : -1;
        Py_XDECREF(grad);
    }
    Py_XDECREF(flat_grad);
    return result;
}

static int drop_flat_grad(struct handle *handle) {
    handle->gradients.unreduced = false;
    Py_CLEAR(handle->gradients.unsharded);
    Py_CLEAR(handle->gradients.saved_shard);
    if (handle->gradients.kind == GRAD_NONE)
        return 0;
    if (torch_set_grad(handle->flat_param, Py_None) < 0)
        return -1;
    handle->gradients.kind = GRAD_NONE;
    return 0;
}

int handle_collect_user_grads(struct handle *handle) {
    if (!handle->ready || handle->gradients.in_backward)
        return 0;
    if (!handle->use_orig_params) {
        PyObject *grad = torch_get_grad(handle->flat_param);
        if (!grad)
            return -1;
        Py_DECREF(grad);
        return grad == Py_None ? drop_flat_grad(handle) : 0;
    }
    int some = any_param_grad(handle);
    if (some < 0)
        return -1;
    return some ? collect_all(handle) : drop_flat_grad(handle);
}
