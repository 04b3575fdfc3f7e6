/* The torch custom op of a handle, addressed by handle id:
 *
 *   fsdp_c::segment_views(Tensor(a) flat, int handle) -> Tensor(a)[]   one alias per parameter, below autograd */
#include "handle/handle.h"

#include "torch/op_stack.h"
#include "torch/ops.h"
#include "torch/ref.h"
#include "torch/tensor.h"

/* Return an alias of the storage without autograd metadata, with a version counter of its own. */
static AtenTensorHandle alias(AtenTensorHandle flat, int64_t offset, const struct param_shape *shape) {
    int64_t contiguous[OP_MAX_NDIM];
    const int64_t *strides = shape->strides ? shape->strides : contiguous;
    AtenTensorHandle view = NULL;
    OP_CHECK(shape->ndim <= OP_MAX_NDIM, "a parameter has %lld dimensions", (long long)shape->ndim);
    if (!shape->strides)
        op_contiguous_strides(shape->ndim, shape->sizes, contiguous);
    OP_CALL(
        torch_abi.aoti_torch__reinterpret_tensor(flat, shape->ndim, shape->sizes, strides, offset, &view));
    return view;
}

static void segment_views(StableIValue *stack, uint64_t num_inputs, uint64_t num_outputs) {
    OP_OWNED flat = op_tensor(stack[0]);
    const struct handle *handle = handle_table_find(op_int(stack[1]));
    StableListHandle views = NULL;
    struct op_operand operand;
    int64_t start = 0;
    OP_CHECK(handle,
             "fsdp_c::segment_views: there is no handle %lld: pass the op_id of a FlatParamHandle that is "
             "alive",
             (long long)op_int(stack[1]));
    op_read_operand(&operand, flat);
    OP_CALL(torch_abi.aoti_torch_get_storage_offset(flat, &start));
    OP_CHECK(operand.numel >= handle->param.layout.numel && operand.is_contiguous,
             "fsdp_c::segment_views: flat must be contiguous with the unit's elements: got %lld, the unit "
             "has %lld",
             (long long)operand.numel, (long long)handle->param.layout.numel);
    OP_CALL(torch_abi.torch_new_list_reserve_size((size_t)handle->param.num_params, &views));
    for (int64_t i = 0; i < handle->param.num_params; i++) {
        AtenTensorHandle view = alias(flat, start + layout_param_offset(&handle->param.layout, i),
                                      &handle->param.param_shapes[i]);
        op_push(views, &view);
    }
    stack[0] = (StableIValue)(uintptr_t)views;
}

/* ---- registration ---- */

static const char *const op_schemas[] = {"segment_views(Tensor(a) flat, int handle) -> Tensor(a)[]"};

static const struct op_kernel op_kernels[] = {
    {"CPU", "segment_views", segment_views},
    {"CUDA", "segment_views", segment_views},
    {"Meta", "segment_views", segment_views},
};

static struct op_library library = {.schemas = op_schemas,
                                    .kernels = op_kernels,
                                    .num_schemas = sizeof op_schemas / sizeof *op_schemas,
                                    .num_kernels = sizeof op_kernels / sizeof *op_kernels};

int handle_ops_init(void) {
    return ops_register(&library);
}
