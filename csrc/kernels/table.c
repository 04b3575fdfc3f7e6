/* The tables of the CPU kernels, and of kernels for tensors without memory. */
#include "kernels/table.h"

#include <stddef.h>

static const char *device_error(void) {
    return "no device";
}

const struct kernel_table cpu_kernels = {
    .version = KERNEL_TABLE_VERSION,
    .pack = kernel_pack,
    .pack_add = kernel_pack_add,
    .cast_divide = kernel_cast_divide,
    .accumulate = kernel_accumulate,
    .device_error = device_error,
};

static enum status no_pack(void *output, enum dtype output_dtype, int64_t output_numel,
                           const struct pack_source *sources, int64_t num_sources, double divisor,
                           const struct kernel_stream *stream) {
    (void)output, (void)output_dtype, (void)output_numel, (void)sources, (void)num_sources, (void)divisor,
        (void)stream;
    return STATUS_OK;
}

static enum status no_pack_add(void *output, enum dtype output_dtype, const struct pack_source *sources,
                               int64_t num_sources, const struct kernel_stream *stream) {
    (void)output, (void)output_dtype, (void)sources, (void)num_sources, (void)stream;
    return STATUS_OK;
}

static enum status no_cast_divide(void *output, enum dtype output_dtype, const void *input,
                                  enum dtype input_dtype, int64_t numel, double divisor,
                                  const struct kernel_stream *stream) {
    (void)output, (void)output_dtype, (void)input, (void)input_dtype, (void)numel, (void)divisor,
        (void)stream;
    return STATUS_OK;
}

const struct kernel_table no_kernels = {
    .version = KERNEL_TABLE_VERSION,
    .pack = no_pack,
    .pack_add = no_pack_add,
    .cast_divide = no_cast_divide,
    .accumulate = no_cast_divide,
    .device_error = device_error,
};
