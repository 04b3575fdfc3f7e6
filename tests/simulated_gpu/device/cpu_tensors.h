/* Tensors of a device that is the host's memory, seen as those of the CPU. tests/real_cuda computes by it as
 * well. */
#pragma once

#include <ATen/ATen.h>

#include <functional>
#include <string>

namespace simulated_gpu {

/* The same memory as a tensor of the CPU. */
at::Tensor as_cpu(const at::Tensor &tensor);
/* keeps nothing alive, of whatever device */
at::Tensor borrowed(const at::Tensor &tensor);
/* or of nowhere: working_storage_of */
at::Tensor as_cpu(const at::Tensor &tensor, const c10::Storage &storage);
c10::Storage cpu_storage_of(const c10::Storage &storage);

/* Memory from the storage's begin to the tensor's last element. */
size_t needed_nbytes(const at::Tensor &tensor);
/* A tensor of the device, of whose storage the CPU's is a view. */
at::Tensor view_of(c10::StorageImpl *storage, const at::Tensor &cpu);

/* An operator's value with each of its tensors changed; its tensors one after the other. */
c10::IValue changed(const c10::IValue &value, const std::function<at::Tensor(const at::Tensor &)> &with);
void for_each_tensor(const c10::IValue &value, const std::function<void(const at::Tensor &)> &body);

/* Beside tensors of a GPU, one of the CPU with dimensions is an error but for these operators. */
bool takes_cpu_tensors(const std::string &name);

/* A number of Python's that became a tensor weighs less in the choice of a result's dtype. */
void mark_wrapped_number(const at::Tensor &tensor, const at::Tensor &as);

} // namespace simulated_gpu
