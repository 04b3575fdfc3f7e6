/* kernel_copy_ranges and kernel_fill: moving bytes without conversion, and padding. */
#include <string.h>

#include "kernels/blocks.h"

struct copy_context {
    char *output;
    const char *input;
    int64_t element_nbytes;
};

static void copy_part(int64_t begin, int64_t end, void *context) {
    const struct copy_context *copy = context;
    int64_t start = begin * copy->element_nbytes;
    memcpy(copy->output + start, copy->input + start, (size_t)((end - begin) * copy->element_nbytes));
}

enum status kernel_copy_ranges(void *output, enum dtype dtype, const struct copy_range *ranges, int64_t num_ranges,
                               const struct kernel_stream *stream) {
    if (!dtype_is_known(dtype)) {
        return STATUS_UNSUPPORTED;
    }
    int64_t nbytes = dtype_nbytes(dtype);
    for (int64_t i = 0; i < num_ranges; i++) {
        if (ranges[i].numel <= 0) {
            continue;
        }
        struct copy_context context = {(char *)output + ranges[i].output_offset * nbytes,
                                       (const char *)ranges[i].input + ranges[i].input_offset * nbytes, nbytes};
        stream_for(stream, ranges[i].numel, GRAIN_NUMEL, copy_part, &context);
    }
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
    if (!dtype_is_known(dtype)) {
        return STATUS_UNSUPPORTED;
    }
    struct fill_context context = {.output = output, .element_nbytes = dtype_nbytes(dtype)};
    int64_t pattern_numel = numel < BLOCK_NUMEL ? numel : BLOCK_NUMEL;
    for (int64_t i = 0; i < pattern_numel; i++) {
        cast_block(context.pattern.bytes + i * context.element_nbytes, dtype, &value, DTYPE_FLOAT64, 1);
    }
    stream_for(stream, numel, GRAIN_NUMEL, fill_part, &context);
    return STATUS_OK;
}
