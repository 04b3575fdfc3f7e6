/* The ops of torch.ops.fsdp_c over plain tensors. Each has one body for CPU, CUDA and Meta: read, check, make the output, and,
 * but for Meta, run the kernel, on CUDA's current stream there. Ops that write in place do not bump the version counter: call them on detached tensors. */
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include "torch/ops.h"

#include <inttypes.h>

#include "base/pages.h"
#include "torch/kernel_library.h"
#include "torch/op_stack.h"
#include "torch/tensor.h"

/* Where a body runs, and the name its messages begin with. */
struct op_call {
    const char *name;
    bool is_meta;
    enum device_kind device;
    bool has_index; /* an operand was read, and said on which of these devices */
    int32_t device_index;
};

static const struct kernel_table *kernels(struct op_call *call) {
    const char *why = NULL;
    const struct kernel_table *table = kernels_of(call->device, &why);
    OP_CHECK(table, "%s: %s", call->name, why);
    return table;
}

static void check_status(struct op_call *call, enum status status) {
    OP_CHECK(status != STATUS_UNSUPPORTED, "%s: no kernel for these dtypes or this norm", call->name);
    OP_CHECK(status != STATUS_DEVICE, "%s: CUDA refused the launch: %s", call->name, kernels(call)->device_error());
    OP_CHECK(status == STATUS_OK, "%s: an argument is out of its domain", call->name);
}

/* Memory a kernel can read: on the op's one device (or Meta), and not freed. */
static void read_memory(struct op_call *call, struct op_operand *operand, AtenTensorHandle tensor,
                        const char *argument) {
    op_read_operand(operand, tensor);
    bool has_memory = operand->numel == 0 || operand->view.data;
    bool is_there = operand->view.device == call->device &&
                    (call->device == DEVICE_CPU || !call->has_index || operand->device_index == call->device_index);
    OP_CHECK(call->is_meta || is_there, "%s: %s must be on %s", call->name, argument,
             call->device == DEVICE_CPU ? "the CPU" : "the GPU that the other arguments are on");
    OP_CHECK(call->is_meta || has_memory, "%s: the storage of %s is freed", call->name, argument);
    call->has_index = true;
    call->device_index = operand->device_index;
}

/* The same of a known dtype. */
static void read_operand(struct op_call *call, struct op_operand *operand, AtenTensorHandle tensor,
                         const char *argument) {
    read_memory(call, operand, tensor, argument);
    OP_CHECK(operand->view.dtype != DTYPE_OTHER, "%s: %s must be float32, float64, bfloat16 or float16", call->name,
             argument);
}

static void read_contiguous(struct op_call *call, struct op_operand *operand, AtenTensorHandle tensor,
                            const char *argument) {
    read_operand(call, operand, tensor, argument);
    OP_CHECK(operand->is_contiguous, "%s: %s must be contiguous", call->name, argument);
}

static void read_flat(struct op_call *call, struct op_operand *operand, AtenTensorHandle tensor, const char *argument) {
    read_contiguous(call, operand, tensor, argument);
    OP_CHECK(operand->view.ndim == 1, "%s: %s must have one dimension, not %d", call->name, argument,
             (int)operand->view.ndim);
}

static int32_t read_dtype(struct op_call *call, StableIValue slot) {
    int32_t code = (int32_t)slot;
    OP_CHECK(op_dtype(code) != DTYPE_OTHER, "%s: dtype must be float32, float64, bfloat16 or float16", call->name);
    return code;
}

static double read_divisor(struct op_call *call, StableIValue slot) {
    double divisor = op_float(slot);
    OP_CHECK(divisor > 0, "%s: divisor must be positive, not %g", call->name, divisor);
    return divisor;
}

/* Pack sources into the output, one pass; nothing to do on Meta. */
static void run_pack(struct op_call *call, const struct op_operand *output, const struct pack_source *sources,
                     size_t count, double divisor) {
    if (!call->is_meta) {
        check_status(call, kernels(call)->pack(output->view.data, output->view.dtype, output->numel, sources,
                                               (int64_t)count, divisor, tensor_kernel_stream(&output->view)));
    }
}

static int64_t align_up(int64_t value, int64_t alignment) {
    int64_t over = alignment > 1 ? value % alignment : 0;
    return over ? value + alignment - over : value;
}

