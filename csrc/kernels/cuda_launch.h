/* Launch helpers of all .cu files.
 *
 * Invariant: a launch allocates nothing, waits for nothing and leaves the current device unchanged. A failure
 * returns STATUS_DEVICE, and cuda_error_text() returns its text. */
#ifndef FSDP_KERNELS_CUDA_LAUNCH_H
#define FSDP_KERNELS_CUDA_LAUNCH_H

#include "kernels/cuda_types.h"
extern "C" {
#include "kernels/table.h"
}

#ifndef CUDA_THREADS /* the emulation sets fewer: its barriers are slow */
#define CUDA_THREADS 256
#endif

enum {
    THREADS = CUDA_THREADS,    /* threads of a block */
    BLOCKS_PER_PROCESSOR = 32, /* limit of a grid; its blocks process further chunks in strides */
    VECTOR_NBYTES = 16,
    TABLE_NBYTES = 4096 - 128, /* parameter space of a launch, less room for scalars */
};

#ifdef FSDP_CUDA_EMULATION
#define ENQUEUE(kernel, blocks, stream, ...)                                                                 \
    emulate(blocks, THREADS, (stream)->device_index, [&] { kernel(__VA_ARGS__); })
#define ENQUEUE_WITH_BARRIERS(kernel, blocks, stream, ...)                                                   \
    emulate_with_barriers(blocks, THREADS, (stream)->device_index, [&] { kernel(__VA_ARGS__); })
#else
/* A kernel whose template arguments contain commas is passed in parentheses. */
#define ENQUEUE(kernel, blocks, stream, ...)                                                                 \
    kernel<<<(unsigned)(blocks), THREADS, 0, (cudaStream_t)(stream)->cuda_stream>>>(__VA_ARGS__)
#define ENQUEUE_WITH_BARRIERS ENQUEUE
#endif

extern "C" const char *cuda_error_text(void);
enum status cuda_status(cudaError_t error); /* Return the status of `error` and record its text. */

/* Return the number of blocks for `num_chunks` chunks on the current device. */
int64_t cuda_blocks(int64_t num_chunks);

/* Scope in which the device of the stream is current. The destructor restores the thread's context, or the
 * absence of one. */
class device_guard {
  public:
    explicit device_guard(const struct kernel_stream *stream);
    ~device_guard();
    enum status status;

  private:
    void *previous; /* context of the thread before; NULL when it had none */
    bool changed;
};

/* ---- the launchers: the kernels of kernels.h, on the stream's device ---- */

extern "C" {
pack_kernel cuda_pack;
pack_add_kernel cuda_pack_add;
elementwise_kernel cuda_cast_divide, cuda_accumulate;
}

#endif
