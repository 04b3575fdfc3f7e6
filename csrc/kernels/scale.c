/* kernel_scale: gradient clipping's multiplication of many contiguous tensors by one coefficient. */
#include "kernels/blocks.h"

struct scale {
    const struct tensor_view *tensors;
    const int64_t *numels;
    double coefficient;
};

static int64_t scale_numel(const void *context, int64_t tensor) {
    const struct scale *scale = context;
    return scale->numels[tensor];
}

static void scale_part(void *context, int64_t tensor, int64_t begin, int64_t end) {
    const struct scale *scale = context;
    const struct tensor_view *view = &scale->tensors[tensor];
    scale_block((char *)view->data + begin * dtype_nbytes(view->dtype), view->dtype, end - begin, scale->coefficient);
}

enum status kernel_scale(const struct tensor_view *tensors, const int64_t *numels, int64_t num_tensors,
                         double coefficient, const struct kernel_stream *stream) {
    struct scale scale = {tensors, numels, coefficient};
    for (int64_t i = 0; i < num_tensors; i++)
        if (!dtype_is_known(tensors[i].dtype))
            return STATUS_UNSUPPORTED;
    group_for(stream, &(struct group){num_tensors, scale_numel, scale_part, &scale}, GRAIN_NUMEL);
    return STATUS_OK;
}