/* fsdp_c::flatten: every tensor begins at a multiple of aligned_numel; gaps and the rest up to padded_numel are zero. */
static void flatten(StableIValue *stack, struct op_call *call) {
    OP_OWNED_LIST tensors = op_list_of(stack[0], true);
    OP_OWNED_MEMORY struct pack_source *sources = NULL;
    OP_OWNED output = NULL;
    op_read_list(&tensors);
    int64_t aligned_numel = op_int(stack[1]);
    int64_t padded_numel = op_int(stack[2]);
    int32_t dtype = read_dtype(call, stack[3]);
    OP_CHECK(tensors.count > 0, "%s: tensors must not be empty", call->name);
    OP_CHECK(aligned_numel >= 0, "%s: aligned_numel must not be negative, not %" PRId64, call->name, aligned_numel);
    sources = op_alloc(tensors.count, sizeof *sources);
    int64_t end = 0;
    for (size_t i = 0; i < tensors.count; i++) {
        struct op_operand operand;
        read_operand(call, &operand, op_tensor(tensors.items[i]), "each of tensors");
        sources[i] =
            (struct pack_source){.view = operand.view, .numel = operand.numel, .offset = align_up(end, aligned_numel)};
        end = sources[i].offset + operand.numel;
    }
    OP_CHECK(padded_numel >= end, "%s: padded_numel is %" PRId64 ", but the tensors end at %" PRId64, call->name,
             padded_numel, end);
    struct op_operand like = {0};
    op_read_operand(&like, op_tensor(tensors.items[0]));
    output = op_empty(1, &padded_numel, dtype, &like);
    struct op_operand flat;
    op_read_operand(&flat, output);
    run_pack(call, &flat, sources, tensors.count, 1.0);
    stack[0] = op_give(&output);
}

/* Copy numel elements of a flat tensor into a new one. */
static AtenTensorHandle copy_part(struct op_call *call, const struct op_operand *flat, int64_t offset, int64_t numel) {
    AtenTensorHandle part = op_empty(1, &numel, flat->dtype_code, flat);
    if (!call->is_meta) {
        struct op_operand output;
        op_read_operand(&output, part);
        struct copy_range range = {flat->view.data, offset, 0, numel};
        check_status(call, kernels(call)->copy_ranges(output.view.data, flat->view.dtype, &range, 1,
                                                      tensor_kernel_stream(&flat->view)));
    }
    return part;
}

static void check_segment(struct op_call *call, int64_t offset, int64_t numel, int64_t total, const char *what) {
    OP_CHECK(offset >= 0 && numel >= 0 && offset <= total && numel <= total - offset,
             "%s: elements [%" PRId64 ", %" PRId64 ") lie outside of %s, which has %" PRId64, call->name, offset,
             offset + numel, what, total);
}

/* fsdp_c::unflatten: a copy of each segment, in one dimension. */
static void unflatten(StableIValue *stack, struct op_call *call) {
    OP_OWNED tensor = op_tensor(stack[0]);
    OP_OWNED_LIST offsets = op_list_of(stack[1], false);
    OP_OWNED_LIST numels = op_list_of(stack[2], false);
    OP_OWNED_LIST result = {.of_tensors = true}; /* until it is given away */
    op_read_list(&offsets);
    op_read_list(&numels);
    struct op_operand flat;
    read_flat(call, &flat, tensor, "flat");
    OP_CHECK(offsets.count == numels.count, "%s: %zu offsets, but %zu numels", call->name, offsets.count, numels.count);
    for (size_t i = 0; i < offsets.count; i++) {
        check_segment(call, op_int(offsets.items[i]), op_int(numels.items[i]), flat.numel, "flat");
    }
    OP_CALL(torch_abi.torch_new_list_reserve_size(offsets.count, &result.list));
    for (size_t i = 0; i < offsets.count; i++) {
        AtenTensorHandle part = copy_part(call, &flat, op_int(offsets.items[i]), op_int(numels.items[i]));
        op_push(result.list, &part);
    }
    stack[0] = (StableIValue)(uintptr_t)result.list;
    result.list = NULL;
}

/* fsdp_c::shard: this rank's chunk in another dtype, zero-padded on the right to the size of rank 0's. */
static void shard(StableIValue *stack, struct op_call *call) {
    OP_OWNED tensor = op_tensor(stack[0]);
    OP_OWNED output = NULL;
    int64_t rank = op_int(stack[1]);
    int64_t world_size = op_int(stack[2]);
    int32_t dtype = read_dtype(call, stack[3]);
    struct op_operand flat;
    read_flat(call, &flat, tensor, "flat");
    OP_CHECK(world_size > 0, "%s: world_size must be positive, not %" PRId64, call->name, world_size);
    OP_CHECK(rank >= 0 && rank < world_size, "%s: rank %" PRId64 " is outside of a world of %" PRId64, call->name, rank,
             world_size);
    int64_t shard_numel = (flat.numel + world_size - 1) / world_size;
    int64_t start = shard_numel * rank < flat.numel ? shard_numel * rank : flat.numel;
    int64_t valid_numel = flat.numel - start < shard_numel ? flat.numel - start : shard_numel;
    output = op_empty(1, &shard_numel, dtype, &flat);
    struct op_operand chunk;
    op_read_operand(&chunk, output);
    struct pack_source source = {.view = flat.view, .numel = valid_numel};
    source.view.sizes = &valid_numel;
    if (!call->is_meta && flat.view.data) {
        source.view.data = (char *)flat.view.data + start * dtype_nbytes(flat.view.dtype);
    }
    run_pack(call, &chunk, &source, 1, 1.0);
    stack[0] = op_give(&output);
}

