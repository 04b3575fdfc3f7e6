/* The kernels of one device, behind one signature each: what stands beside each other as x.c and x.cu.
 *
 * Invariant: a caller picks the table by the device of the tensors and calls through it; each table has every
 * kernel. On a GPU a kernel is enqueued on the stream and has not run when the call returns; it reads its
 * arguments' memory then. */
#ifndef FSDP_KERNELS_TABLE_H
#define FSDP_KERNELS_TABLE_H

#include "kernels/kernels.h"

enum { KERNEL_TABLE_VERSION = 8 }; /* a library of another version is not loaded */

/* Of contiguous elements: what `input` gives, divided, becomes or is added to what `output` holds. */
typedef enum status elementwise_kernel(void *output, enum dtype output_dtype, const void *input,
                                       enum dtype input_dtype, int64_t numel, double divisor,
                                       const struct kernel_stream *stream);

struct kernel_table {
    int32_t version;
    enum status (*pack)(void *output, enum dtype output_dtype, int64_t output_numel,
                        const struct pack_source *sources, int64_t num_sources, double divisor,
                        const struct kernel_stream *stream);
    enum status (*pack_add)(void *output, enum dtype output_dtype, const struct pack_source *sources,
                            int64_t num_sources, const struct kernel_stream *stream);
    elementwise_kernel *cast_divide, *accumulate;
    enum status (*copy_ranges)(void *output, enum dtype dtype, const struct copy_range *ranges,
                               int64_t num_ranges, const struct kernel_stream *stream);
    /* As kernel_unscale and kernel_checksums, all numbers lying in the device's memory: the host waits for
     * none. */
    enum status (*unscale)(const struct tensor_view *tensors, const int64_t *numels, int64_t num_tensors,
                           const float *inverse_scale, float *found_inf, const struct kernel_stream *stream);
    enum status (*checksums)(uint64_t *checksums, const struct byte_range *ranges, int64_t num_ranges,
                             const struct kernel_stream *stream);
    enum status (*adamw)(const struct adam_tensor *tensors, int64_t num_tensors,
                         const struct adamw_options *options, const struct kernel_stream *stream);
    const char *(*device_error)(void); /* what the device said when this thread last got STATUS_DEVICE */
    /* Of CUDA's alone. NULL: this device can run them. The text is the thread's own. */
    const char *(*why_not_on)(int32_t device_index);
};

extern const struct kernel_table cpu_kernels;
extern const struct kernel_table
    no_kernels; /* for tensors without memory, as FakeTensorMode makes them: does nothing */

/* The one symbol of the CUDA library. NULL, with the reason in *why, where no kernel can be launched. */
#define CUDA_KERNELS_SYMBOL "fsdp_c_cuda_kernels"
typedef const struct kernel_table *(*cuda_kernels_function)(const char **why);

#endif
