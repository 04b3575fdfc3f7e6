/* The table of the CPU's kernels. */
#include "kernels/table.h"

static enum status norms(void *output, const struct tensor_view *tensors, const int64_t *numels, int64_t num_tensors,
                         double p, void *scratch, const struct kernel_stream *stream) {
    (void)scratch;
    return kernel_norms(output, tensors, numels, num_tensors, p, stream);
}

static int64_t norms_scratch_nbytes(const int64_t *numels, int64_t num_tensors) {
    (void)numels;
    (void)num_tensors;
    return 0;
}

static enum status scale(const struct tensor_view *tensors, const int64_t *numels, int64_t num_tensors,
                         const void *coefficient, enum dtype coefficient_dtype, const struct kernel_stream *stream) {
    double value = 1.0;
    enum status status = kernel_cast_divide(&value, DTYPE_FLOAT64, coefficient, coefficient_dtype, 1, 1.0, stream);
    return status == STATUS_OK ? kernel_scale(tensors, numels, num_tensors, value, stream) : status;
}

static const char *device_error(void) {
    return "no device";
}

const struct kernel_table cpu_kernels = {
    .version = KERNEL_TABLE_VERSION,
    .pack = kernel_pack,
    .pack_add = kernel_pack_add,
    .cast_divide = kernel_cast_divide,
    .accumulate = kernel_accumulate,
    .copy_ranges = kernel_copy_ranges,
    .fill = kernel_fill,
    .norms = norms,
    .norms_scratch_nbytes = norms_scratch_nbytes,
    .scale = scale,
    .device_error = device_error,
};
