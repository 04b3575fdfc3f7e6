/* What every .cu file needs to enqueue a kernel.
 *
 * Invariant: a launch allocates nothing, waits for nothing and leaves the current device as it was. A failure
 * is STATUS_DEVICE, and cuda_error_text() says what it was. */
#ifndef FSDP_KERNELS_CUDA_LAUNCH_H
#define FSDP_KERNELS_CUDA_LAUNCH_H

#include "kernels/cuda_types.h"
extern "C" {
#include "kernels/table.h"
}

#ifndef CUDA_THREADS /* the emulation, which pays for barriers, has fewer */
#define CUDA_THREADS 256
#endif

enum {
    THREADS = CUDA_THREADS,    /* of a block */
    BLOCKS_PER_PROCESSOR = 32, /* of a grid, at most: chunks beyond that are taken in strides */
    VECTOR_NBYTES = 16,
    TABLE_NBYTES = 4096 - 128, /* what a launch takes by value, less room for scalars */
};

#ifdef FSDP_CUDA_EMULATION
#define ENQUEUE(kernel, blocks, stream, ...)                                                                 \
    emulate(blocks, THREADS, (stream)->device_index, [&] { kernel(__VA_ARGS__); })
#define ENQUEUE_WITH_BARRIERS(kernel, blocks, stream, ...)                                                   \
    emulate_with_barriers(blocks, THREADS, (stream)->device_index, [&] { kernel(__VA_ARGS__); })
#else
/* The kernel stands in parentheses where its template arguments hold commas. */
#define ENQUEUE(kernel, blocks, stream, ...)                                                                 \
    kernel<<<(unsigned)(blocks), THREADS, 0, (cudaStream_t)(stream)->cuda_stream>>>(__VA_ARGS__)
#define ENQUEUE_WITH_BARRIERS ENQUEUE
#endif

extern "C" const char *cuda_error_text(void);
enum status cuda_status(cudaError_t error); /* and keep its text */

/* Blocks for this many chunks on the current device. */
int64_t cuda_blocks(int64_t num_chunks);

/* Makes the stream's device current while it lives. The thread is left with the context that it had, or with
 * none. */
class device_guard {
  public:
    explicit device_guard(const struct kernel_stream *stream);
    ~device_guard();
    enum status status;

  private:
    void *previous; /* context */
    bool changed;
};

/* ---- the launchers: what kernels.h says of each, on the stream's device ---- */

extern "C" {
pack_kernel cuda_pack;
pack_add_kernel cuda_pack_add;
elementwise_kernel cuda_cast_divide, cuda_accumulate;
}

#endif
