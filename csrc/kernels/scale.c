/* kernel_scale: gradient clipping's multiplication of many contiguous tensors by one coefficient. */
#include "kernels/blocks.h"

struct scale_context {
    char *tensor;
    enum dtype dtype;
    double coefficient;
};

static void scale_range(int64_t begin, int64_t end, void *context) {
    const struct scale_context *scale = context;
    scale_block(scale->tensor + begin * dtype_nbytes(scale->dtype), scale->dtype, end - begin, scale->coefficient);
}

enum status kernel_scale(const struct tensor_view *tensors, const int64_t *numels, int64_t num_tensors,
                         double coefficient, const struct kernel_stream *stream) {
    for (int64_t i = 0; i < num_tensors; i++) {
        if (!dtype_is_known(tensors[i].dtype)) {
            return STATUS_UNSUPPORTED;
        }
    }
    for (int64_t i = 0; i < num_tensors; i++) {
        struct scale_context context = {tensors[i].data, tensors[i].dtype, coefficient};
        stream_for(stream, numels[i], GRAIN_NUMEL, scale_range, &context);
    }
    return STATUS_OK;
}
