/* The kernels over contiguous elements: kernel_cast_divide, kernel_accumulate, kernel_unscale and
 * kernel_copy_ranges. */
#include <stdatomic.h>
#include <string.h>

#include "kernels/blocks.h"

/* One run that is read and one that is written. */
struct runs {
    char *output;
    const char *input;
    enum dtype output_dtype;
    enum dtype input_dtype;
    double divisor;
};

/* ---- casts with an optional division ---- */

static void cast_divide_range(int64_t begin, int64_t end, void *context) {
    const struct runs *cast = context;
    cast_divide_block(cast->output + begin * dtype_nbytes(cast->output_dtype), cast->output_dtype,
                      cast->input + begin * dtype_nbytes(cast->input_dtype), cast->input_dtype, end - begin,
                      cast->divisor);
}

enum status kernel_cast_divide(void *output, enum dtype output_dtype, const void *input,
                               enum dtype input_dtype, int64_t numel, double divisor,
                               const struct kernel_stream *stream) {
    if (!dtype_is_known(output_dtype) || !dtype_is_known(input_dtype))
        return STATUS_UNSUPPORTED;
    if (numel < 0 || (output == input && output_dtype != input_dtype && numel > 0))
        return STATUS_INVALID;
    struct runs context = {output, input, output_dtype, input_dtype, divisor};
    stream_for(stream, numel, GRAIN_NUMEL, cast_divide_range, &context);
    return STATUS_OK;
}

/* ---- a reduced shard onto the one accumulated before, with the post-division and the upcast on the way ----
 */

static void accumulate_range(int64_t begin, int64_t end, void *context) {
    const struct runs *add = context;
    accumulate_block(add->output + begin * dtype_nbytes(add->output_dtype), add->output_dtype,
                     add->input + begin * dtype_nbytes(add->input_dtype), add->input_dtype, end - begin,
                     add->divisor);
}

enum status kernel_accumulate(void *accumulator, enum dtype accumulator_dtype, const void *input,
                              enum dtype input_dtype, int64_t numel, double divisor,
                              const struct kernel_stream *stream) {
    if (!dtype_is_known(accumulator_dtype) || !dtype_is_known(input_dtype))
        return STATUS_UNSUPPORTED;
    if (numel < 0)
        return STATUS_INVALID;
    struct runs context = {accumulator, input, accumulator_dtype, input_dtype, divisor};
    stream_for(stream, numel, GRAIN_NUMEL, accumulate_range, &context);
    return STATUS_OK;
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

/* ---- moving bytes without conversion ---- */

struct copy {
    char *output;
    const struct copy_range *ranges;
    int64_t element_nbytes;
};

static int64_t copy_numel(const void *context, int64_t range) {
    const struct copy *copy = context;
    return copy->ranges[range].numel;
}

static void copy_part(void *context, int64_t index, int64_t begin, int64_t end) {
    const struct copy *copy = context;
    const struct copy_range *range = &copy->ranges[index];
    char *output = copy->output + (range->output_offset + begin) * copy->element_nbytes;
    const char *input = (const char *)range->input + (range->input_offset + begin) * copy->element_nbytes;
    memcpy(output, input, (size_t)((end - begin) * copy->element_nbytes));
}

enum status kernel_copy_ranges(void *output, enum dtype dtype, const struct copy_range *ranges,
                               int64_t num_ranges, const struct kernel_stream *stream) {
    if (!dtype_is_known(dtype))
        return STATUS_UNSUPPORTED;
    for (int64_t i = 0; i < num_ranges; i++)
        if (ranges[i].numel < 0)
            return STATUS_INVALID;
    struct copy copy = {output, ranges, dtype_nbytes(dtype)};
    group_for(stream, &(struct group){num_ranges, copy_numel, copy_part, &copy}, GRAIN_NUMEL);
    return STATUS_OK;
}
