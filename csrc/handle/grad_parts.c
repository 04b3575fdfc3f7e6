/* Where the gradient of one parameter lies in that of its unit. */
#include "handle/gradients.h"
#include "torch/names.h"

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