/* fsdp_c::pack_gradients: cast, divide and flatten in one pass; what no gradient covers is zeroed. */
static void pack_gradients(StableIValue *stack, struct op_call *call) {
    OP_OWNED tensor = op_tensor(stack[0]);
    OP_OWNED_LIST grads = op_list_of(stack[1], true);
    OP_OWNED_LIST offsets = op_list_of(stack[2], false);
    OP_OWNED_MEMORY struct pack_source *sources = NULL;
    op_read_list(&grads);
    op_read_list(&offsets);
    double divisor = read_divisor(call, stack[3]);
    struct op_operand out;
    read_flat(call, &out, tensor, "out");
    OP_CHECK(grads.count == offsets.count, "%s: %zu grads, but %zu offsets", call->name, grads.count, offsets.count);
    sources = op_alloc(grads.count, sizeof *sources);
    int64_t end = 0;
    for (size_t i = 0; i < grads.count; i++) {
        struct op_operand grad;
        read_operand(call, &grad, op_tensor(grads.items[i]), "each of grads");
        int64_t offset = op_int(offsets.items[i]);
        OP_CHECK(offset >= end, "%s: grad %zu begins at %" PRId64 ", before the end of the one before, %" PRId64,
                 call->name, i, offset, end);
        check_segment(call, offset, grad.numel, out.numel, "out");
        sources[i] = (struct pack_source){.view = grad.view, .numel = grad.numel, .offset = offset};
        end = offset + grad.numel;
    }
    run_pack(call, &out, sources, grads.count, divisor);
}

/* fsdp_c::cast_divide: the same shape, contiguous, in another dtype and divided. */
static void cast_divide(StableIValue *stack, struct op_call *call) {
    OP_OWNED tensor = op_tensor(stack[0]);
    OP_OWNED output = NULL;
    double divisor = read_divisor(call, stack[1]);
    int32_t dtype = read_dtype(call, stack[2]);
    struct op_operand input;
    read_operand(call, &input, tensor, "input");
    output = op_empty(input.view.ndim, input.view.sizes, dtype, &input);
    struct op_operand result;
    op_read_operand(&result, output);
    struct pack_source source = {.view = input.view, .numel = input.numel};
    run_pack(call, &result, &source, 1, divisor);
    stack[0] = op_give(&output);
}

/* fsdp_c::accumulate_shard: accumulator += shard / divisor, rounded in the shard's dtype first. */
static void accumulate_shard(StableIValue *stack, struct op_call *call) {
    OP_OWNED target = op_tensor(stack[0]);
    OP_OWNED addend = op_tensor(stack[1]);
    double divisor = read_divisor(call, stack[2]);
    struct op_operand accumulator;
    read_contiguous(call, &accumulator, target, "accumulator");
    struct op_operand input;
    read_contiguous(call, &input, addend, "shard");
    OP_CHECK(accumulator.numel == input.numel, "%s: accumulator has %" PRId64 " elements, shard %" PRId64, call->name,
             accumulator.numel, input.numel);
    if (!call->is_meta) {
        check_status(call, kernels(call)->accumulate(accumulator.view.data, accumulator.view.dtype, input.view.data,
                                                     input.view.dtype, input.numel, divisor,
                                                     tensor_kernel_stream(&input.view)));
    }
}

/* Byte ranges of tensors: three numbers each, (source, start, nbytes). */
struct byte_ranges {
    const struct op_list *numbers;
    const struct op_operand *sources;
    size_t num_sources;
};

static void check_range(struct op_call *call, const struct byte_ranges *ranges, size_t index) {
    const int64_t source = op_int(ranges->numbers->items[3 * index]);
    OP_CHECK(source >= 0 && (size_t)source < ranges->num_sources, "%s: range %zu is of source %" PRId64 " of %zu",
             call->name, index, source, ranges->num_sources);
    const struct op_operand *operand = &ranges->sources[source];
    const int64_t element_nbytes = (int64_t)torch_abi.aoti_torch_dtype_element_size(operand->dtype_code);
    check_segment(call, op_int(ranges->numbers->items[3 * index + 1]), op_int(ranges->numbers->items[3 * index + 2]),
                  operand->numel * element_nbytes, "its source in bytes");
}

