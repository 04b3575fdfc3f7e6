/* kernel_unscale: a gradient scaler's look for inf and NaN with the multiplication by the inverse scale, in one pass. */
#include <stdatomic.h>

#include "kernels/blocks.h"

struct unscale {
    const struct tensor_view *tensors;
    const int64_t *numels;
    double inverse_scale;
    atomic_bool found; /* in any tensor, by any thread */
};

static int64_t unscale_numel(const void *context, int64_t tensor) {
    const struct unscale *unscale = context;
    return unscale->numels[tensor];
}

static void unscale_part(void *context, int64_t tensor, int64_t begin, int64_t end) {
    struct unscale *unscale = context;
    const struct tensor_view *view = &unscale->tensors[tensor];
    char *part = (char *)view->data + begin * dtype_nbytes(view->dtype);
    if (unscale_block(part, view->dtype, end - begin, unscale->inverse_scale))
        atomic_store_explicit(&unscale->found, true, memory_order_relaxed);
}

enum status kernel_unscale(const struct tensor_view *tensors, const int64_t *numels, int64_t num_tensors,
                           const float *inverse_scale, float *found_inf, const struct kernel_stream *stream) {
    for (int64_t i = 0; i < num_tensors; i++)
        if (!dtype_is_known(tensors[i].dtype))
            return STATUS_UNSUPPORTED;
    struct unscale unscale = {tensors, numels, num_tensors > 0 ? (double)*inverse_scale : 1.0, false};
    group_for(stream, &(struct group){num_tensors, unscale_numel, unscale_part, &unscale}, GRAIN_NUMEL);
    if (atomic_load(&unscale.found))
        *found_inf = 1.0f;
    return STATUS_OK;
}
