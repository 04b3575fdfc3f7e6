/* What autograd has brought for one unit: the latest contribution, added up with the ones before it. */
#include "handle/gradients.h"

#include "handle/unit_error.h"
#include "torch/names.h"
#include "torch/tensor.h"

int gradients_refuse(const struct gradients *gradients, int64_t index) {
    PyErr_Clear(); /* of the tensor alone; nothing of Python's is called with an exception set */
    OWNED *fqn = flat_param_fqn(gradients->param, index);
    if (!fqn)
        return -1;
    unit_error(PyExc_RuntimeError, gradients->param->layout.rank, gradients->param->name,
               "cannot use the gradient of %S: dense strided gradients on %S are supported. "
               "Sparse gradients "
               "(nn.Embedding(sparse=True)) need an unsharded module: pass it in ignored_modules.",
               fqn, gradients->param->device);
    return -1;
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

int gradients_pack_pending(struct gradients *gradients, PyObject *output, double divisor) {
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

int gradients_apply(const struct gradients *gradients, elementwise_kernel *kernel, PyObject *output,
                    PyObject *input, double divisor, const char *what) {
    struct tensor_view to, from;
    if (tensor_view_of(output, &to) < 0 || tensor_view_of(input, &from) < 0)
        return -1;
    return tensor_check(kernel(to.data, to.dtype, from.data, from.dtype, tensor_view_numel(&from), divisor,
                               storage_stream(gradients->storage)),
                        what);
}

PyObject *gradients_take_received(struct gradients *gradients) {
    const PyObject *sum = gradients->sum;
    OWNED *total =
        sum ? Py_NewRef(gradients->sum) : torch_empty_like(gradients->storage->copy->gradient_like);
    if (!total ||
        (sum ? gradients_add_pending(gradients, total) : gradients_pack_pending(gradients, total, 1.0)) < 0)
        return NULL;
    Py_CLEAR(gradients->sum);
    Py_CLEAR(gradients->pending);
    return Py_NewRef(total);
}

int gradients_add_received(struct gradients *gradients, PyObject *target) {
    PyObject *sum = gradients->sum;
    int result = gradients_add_pending(gradients, sum ? sum : target);
    if (!result && sum)
        result = gradients_apply(gradients, gradients->storage->kernels->accumulate, target, sum, 1.0,
                                 "accumulation of gradients");
    Py_CLEAR(gradients->sum);
    Py_CLEAR(gradients->pending);
    return result;
}

/* ---- where the gradient of one parameter lies in that of its unit ---- */

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