/* Copy `count` ranges from the `first` on, one behind the other. */
static void copy_bytes(char *output, const struct byte_ranges *ranges, size_t first, size_t count) {
    for (size_t i = first; i < first + count; i++) {
        const char *source = ranges->sources[op_int(ranges->numbers->items[3 * i])].view.data;
        const int64_t nbytes = op_int(ranges->numbers->items[3 * i + 2]);
        if (nbytes > 0) {
            memcpy(output, source + op_int(ranges->numbers->items[3 * i + 1]), (size_t)nbytes);
            output += nbytes;
        }
    }
}

/* A tensor of these sizes for `count` ranges from the `first` on. */
static AtenTensorHandle new_joined(struct op_call *call, const struct op_list *numbers, size_t first, size_t count,
                                   const int64_t *sizes, int64_t ndim, AtenTensorHandle like) {
    struct op_operand model;
    op_read_operand(&model, like);
    int64_t nbytes = (int64_t)torch_abi.aoti_torch_dtype_element_size(model.dtype_code);
    for (int64_t dim = 0; dim < ndim; dim++) {
        OP_CHECK(sizes[dim] >= 0 && (sizes[dim] == 0 || nbytes <= INT64_MAX / sizes[dim]), "%s: sizes out of range",
                 call->name);
        nbytes *= sizes[dim];
    }
    int64_t given = 0;
    for (size_t i = first; i < first + count; i++) {
        given += op_int(numbers->items[3 * i + 2]);
    }
    OP_CHECK(given == nbytes, "%s: ranges of %" PRId64 " bytes for a tensor of %" PRId64, call->name, given, nbytes);
    return op_empty(ndim, sizes, model.dtype_code, &model);
}

/* What the lists of fsdp_c::join_ranges say, checked: nothing reads beyond them afterwards. */
static void check_join(struct op_call *call, const struct op_list *counts, const struct op_list *likes,
                       const struct op_list *ndims, size_t num_sizes, size_t num_ranges) {
    OP_CHECK(counts->count == likes->count && ndims->count == likes->count,
             "%s: %zu counts, %zu ndims, but %zu tensors to be like", call->name, counts->count, ndims->count,
             likes->count);
    int64_t ranges = 0, sizes = 0;
    for (size_t i = 0; i < counts->count; i++) {
        const int64_t count = op_int(counts->items[i]), ndim = op_int(ndims->items[i]);
        OP_CHECK(count >= 0 && count <= (int64_t)num_ranges - ranges, "%s: more ranges counted than given", call->name);
        OP_CHECK(ndim >= 0 && ndim <= OP_MAX_NDIM && ndim <= (int64_t)num_sizes - sizes,
                 "%s: more dimensions counted than sizes given", call->name);
        ranges += count;
        sizes += ndim;
    }
    OP_CHECK(ranges == (int64_t)num_ranges && sizes == (int64_t)num_sizes, "%s: ranges or sizes are left over",
             call->name);
}

/* fsdp_c::join_ranges: new tensors, each of byte ranges of the sources one behind the other. */
static void join_ranges(StableIValue *stack, struct op_call *call) {
    OP_OWNED_LIST sources = op_list_of(stack[0], true);
    OP_OWNED_LIST numbers = op_list_of(stack[1], false);
    OP_OWNED_LIST counts = op_list_of(stack[2], false);
    OP_OWNED_LIST likes = op_list_of(stack[3], true);
    OP_OWNED_LIST ndims = op_list_of(stack[4], false);
    OP_OWNED_LIST sizes = op_list_of(stack[5], false);
    OP_OWNED_MEMORY struct op_operand *operands = NULL;
    OP_OWNED_LIST result = {.of_tensors = true}; /* until it is given away */
    op_read_list(&sources);
    op_read_list(&numbers);
    op_read_list(&counts);
    op_read_list(&likes);
    op_read_list(&ndims);
    op_read_list(&sizes);
    OP_CHECK(numbers.count % 3 == 0, "%s: a range is three numbers, but there are %zu", call->name, numbers.count);
    check_join(call, &counts, &likes, &ndims, sizes.count, numbers.count / 3);
    operands = op_alloc(sources.count, sizeof *operands);
    for (size_t i = 0; i < sources.count; i++) {
        op_read_operand(&operands[i], op_tensor(sources.items[i]));
        OP_CHECK(operands[i].is_contiguous, "%s: each of sources must be contiguous", call->name);
        OP_CHECK(call->is_meta || operands[i].view.device == DEVICE_CPU, "%s: each of sources must be on the CPU",
                 call->name);
    }
    const struct byte_ranges ranges = {&numbers, operands, sources.count};
    for (size_t i = 0; i < numbers.count / 3; i++) {
        check_range(call, &ranges, i);
    }
    OP_CALL(torch_abi.torch_new_list_reserve_size(likes.count, &result.list));
    size_t first = 0, dim = 0;
    for (size_t i = 0; i < likes.count; i++) {
        const size_t count = (size_t)op_int(counts.items[i]);
        OP_OWNED joined = new_joined(call, &numbers, first, count, (const int64_t *)sizes.items + dim,
                                     op_int(ndims.items[i]), op_tensor(likes.items[i]));
        if (!call->is_meta) {
            struct op_operand output;
            op_read_operand(&output, joined);
            pages_prefer_large(output.view.data,
                               (size_t)output.numel * torch_abi.aoti_torch_dtype_element_size(output.dtype_code));
            copy_bytes(output.view.data, &ranges, first, count);
        }
        op_push(result.list, &joined);
        first += count;
        dim += (size_t)op_int(ndims.items[i]);
    }
    stack[0] = (StableIValue)(uintptr_t)result.list;
    result.list = NULL;
}

