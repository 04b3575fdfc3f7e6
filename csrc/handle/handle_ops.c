/* Torch custom ops on a unit, addressed by handle id: visible to the dispatcher, the profiler and opcheck. A
 * step calls the same functions directly, without the dispatcher.
 *
 *   fsdp_c::unshard(Tensor(a!) full, int handle) -> ()                 all-gather the unit into `full`
 *   fsdp_c::reshard(Tensor(a!) full, int handle) -> ()                 free the unsharded storage
 *   fsdp_c::unshard_views(Tensor(a) full, int handle) -> Tensor(a)[]   one view per parameter, differentiable
 *   fsdp_c::segment_views(Tensor(a) flat, int handle) -> Tensor(a)[]   one alias per parameter, below autograd
 *
 * `full` is the handle's own padded_unsharded_flat_param, or any tensor of that size and dtype to copy
 * into. */
#include "handle/handle.h"

#include "torch/op_stack.h"
#include "torch/ops.h"
#include "torch/ref.h"
#include "torch/tensor.h"

static struct handle *find(const char *op, int64_t id) {
    struct handle *handle = handle_table_find(id);
    OP_CHECK(handle, "%s: there is no handle %lld: pass the op_id of a FlatParamHandle that is alive", op,
             (long long)id);
    return handle;
}

/* ---- unshard and reshard: both call Python, so take the GIL ---- */

static int reshard_now(struct handle *handle) {
    return storage_reshard(&handle->storage, true);
}

/* Run `verb` with the GIL held, and turn its exception into an op error. */
static void run(const char *op, struct handle *handle, int (*verb)(struct handle *)) {
    char message[400] = "";
    PyGILState_STATE lock = PyGILState_Ensure();
    int result = verb(handle);
    if (result < 0)
        ref_take_exception(message, sizeof message);
    PyGILState_Release(lock);
    OP_CHECK(result == 0, "%s: %s", op, message);
}

static void unshard(StableIValue *stack, uint64_t num_inputs, uint64_t num_outputs) {
    OP_OWNED tensor = op_tensor(stack[0]);
    struct handle *handle = find("fsdp_c::unshard", op_int(stack[1]));
    struct op_operand full;
    op_read_shape(&full, tensor); /* the handle's own tensor may have no storage */
    OP_CHECK(handle->initialized, "fsdp_c::unshard: the handle is not initialised: run a forward first");
    OP_CHECK(full.numel == handle->param.layout.padded_numel &&
                 full.view.dtype == handle->storage.copy->kind && full.is_contiguous,
             "fsdp_c::unshard: full must be a contiguous tensor of %lld elements in the compute dtype",
             (long long)handle->param.layout.padded_numel);
    run("fsdp_c::unshard", handle, handle_unshard_outside_step);
    op_read_operand(&full, tensor);
    const struct storage *storage = &handle->storage;
    const struct tensor_view *unsharded =
        storage->copy->is_local ? &storage->local_view : &storage->copy->full.view;
    if (full.view.data != unsharded->data)
        handle->storage.kernels->cast_divide(full.view.data, handle->storage.copy->kind, unsharded->data,
                                             handle->storage.copy->kind, full.numel, 1.0,
                                             tensor_kernel_stream(unsharded));
}

static void reshard(StableIValue *stack, uint64_t num_inputs, uint64_t num_outputs) {
    OP_OWNED tensor = op_tensor(stack[0]);
    run("fsdp_c::reshard", find("fsdp_c::reshard", op_int(stack[1])), reshard_now);
}

static void nothing_on_meta(StableIValue *stack, uint64_t num_inputs, uint64_t num_outputs) {
    OP_OWNED tensor = op_tensor(stack[0]);
}

/* ---- views: composed of ATen ops, so that autograd and tracing see through them ---- */

static StableIValue int_list(const int64_t *values, int64_t count) {
    StableListHandle list = NULL;
    OP_CALL(torch_abi.torch_new_list_reserve_size((size_t)count, &list));
    for (int64_t i = 0; i < count; i++)
        OP_CALL(torch_abi.torch_list_push_back(list, (StableIValue)values[i]));
    return (StableIValue)(uintptr_t)list;
}

static AtenTensorHandle narrow(AtenTensorHandle full, int64_t offset, int64_t numel) {
    AtenTensorHandle reference = NULL;
    OP_CALL(torch_abi.aoti_torch_new_tensor_handle(full, &reference));
    StableIValue slots[4] = {op_move(&reference), 0, (StableIValue)offset, (StableIValue)numel};
    OP_CALL(torch_abi.torch_call_dispatcher("aten::narrow", "", slots, TORCH_BUILD_VERSION));
    return op_tensor(slots[0]);
}

static AtenTensorHandle shaped(AtenTensorHandle part, const struct param_shape *shape) {
    StableIValue slots[4] = {(StableIValue)(uintptr_t)part, int_list(shape->sizes, shape->ndim), 0, 0};
    if (!shape->strides) {
        OP_CALL(torch_abi.torch_call_dispatcher("aten::view", "", slots, TORCH_BUILD_VERSION));
        return op_tensor(slots[0]);
    }
    slots[2] = int_list(shape->strides, shape->ndim);
    OP_CALL(torch_abi.torch_call_dispatcher("aten::as_strided", "", slots, TORCH_BUILD_VERSION));
    return op_tensor(slots[0]);
}

static void unshard_views(StableIValue *stack, uint64_t num_inputs, uint64_t num_outputs) {
    OP_OWNED full = op_tensor(stack[0]);
    const struct handle *handle = find("fsdp_c::unshard_views", op_int(stack[1]));
    StableListHandle views = NULL;
    OP_CALL(torch_abi.torch_new_list_reserve_size((size_t)handle->param.num_params, &views));
    for (int64_t i = 0; i < handle->param.num_params; i++) {
        AtenTensorHandle part = narrow(full, layout_param_offset(&handle->param.layout, i),
                                       layout_param_numel(&handle->param.layout, i));
        AtenTensorHandle view = shaped(part, &handle->param.param_shapes[i]);
        op_push(views, &view);
    }
    stack[0] = (StableIValue)(uintptr_t)views;
}

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
    const struct handle *handle = find("fsdp_c::segment_views", op_int(stack[1]));
    StableListHandle views = NULL;
    struct op_operand operand;
    int64_t start = 0;
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

static const char *const op_schemas[] = {
    "unshard(Tensor(a!) full, int handle) -> ()",
    "reshard(Tensor(a!) full, int handle) -> ()",
    "unshard_views(Tensor(a) full, int handle) -> Tensor(a)[]",
    "segment_views(Tensor(a) flat, int handle) -> Tensor(a)[]",
};

static const struct op_kernel op_kernels[] = {
    {"CPU", "unshard", unshard},
    {"CPU", "reshard", reshard},
    {"CPU", "segment_views", segment_views},
    {"CUDA", "unshard", unshard},
    {"CUDA", "reshard", reshard},
    {"CUDA", "segment_views", segment_views},
    {"Meta", "unshard", nothing_on_meta},
    {"Meta", "reshard", nothing_on_meta},
    {"Meta", "segment_views", segment_views},
    {"CompositeImplicitAutograd", "unshard_views", unshard_views},
};

static struct op_library library = {.schemas = op_schemas,
                                    .kernels = op_kernels,
                                    .num_schemas = sizeof op_schemas / sizeof *op_schemas,
                                    .num_kernels = sizeof op_kernels / sizeof *op_kernels};

int handle_ops_init(void) {
    return ops_register(&library);
}
