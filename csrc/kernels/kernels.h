/* Kernels over raw pointers. A CPU .c and a CUDA .cu of one kernel stand side by side behind one signature
 * (table.h).
 *
 * Invariants: a kernel never allocates, never synchronises, never exits; numel 0 is legal; offsets are
 * int64_t; the stream comes last. Every result equals torch's own, bit for bit, for the same operation
 * sequence, NaN and infinities included. "Divide" means: in the output dtype's arithmetic type (fp32 for bf16
 * and fp16), then rounded, as torch's `div_` of a tensor of that dtype by a Python float does (on CUDA that
 * is a product with the reciprocal); a divisor of exactly 1.0 is skipped. */
#ifndef FSDP_KERNELS_KERNELS_H
#define FSDP_KERNELS_KERNELS_H

#include <stdbool.h>
#include <stdint.h>

#include "base/status.h"

#ifdef __CUDACC__
#define HOST_DEVICE __host__ __device__ /* for what kernels of the CPU and of the GPU share */
#else
#define HOST_DEVICE
#endif

/* What kernels compute with; of others no more is known than the size of an element. */
enum dtype {
    DTYPE_FLOAT32,
    DTYPE_FLOAT64,
    DTYPE_BFLOAT16,
    DTYPE_FLOAT16,
    DTYPE_COUNT,
    DTYPE_OTHER = DTYPE_COUNT,
    DTYPE_OTHER_1,
    DTYPE_OTHER_2,
    DTYPE_OTHER_4,
    DTYPE_OTHER_8,
    DTYPE_OTHER_16,
};
/* Those without kernels of ours have the number of their type in DLPack: torch runs its operators there. */
enum device_kind {
    DEVICE_CPU = 0,
    DEVICE_CUDA = 2,
    DEVICE_ROCM = 10,
    DEVICE_PRIVATE = 12,
    DEVICE_XPU = 14,
    DEVICE_MAIA = 17
};

/* A tensor's memory, borrowed from a live tensor. `data` already includes the storage offset; NULL when the
 * storage is freed. */
struct tensor_view {
    void *data;
    enum dtype dtype;
    enum device_kind device;
    int32_t device_index;
    int32_t ndim;
    const int64_t *sizes;
    const int64_t *strides; /* in elements; NULL means contiguous */
};

/* Where kernels run: `parallel_for` splits [0, numel) over threads (NULL: this thread alone). */
typedef void (*kernel_body)(int64_t begin, int64_t end, void *context);
struct kernel_stream {
    void (*parallel_for)(int64_t begin, int64_t end, int64_t grain, kernel_body body, void *context);
    void *cuda_stream; /* cudaStream_t; NULL on CPU and for CUDA's default stream */
    int32_t device_index;
    enum device_kind device;
};

/* One source of a pack: a strided tensor, or data == NULL and zeros are written in its place.
 * Elements go to output[offset + sum(index[d] * output_strides[d])], output_strides == NULL meaning
 * contiguous. */
struct pack_source {
    struct tensor_view view;
    int64_t numel;
    int64_t offset;
    const int64_t *output_strides;
};

/* output = cast(source) / divisor for every source; the gaps between sources and up to output_numel are
 * zeroed. The sources are ordered by offset and do not overlap. One pass: flatten, cast and pre-divide of a
 * unit's gradients. */
typedef enum status pack_kernel(void *output, enum dtype output_dtype, int64_t output_numel,
                                const struct pack_source *sources, int64_t num_sources, double divisor,
                                const struct kernel_stream *stream);
extern pack_kernel kernel_pack;

/* output += source for every source, each sum rounded to the output dtype; gaps and NULL sources leave output
 * alone. */
typedef enum status pack_add_kernel(void *output, enum dtype output_dtype, const struct pack_source *sources,
                                    int64_t num_sources, const struct kernel_stream *stream);
extern pack_add_kernel kernel_pack_add;

/* Of contiguous elements.
 * cast_divide: output = cast(input) / divisor. output may be input when the dtypes are equal.
 * accumulate: output += cast(input / divisor): the quotient is rounded to the input dtype, then cast, then
 * added. */
typedef enum status elementwise_kernel(void *output, enum dtype output_dtype, const void *input,
                                       enum dtype input_dtype, int64_t numel, double divisor,
                                       const struct kernel_stream *stream);
extern elementwise_kernel kernel_cast_divide;
extern elementwise_kernel kernel_accumulate;

static inline bool dtype_is_known(enum dtype dtype) {
    return (unsigned)dtype < DTYPE_COUNT;
}

/* What an elementwise kernel refuses, on any device. */
static inline enum status elementwise_check(const void *output, enum dtype output_dtype, const void *input,
                                            enum dtype input_dtype, int64_t numel) {
    if (!dtype_is_known(output_dtype) || !dtype_is_known(input_dtype))
        return STATUS_UNSUPPORTED;
    bool overwrites = output == input && output_dtype != input_dtype && numel > 0;
    return numel < 0 || overwrites ? STATUS_INVALID : STATUS_OK;
}

/* The dtype for elements of that size that no kernel computes with. */
static inline enum dtype dtype_other(int64_t nbytes) {
    switch (nbytes) {
    case 1:
        return DTYPE_OTHER_1;
    case 2:
        return DTYPE_OTHER_2;
    case 4:
        return DTYPE_OTHER_4;
    case 8:
        return DTYPE_OTHER_8;
    case 16:
        return DTYPE_OTHER_16;
    default:
        return DTYPE_OTHER;
    }
}

/* Of an element; 0 for one of DTYPE_OTHER. */
static inline int64_t dtype_nbytes(enum dtype dtype) {
    switch (dtype) {
    case DTYPE_OTHER_16:
        return 16;
    case DTYPE_FLOAT64:
    case DTYPE_OTHER_8:
        return 8;
    case DTYPE_FLOAT32:
    case DTYPE_OTHER_4:
        return 4;
    case DTYPE_BFLOAT16:
    case DTYPE_FLOAT16:
    case DTYPE_OTHER_2:
        return 2;
    case DTYPE_OTHER_1:
        return 1;
    default:
        return 0;
    }
}

#endif