/* Views and sizes of contiguous tensors, in two arrays that the caller owns. */
static void read_all(struct op_call *call, const struct op_list *list, struct tensor_view *views, int64_t *numels) {
    for (size_t i = 0; i < list->count; i++) {
        struct op_operand operand;
        read_contiguous(call, &operand, op_tensor(list->items[i]), "each of tensors");
        views[i] = operand.view;
        numels[i] = operand.numel;
    }
}

/* fsdp_c::norms: one p-norm per tensor, in float64 for float64 tensors and in float32 for all others. */
static void norms(StableIValue *stack, struct op_call *call) {
    OP_OWNED_LIST tensors = op_list_of(stack[0], true);
    OP_OWNED_MEMORY struct tensor_view *views = NULL;
    OP_OWNED_MEMORY int64_t *numels = NULL;
    OP_OWNED output = NULL;
    op_read_list(&tensors);
    double p = op_float(stack[1]);
    OP_CHECK(tensors.count > 0, "%s: tensors must not be empty", call->name);
    views = op_alloc(tensors.count, sizeof *views);
    numels = op_alloc(tensors.count, sizeof *numels);
    read_all(call, &tensors, views, numels);
    for (size_t i = 1; i < tensors.count; i++) {
        OP_CHECK((views[i].dtype == DTYPE_FLOAT64) == (views[0].dtype == DTYPE_FLOAT64),
                 "%s: float64 tensors cannot be mixed with others", call->name);
    }
    struct op_operand like = {0};
    op_read_operand(&like, op_tensor(tensors.items[0]));
    int64_t count = (int64_t)tensors.count;
    bool is_double = views[0].dtype == DTYPE_FLOAT64;
    output = op_empty(1, &count,
                      is_double ? torch_abi.aoti_torch_dtype_float64() : torch_abi.aoti_torch_dtype_float32(), &like);
    if (!call->is_meta) {
        struct op_operand result;
        op_read_operand(&result, output);
        OP_OWNED scratch = NULL;
        void *memory = NULL;
        int64_t nbytes = kernels(call)->norms_scratch_nbytes(numels, count);
        if (nbytes) {
            int64_t scratch_numel = (nbytes + (int64_t)sizeof(double) - 1) / (int64_t)sizeof(double);
            scratch = op_empty(1, &scratch_numel, torch_abi.aoti_torch_dtype_float64(), &like);
            OP_CALL(torch_abi.aoti_torch_get_data_ptr(scratch, &memory));
        }
        check_status(call, kernels(call)->norms(result.view.data, views, numels, count, p, memory,
                                                tensor_kernel_stream(&result.view)));
    }
    stack[0] = op_give(&output);
}

/* fsdp_c::clip_: every tensor times one number, which the kernel reads: nobody waits for it. */
static void clip(StableIValue *stack, struct op_call *call) {
    OP_OWNED_LIST tensors = op_list_of(stack[0], true);
    OP_OWNED scalar = op_tensor(stack[1]);
    OP_OWNED_MEMORY struct tensor_view *views = NULL;
    OP_OWNED_MEMORY int64_t *numels = NULL;
    op_read_list(&tensors);
    struct op_operand factor;
    read_operand(call, &factor, scalar, "coefficient");
    OP_CHECK(factor.numel == 1, "%s: coefficient must have one element, not %" PRId64, call->name, factor.numel);
    views = op_alloc(tensors.count, sizeof *views);
    numels = op_alloc(tensors.count, sizeof *numels);
    read_all(call, &tensors, views, numels);
    if (!call->is_meta) {
        const struct kernel_stream *stream = tensor_kernel_stream(&factor.view);
        check_status(call, kernels(call)->scale(views, numels, (int64_t)tensors.count, factor.view.data,
                                                factor.view.dtype, stream));
    }
}

