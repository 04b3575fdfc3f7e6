/* Tensors of a device that is the host's memory, seen as those of the CPU. tests/real_cuda computes by it as well. */
#pragma once

#include <ATen/ATen.h>

namespace simulated_gpu {

/* The same memory as a tensor of the CPU. */
at::Tensor as_cpu(const at::Tensor &tensor);
at::Tensor borrowed(const at::Tensor &tensor);                            /* keeps nothing alive, of whatever device */
at::Tensor as_cpu(const at::Tensor &tensor, const c10::Storage &storage); /* or of nowhere: working_storage_of */
c10::Storage cpu_storage_of(const c10::Storage &storage);

/* A number of Python's that became a tensor weighs less in the choice of a result's dtype. */
void mark_wrapped_number(const at::Tensor &tensor, const at::Tensor &as);

} // namespace simulated_gpu
