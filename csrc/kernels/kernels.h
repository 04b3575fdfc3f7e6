/* Kernels over raw pointers. Each kernel has a CPU version in a .c file and a CUDA version in the .cu file of
 * the same name, with one signature (table.h).
 *
 * Invariants: a kernel never allocates, never synchronises, never exits; numel 0 is legal; offsets are
 * int64_t; the stream is the last argument. Results are torch's bits for the same sequence of operations, NaN
 * and infinities included. A division is done in the arithmetic type of the output dtype (fp32 for bf16 and
 * fp16), then rounded, as torch's `div_` by a Python float; on CUDA it is a product with the reciprocal. A
 * divisor of exactly 1.0 is skipped. */
#ifndef FSDP_KERNELS_KERNELS_H
#define FSDP_KERNELS_KERNELS_H

#include <stdbool.h>
#include <stdint.h>

#include "base/status.h"

#ifdef __CUDACC__
#define HOST_DEVICE __host__ __device__ /* marks functions that CPU and CUDA kernels share */
#else
#define HOST_DEVICE
#endif

/* Element types. Kernels compute with the types below DTYPE_COUNT; another type of known size is DTYPE_OTHER plus
 * that size in bytes. */
enum dtype {
    DTYPE_FLOAT32,
    DTYPE_FLOAT64,
    DTYPE_BFLOAT16,
    DTYPE_FLOAT16,
    DTYPE_COUNT,
    DTYPE_OTHER = DTYPE_COUNT,
    DTYPE_OTHER_16 = DTYPE_OTHER + 16,
};
/* Devices, by their numbers in DLPack. Only DEVICE_CPU and DEVICE_CUDA have kernels; others use torch's
 * operators. */
enum device_kind {
    DEVICE_CPU = 0,
    DEVICE_CUDA = 2,
    DEVICE_ROCM = 10,
    DEVICE_PRIVATE = 12,
    DEVICE_XPU = 14,
    DEVICE_MAIA = 17
};

/* A tensor's memory, borrowed from a live tensor. */
struct tensor_view {
    void *data; /* includes the storage offset; NULL while the storage is freed */
    enum dtype dtype;
    enum device_kind device;
    int32_t device_index;
    int32_t ndim;
    const int64_t *sizes;
    const int64_t *strides; /* unit: elements; NULL for a contiguous tensor */
};

/* The stream that kernels run on: a CUDA stream, or the CPU's threads. */
typedef void (*kernel_body)(int64_t begin, int64_t end, void *context);
struct kernel_stream {
    /* splits [begin, end) over threads; NULL to use the calling thread */
    void (*parallel_for)(int64_t begin, int64_t end, int64_t grain, kernel_body body, void *context);
    void *cuda_stream; /* cudaStream_t; NULL on the CPU and for CUDA's default stream */
    int32_t device_index;
    enum device_kind device;
};

/* One source of a pack: a strided tensor, or zeros when view.data is NULL. The element at `index` is written
 * to output[offset + sum(index[d] * output_strides[d])]; output_strides is NULL for a contiguous block. */
struct pack_source {
    struct tensor_view view;
    int64_t numel;
    int64_t offset;
    const int64_t *output_strides;
};

/* Set output = cast(source) / divisor for every source, and zero the gaps between sources and up to
 * output_numel: a unit's gradients are flattened, cast and pre-divided in one pass. The sources are ordered
 * by offset and do not overlap. */
typedef enum status pack_kernel(void *output, enum dtype output_dtype, int64_t output_numel,
                                const struct pack_source *sources, int64_t num_sources, double divisor,
                                const struct kernel_stream *stream);
extern pack_kernel kernel_pack;

/* Set output += source for every source, each sum rounded to the output dtype. Gaps and NULL sources are
 * skipped. */
typedef enum status pack_add_kernel(void *output, enum dtype output_dtype, const struct pack_source *sources,
                                    int64_t num_sources, const struct kernel_stream *stream);
extern pack_add_kernel kernel_pack_add;

/* Kernels over contiguous elements.
 * cast_divide: output = cast(input) / divisor. Equal dtypes may alias.
 * accumulate: output += cast(input / divisor). The quotient is rounded to the input dtype before the cast. */
typedef enum status elementwise_kernel(void *output, enum dtype output_dtype, const void *input,
                                       enum dtype input_dtype, int64_t numel, double divisor,
                                       const struct kernel_stream *stream);
extern elementwise_kernel kernel_cast_divide;
extern elementwise_kernel kernel_accumulate;

static inline bool dtype_is_known(enum dtype dtype) {
    return (unsigned)dtype < DTYPE_COUNT;
}

/* Return the status of an elementwise kernel's arguments, on any device. */
static inline enum status elementwise_check(const void *output, enum dtype output_dtype, const void *input,
                                            enum dtype input_dtype, int64_t numel) {
    if (!dtype_is_known(output_dtype) || !dtype_is_known(input_dtype))
        return STATUS_UNSUPPORTED;
    bool overwrites = output == input && output_dtype != input_dtype && numel > 0;
    return numel < 0 || overwrites ? STATUS_INVALID : STATUS_OK;
}

/* Return the size of an element; 0 if unknown. */
static inline int64_t dtype_nbytes(enum dtype dtype) {
    switch (dtype) {
    case DTYPE_FLOAT64:
        return 8;
    case DTYPE_FLOAT32:
        return 4;
    case DTYPE_BFLOAT16:
    case DTYPE_FLOAT16:
        return 2;
    default:
        return (int64_t)dtype - DTYPE_OTHER;
    }
}

#endif