/* One fp32 number that a kernel reads or writes. */
static float *read_number(struct op_call *call, struct op_operand *operand, AtenTensorHandle tensor,
                          const char *argument) {
    read_operand(call, operand, tensor, argument);
    OP_CHECK(operand->view.dtype == DTYPE_FLOAT32 && operand->numel == 1, "%s: %s must be one float32", call->name,
             argument);
    return operand->view.data;
}

/* fsdp_c::unscale_: every tensor times one number, and 1 into found_inf if an element was inf or NaN. */
static void unscale(StableIValue *stack, struct op_call *call) {
    OP_OWNED_LIST tensors = op_list_of(stack[0], true);
    OP_OWNED found = op_tensor(stack[1]);
    OP_OWNED inverse = op_tensor(stack[2]);
    OP_OWNED_MEMORY struct tensor_view *views = NULL;
    OP_OWNED_MEMORY int64_t *numels = NULL;
    op_read_list(&tensors);
    struct op_operand found_inf;
    struct op_operand inverse_scale;
    float *found_number = read_number(call, &found_inf, found, "found_inf");
    const float *factor = read_number(call, &inverse_scale, inverse, "inverse_scale");
    views = op_alloc(tensors.count, sizeof *views);
    numels = op_alloc(tensors.count, sizeof *numels);
    read_all(call, &tensors, views, numels);
    if (!call->is_meta) {
        check_status(call, kernels(call)->unscale(views, numels, (int64_t)tensors.count, factor, found_number,
                                                  tensor_kernel_stream(&found_inf.view)));
    }
}

/* Bytes of a contiguous tensor of any dtype. */
static struct byte_range read_bytes(struct op_call *call, struct op_operand *operand, AtenTensorHandle tensor) {
    read_memory(call, operand, tensor, "each of tensors");
    OP_CHECK(operand->is_contiguous, "%s: each of tensors must be contiguous", call->name);
    int64_t element_nbytes = (int64_t)torch_abi.aoti_torch_dtype_element_size(operand->dtype_code);
    return (struct byte_range){operand->view.data, operand->numel * element_nbytes};
}

/* fsdp_c::checksums: 64 bits over the memory of each tensor, as int64 on its device, and the same on any. */
static void checksums(StableIValue *stack, struct op_call *call) {
    OP_OWNED_LIST tensors = op_list_of(stack[0], true);
    OP_OWNED_MEMORY struct byte_range *ranges = NULL;
    OP_OWNED output = NULL;
    struct op_operand operand = {0};
    op_read_list(&tensors);
    OP_CHECK(tensors.count > 0, "%s: tensors must not be empty", call->name);
    ranges = op_alloc(tensors.count, sizeof *ranges);
    for (size_t i = 0; i < tensors.count; i++) {
        ranges[i] = read_bytes(call, &operand, op_tensor(tensors.items[i]));
    }
    int64_t count = (int64_t)tensors.count;
    output = op_empty(1, &count, torch_abi.aoti_torch_dtype_int64(), &operand);
    if (!call->is_meta) {
        struct op_operand result;
        op_read_operand(&result, output);
        check_status(call,
                     kernels(call)->checksums(result.view.data, ranges, count, tensor_kernel_stream(&operand.view)));
    }
    stack[0] = op_give(&output);
}

/* Contiguous operands of a step, one per parameter and of its size. */
static void read_adam_operands(struct op_call *call, const struct op_list *list, enum adam_operand operand,
                               struct adam_tensor *tensors, size_t count, const char *argument) {
    OP_CHECK(list->count == count, "%s: %zu params, but %zu %s", call->name, count, list->count, argument);
    for (size_t i = 0; i < count; i++) {
        struct op_operand read;
        read_contiguous(call, &read, op_tensor(list->items[i]), argument);
        if (operand == ADAM_PARAM) {
            tensors[i].numel = read.numel;
        }
        OP_CHECK(read.numel == tensors[i].numel, "%s: params[%zu] has %" PRId64 " elements, %s[%zu] %" PRId64,
                 call->name, i, tensors[i].numel, argument, i, read.numel);
        tensors[i].operands[operand] = read.view;
    }
}

