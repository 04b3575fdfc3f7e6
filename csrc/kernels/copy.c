/* kernel_copy_ranges and kernel_fill: moving bytes without conversion, and padding. */
#include <string.h>

#include "kernels/blocks.h"

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

enum status kernel_copy_ranges(void *output, enum dtype dtype, const struct copy_range *ranges, int64_t num_ranges,
                               const struct kernel_stream *stream) {
    if (!dtype_is_known(dtype))
        return STATUS_UNSUPPORTED;
    for (int64_t i = 0; i < num_ranges; i++)
        if (ranges[i].numel < 0)
            return STATUS_INVALID;
    struct copy copy = {output, ranges, dtype_nbytes(dtype)};
    group_for(stream, &(struct group){num_ranges, copy_numel, copy_part, &copy}, GRAIN_NUMEL);
    return STATUS_OK;
}

struct fill_context {
    char *output;
    int64_t element_nbytes;
    union block pattern; /* a block of the value */
};

static void fill_part(int64_t begin, int64_t end, void *context) {
    const struct fill_context *fill = context;
    for (int64_t i = begin; i < end; i += BLOCK_NUMEL) {
        int64_t numel = end - i < BLOCK_NUMEL ? end - i : BLOCK_NUMEL;
        memcpy(fill->output + i * fill->element_nbytes, fill->pattern.bytes, (size_t)(numel * fill->element_nbytes));
    }
}

enum status kernel_fill(void *output, enum dtype dtype, int64_t numel, double value,
                        const struct kernel_stream *stream) {
    if (!dtype_is_known(dtype))
        return STATUS_UNSUPPORTED;
    struct fill_context context = {.output = output, .element_nbytes = dtype_nbytes(dtype)};
    int64_t pattern_numel = numel < BLOCK_NUMEL ? numel : BLOCK_NUMEL;
    for (int64_t i = 0; i < pattern_numel; i++)
        cast_block(context.pattern.bytes + i * context.element_nbytes, dtype, &value, DTYPE_FLOAT64, 1);
    stream_for(stream, numel, GRAIN_NUMEL, fill_part, &context);
    return STATUS_OK;
}
