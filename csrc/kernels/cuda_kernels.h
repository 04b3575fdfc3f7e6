/* The launchers of the .cu files: what table.h says of each, on the stream's device. */
#ifndef FSDP_KERNELS_CUDA_KERNELS_H
#define FSDP_KERNELS_CUDA_KERNELS_H

#ifdef __cplusplus
extern "C" {
#endif

#include "kernels/table.h"

enum status cuda_pack(void *output, enum dtype output_dtype, int64_t output_numel, const struct pack_source *sources,
                      int64_t num_sources, double divisor, const struct kernel_stream *stream);
enum status cuda_pack_add(void *output, enum dtype output_dtype, const struct pack_source *sources, int64_t num_sources,
                          const struct kernel_stream *stream);
enum status cuda_cast_divide(void *output, enum dtype output_dtype, const void *input, enum dtype input_dtype,
                             int64_t numel, double divisor, const struct kernel_stream *stream);
enum status cuda_accumulate(void *accumulator, enum dtype accumulator_dtype, const void *input, enum dtype input_dtype,
                            int64_t numel, double divisor, const struct kernel_stream *stream);
enum status cuda_copy_ranges(void *output, enum dtype dtype, const struct copy_range *ranges, int64_t num_ranges,
                             const struct kernel_stream *stream);
enum status cuda_fill(void *output, enum dtype dtype, int64_t numel, double value, const struct kernel_stream *stream);
enum status cuda_unscale(const struct tensor_view *tensors, const int64_t *numels, int64_t num_tensors,
                         const float *inverse_scale, float *found_inf, const struct kernel_stream *stream);
enum status cuda_checksums(uint64_t *checksums, const struct byte_range *ranges, int64_t num_ranges,
                           const struct kernel_stream *stream);
enum status cuda_adamw(const struct adam_tensor *tensors, int64_t num_tensors, const struct adamw_options *options,
                       const struct kernel_stream *stream);

#ifdef __cplusplus
}
#endif

#endif