/* The steps taken so far, one float32 per parameter; the kernel counts them up. */
static void read_steps(struct op_call *call, const struct op_list *list, struct adam_tensor *tensors, size_t count) {
    OP_CHECK(list->count == count, "%s: %zu params, but %zu steps", call->name, count, list->count);
    for (size_t i = 0; i < count; i++) {
        struct op_operand read;
        tensors[i].step = read_number(call, &read, op_tensor(list->items[i]), "each of steps");
    }
}

/* A learning rate in memory of the parameters' device, or none. */
static void read_lr(struct op_call *call, const struct op_list *list, struct adamw_options *options) {
    OP_CHECK(list->count <= 1, "%s: %zu learning rates", call->name, list->count);
    if (list->count == 1) {
        struct op_operand read;
        read_operand(call, &read, op_tensor(list->items[0]), "lr");
        OP_CHECK(read.numel == 1, "%s: lr must have one element, not %" PRId64, call->name, read.numel);
        options->lr_memory = read.view.data;
        options->lr_dtype = read.view.dtype;
    }
}

/* fsdp_c::adamw_: a step of AdamW over every parameter that has elements; max_exp_avg_sqs is empty without amsgrad, lr_tensors
 * where the learning rate is the number `lr`. */
static void adamw(StableIValue *stack, struct op_call *call) {
    static const char *const names[] = {"params", "grads", "exp_avgs", "exp_avg_sqs", "max_exp_avg_sqs"};
    enum { NUM_LISTS = sizeof names / sizeof names[0] };
    OP_OWNED_LIST params = op_list_of(stack[0], true);
    OP_OWNED_LIST grads = op_list_of(stack[1], true);
    OP_OWNED_LIST exp_avgs = op_list_of(stack[2], true);
    OP_OWNED_LIST exp_avg_sqs = op_list_of(stack[3], true);
    OP_OWNED_LIST max_exp_avg_sqs = op_list_of(stack[4], true);
    OP_OWNED_LIST step_list = op_list_of(stack[NUM_LISTS], true);
    OP_OWNED_LIST lr_list = op_list_of(stack[NUM_LISTS + 1], true);
    OP_OWNED_MEMORY struct adam_tensor *tensors = NULL;
    struct op_list *const lists[NUM_LISTS] = {&params, &grads, &exp_avgs, &exp_avg_sqs, &max_exp_avg_sqs};
    op_read_list(&params);
    op_read_list(&grads);
    op_read_list(&exp_avgs);
    op_read_list(&exp_avg_sqs);
    op_read_list(&max_exp_avg_sqs);
    op_read_list(&step_list);
    op_read_list(&lr_list);
    const StableIValue *numbers = stack + NUM_LISTS + 2;
    struct adamw_options options = {
        .lr = op_float(numbers[0]),
        .beta1 = op_float(numbers[1]),
        .beta2 = op_float(numbers[2]),
        .eps = op_float(numbers[3]),
        .weight_decay = op_float(numbers[4]),
        .maximize = op_bool(numbers[5]),
    };
    tensors = op_alloc(params.count, sizeof *tensors);
    for (int i = 0; i < NUM_LISTS; i++) {
        if (i != ADAM_MAX_EXP_AVG_SQ || lists[i]->count > 0) {
            read_adam_operands(call, lists[i], (enum adam_operand)i, tensors, params.count, names[i]);
        }
    }
    read_steps(call, &step_list, tensors, params.count);
    read_lr(call, &lr_list, &options);
    if (!call->is_meta && params.count > 0) {
        check_status(call, kernels(call)->adamw(tensors, (int64_t)params.count, &options,
                                                tensor_kernel_stream(&tensors[0].operands[ADAM_PARAM])));
    }
}

