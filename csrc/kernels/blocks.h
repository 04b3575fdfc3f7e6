/* Building blocks of the CPU kernels: loops over contiguous elements by dtype, and the split over threads. */
#ifndef FSDP_KERNELS_BLOCKS_H
#define FSDP_KERNELS_BLOCKS_H

#include "kernels/kernels.h"

enum {
    /* elements of a block: 8 KiB of fp64, so that three blocks fit into the first-level cache */
    BLOCK_NUMEL = 1024,
    GRAIN_NUMEL = 32 * 1024, /* least elements per thread; fewer are not worth the start of a thread */
    BLOCK_NBYTES = BLOCK_NUMEL * 8,
};

/* A scratch block for any dtype. */
union block {
    double aligned;
    unsigned char bytes[BLOCK_NBYTES];
};

void cast_block(void *output, enum dtype output_dtype, const void *input, enum dtype input_dtype,
                int64_t numel);

/* cast_divide_block: output = cast(input) / divisor; a divisor of 1 only casts. Equal dtypes may alias.
 * accumulate_block: output += cast(input / divisor), each step rounded. */
typedef void elementwise_block(void *output, enum dtype output_dtype, const void *input,
                               enum dtype input_dtype, int64_t numel, double divisor);
extern elementwise_block cast_divide_block;
extern elementwise_block accumulate_block;

/* Run body over [0, numel): on the threads of the stream when it has threads and numel exceeds the grain,
 * otherwise on this thread. */
static inline void stream_for(const struct kernel_stream *stream, int64_t numel, int64_t grain,
                              kernel_body body, void *context) {
    if (numel <= 0)
        return;
    if (numel <= grain || !stream || !stream->parallel_for) {
        body(0, numel, context);
        return;
    }
    stream->parallel_for(0, numel, grain, body, context);
}

#endif
