/* Views of a flat parameter, made by one custom op, as a call of torch per view would cost more:
 *
 *   fsdp_c::segment_views(Tensor(a) flat) -> Tensor(a)[]   one alias per parameter, below autograd
 *
 * The op runs inside flat_param_views(), on the same thread, and without the GIL. */
#include "handle/flat_param.h"

#include "torch/op_stack.h"
#include "torch/ops.h"
#include "torch/ref.h"
#include "torch/tensor.h"

static _Thread_local const struct flat_param *viewed; /* flat parameter of the call in progress, or NULL */

/* Each alias has a version counter of its own, and no autograd metadata. */
static void segment_views(StableIValue *stack, uint64_t num_inputs, uint64_t num_outputs) {
    enum { MAX_NDIM = 64 };
    OP_OWNED flat = op_tensor(stack[0]);
    const struct flat_param *param = viewed;
    StableListHandle views = NULL;
    int64_t start = 0;
    OP_CHECK(param, "fsdp_c::segment_views is internal: use torch.split() and Tensor.view()");
    OP_CALL(torch_abi.aoti_torch_get_storage_offset(flat, &start));
    OP_CALL(torch_abi.torch_new_list_reserve_size((size_t)param->num_params, &views));
    for (int64_t i = 0; i < param->num_params; i++) {
        const struct param_shape *shape = &param->param_shapes[i];
        int64_t contiguous[MAX_NDIM], step = 1;
        AtenTensorHandle view = NULL;
        OP_CHECK(shape->ndim <= MAX_NDIM, "a parameter has %lld dimensions", (long long)shape->ndim);
        for (int64_t dim = shape->ndim - 1; dim >= 0; dim--) {
            contiguous[dim] = step;
            step *= shape->sizes[dim] > 0 ? shape->sizes[dim] : 1;
        }
        OP_CALL(torch_abi.aoti_torch__reinterpret_tensor(
            flat, shape->ndim, shape->sizes, shape->strides ? shape->strides : contiguous,
            start + layout_param_offset(&param->layout, i), &view));
        op_push(views, &view);
    }
    stack[0] = (StableIValue)(uintptr_t)views;
}

int flat_param_views_init(void) {
    static struct op ops[] = {
        {"segment_views", "(Tensor(a) flat) -> Tensor(a)[]", segment_views, OP_ON_CPU_AND_CUDA, false}};
    return ops_register(ops, sizeof ops / sizeof *ops);
}

PyObject *flat_param_views(const struct flat_param *param, PyObject *full) {
    /* owned, immortal; the operator overload, called directly to skip the Python of torch.ops */
    static PyObject *op;
    if (!op && !(op = ref_find("torch._ops", "ops.fsdp_c.segment_views.default._op")))
        return NULL;
    const struct flat_param *outer = viewed; /* a dispatch mode may call back */
    viewed = param;
    OWNED *list = PyObject_CallFunctionObjArgs(op, full, NULL);
    viewed = outer;
    return list ? PyList_AsTuple(list) : NULL;
}
