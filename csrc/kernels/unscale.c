/* kernel_unscale: a gradient scaler's look for inf and NaN with the multiplication by the inverse scale, in one pass. */
#include <stdatomic.h>

#include "kernels/blocks.h"

struct unscale_context {
    char *tensor;
    enum dtype dtype;
    double inverse_scale;
    atomic_bool found; /* any thread's */
};

static void unscale_range(int64_t begin, int64_t end, void *context) {
    struct unscale_context *unscale = context;
    if (unscale_block(unscale->tensor + begin * dtype_nbytes(unscale->dtype), unscale->dtype, end - begin,
                      unscale->inverse_scale)) {
        atomic_store_explicit(&unscale->found, true, memory_order_relaxed);
    }
}

enum status kernel_unscale(const struct tensor_view *tensors, const int64_t *numels, int64_t num_tensors,
                           const float *inverse_scale, float *found_inf, const struct kernel_stream *stream) {
    for (int64_t i = 0; i < num_tensors; i++) {
        if (!dtype_is_known(tensors[i].dtype)) {
            return STATUS_UNSUPPORTED;
        }
    }
    for (int64_t i = 0; i < num_tensors; i++) {
        struct unscale_context context = {tensors[i].data, tensors[i].dtype, (double)*inverse_scale, false};
        stream_for(stream, numels[i], GRAIN_NUMEL, unscale_range, &context);
        if (atomic_load(&context.found)) {
            *found_inf = 1.0f;
        }
    }
    return STATUS_OK;
}
