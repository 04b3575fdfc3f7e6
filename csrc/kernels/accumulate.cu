/* A reduced shard onto the one accumulated before, with the post-division and the upcast on the way. */
#include "kernels/cuda_elementwise.h"
#include "kernels/cuda_kernels.h"

/* The quotient in the input's dtype, then the cast, then the sum; each is rounded before the next. */
template <typename Out, typename In> struct accumulate_operation {
    static constexpr bool READS_OUTPUT = true;
    static constexpr bool READS_INPUT = true;
    division<In> divided;

    __device__ void begin() {
    }
    __device__ Out operator()(Out sum, In value) const {
        Out addend = converted<Out>(divided(value));
        return element<Out>::store(element<Out>::load(sum) + element<Out>::load(addend));
    }
};

extern "C" enum status cuda_accumulate(void *accumulator, enum dtype accumulator_dtype, const void *input,
                                       enum dtype input_dtype, int64_t numel, double divisor,
                                       const struct kernel_stream *stream) {
    if ((unsigned)accumulator_dtype >= DTYPE_COUNT || (unsigned)input_dtype >= DTYPE_COUNT)
        return STATUS_UNSUPPORTED;
    if (numel < 0)
        return STATUS_INVALID;
    device_guard guard(stream);
    if (guard.status != STATUS_OK)
        return guard.status;
    return with_types(accumulator_dtype, input_dtype, [&](auto out, auto in) {
        using Out = decltype(out);
        using In = decltype(in);
        struct segment_table table;
        table.count = 0;
        table_add(&table, accumulator, input, numel, 0);
        accumulate_operation<Out, In> operation = {division<In>(divisor)};
        return enqueue_elementwise<Out, In>(&table, operation, stream);
    });
}
