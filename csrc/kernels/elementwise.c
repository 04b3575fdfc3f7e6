/* The kernels over contiguous elements: kernel_cast_divide, kernel_accumulate and kernel_unscale. */
#include <stdatomic.h>

#include "kernels/blocks.h"

/* ---- casts and sums with an optional division ---- */

/* A run that is read and one that is written, and what makes the one of the other. */
struct runs {
    elementwise_block *block;
    char *output;
    const char *input;
    enum dtype output_dtype;
    enum dtype input_dtype;
    double divisor;
};

static void runs_range(int64_t begin, int64_t end, void *context) {
    const struct runs *runs = context;
    runs->block(runs->output + begin * dtype_nbytes(runs->output_dtype), runs->output_dtype,
                runs->input + begin * dtype_nbytes(runs->input_dtype), runs->input_dtype, end - begin,
                runs->divisor);
}

static enum status runs_make(elementwise_block *block, void *output, enum dtype output_dtype,
                             const void *input, enum dtype input_dtype, int64_t numel, double divisor,
                             const struct kernel_stream *stream) {
    struct runs context = {block, output, input, output_dtype, input_dtype, divisor};
    enum status status = elementwise_check(output, output_dtype, input, input_dtype, numel);
    if (status == STATUS_OK)
        stream_for(stream, numel, GRAIN_NUMEL, runs_range, &context);
    return status;
}

enum status kernel_cast_divide(void *output, enum dtype output_dtype, const void *input,
                               enum dtype input_dtype, int64_t numel, double divisor,
                               const struct kernel_stream *stream) {
    return runs_make(cast_divide_block, output, output_dtype, input, input_dtype, numel, divisor, stream);
}

/* A reduced shard onto the one accumulated before, with the post-division and the upcast on the way. */
enum status kernel_accumulate(void *accumulator, enum dtype accumulator_dtype, const void *input,
                              enum dtype input_dtype, int64_t numel, double divisor,
                              const struct kernel_stream *stream) {
    return runs_make(accumulate_block, accumulator, accumulator_dtype, input, input_dtype, numel, divisor,
                     stream);
}

/* ---- a gradient scaler's look for inf and NaN with the multiplication by the inverse scale ---- */

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