/* clang-format off */
#define EACH_OP(X)                                                                                             \
    X(flatten, flatten, "(Tensor[] tensors, int aligned_numel, int padded_numel, ScalarType dtype) -> Tensor") \
    X(unflatten, unflatten, "(Tensor flat, int[] offsets, int[] numels) -> Tensor[]")                          \
    X(shard, shard, "(Tensor flat, int rank, int world_size, ScalarType dtype) -> Tensor")                     \
    X(pack_gradients, pack_gradients, "(Tensor(a!) out, Tensor[] grads, int[] offsets, float divisor) -> ()")  \
    X(cast_divide, cast_divide, "(Tensor input, float divisor, ScalarType dtype) -> Tensor")                   \
    X(accumulate_shard, accumulate_shard, "(Tensor(a!) accumulator, Tensor shard, float divisor) -> ()")       \
    X(join_ranges, join_ranges,                                                                                \
      "(Tensor[] sources, int[] ranges, int[] counts, Tensor[] likes, int[] ndims, int[] sizes) -> Tensor[]")   \
    X(norms, norms, "(Tensor[] tensors, float p) -> Tensor")                                                   \
    X(clip_, clip, "(Tensor(a!)[] tensors, Tensor coefficient) -> ()")                                         \
    X(unscale_, unscale, "(Tensor(a!)[] tensors, Tensor(b!) found_inf, Tensor inverse_scale) -> ()")           \
    X(checksums, checksums, "(Tensor[] tensors) -> Tensor")                                                    \
    X(adamw_, adamw,                                                                                           \
      "(Tensor(a!)[] params, Tensor[] grads, Tensor(b!)[] exp_avgs, Tensor(c!)[] exp_avg_sqs, "                \
      "Tensor(d!)[] max_exp_avg_sqs, Tensor(e!)[] steps, Tensor[] lr_tensors, float lr, float beta1, "         \
      "float beta2, float eps, float weight_decay, bool maximize) -> ()")
/* clang-format on */

#define DEFINE_BOXED(name, body, schema)                                                                               \
    static void name##_on_cpu(StableIValue *stack, uint64_t num_inputs, uint64_t num_outputs) {                        \
        (void)num_inputs;                                                                                              \
        (void)num_outputs;                                                                                             \
        body(stack, &(struct op_call){"fsdp_c::" #name, false, DEVICE_CPU, false, 0});                                 \
    }                                                                                                                  \
    static void name##_on_cuda(StableIValue *stack, uint64_t num_inputs, uint64_t num_outputs) {                       \
        (void)num_inputs;                                                                                              \
        (void)num_outputs;                                                                                             \
        body(stack, &(struct op_call){"fsdp_c::" #name, false, DEVICE_CUDA, false, 0});                                \
    }                                                                                                                  \
    static void name##_on_meta(StableIValue *stack, uint64_t num_inputs, uint64_t num_outputs) {                       \
        (void)num_inputs;                                                                                              \
        (void)num_outputs;                                                                                             \
        body(stack, &(struct op_call){"fsdp_c::" #name, true, DEVICE_CPU, false, 0});                                  \
    }
EACH_OP(DEFINE_BOXED)

struct op_entry {
    const char *name;
    const char *schema;
    boxed_kernel cpu;
    boxed_kernel cuda;
    boxed_kernel meta;
};

#define OP_ENTRY(name, body, schema) {#name, #name schema, name##_on_cpu, name##_on_cuda, name##_on_meta},
static const struct op_entry entries[] = {EACH_OP(OP_ENTRY)};
enum { ENTRY_COUNT = sizeof entries / sizeof entries[0] };

/* join_ranges copies with the host's memcpy; on CUDA torch says that there is none. */
static bool is_on_cuda(const char *name) {
    return strcmp(name, "join_ranges") != 0;
}

/* Libraries live for ever: what they registered would go with them. */
static bool register_all(void) {
    TorchLibraryHandle schemas = NULL;
    TorchLibraryHandle cpu = NULL;
    TorchLibraryHandle cuda = NULL;
    TorchLibraryHandle meta = NULL;
    bool failed = torch_abi.aoti_torch_library_init_fragment("fsdp_c", "fsdp_c", 0, &schemas) != 0 ||
                  torch_abi.aoti_torch_library_init_impl("fsdp_c", "CPU", "fsdp_c", 0, &cpu) != 0 ||
                  torch_abi.aoti_torch_library_init_impl("fsdp_c", "CUDA", "fsdp_c", 0, &cuda) != 0 ||
                  torch_abi.aoti_torch_library_init_impl("fsdp_c", "Meta", "fsdp_c", 0, &meta) != 0;
    for (int i = 0; !failed && i < ENTRY_COUNT; i++) {
        failed = torch_abi.aoti_torch_library_def(schemas, entries[i].schema) != 0 ||
                 torch_abi.torch_library_impl(cpu, entries[i].name, entries[i].cpu, TORCH_BUILD_VERSION) != 0 ||
                 (is_on_cuda(entries[i].name) &&
                  torch_abi.torch_library_impl(cuda, entries[i].name, entries[i].cuda, TORCH_BUILD_VERSION) != 0) ||
                 torch_abi.torch_library_impl(meta, entries[i].name, entries[i].meta, TORCH_BUILD_VERSION) != 0;
    }
    return !failed;
}

int ops_init(void) {
    static bool registered = false;
    if (!registered && !register_all()) {
        PyErr_Format(PyExc_ImportError, "fsdp_c cannot register its operators: %s",
                     op_error_text("torch refused them"));
        return -1;
    }
    registered = true;
    return 0;
}
