/* CPU tensors over the memory of a device that is host memory. Used by tests/real_cuda, too. */
#pragma once

#include <ATen/ATen.h>

#include <functional>
#include <string>

namespace simulated_gpu {

/* Return a CPU tensor on the same memory. */
at::Tensor as_cpu(const at::Tensor &tensor);
/* Return a CPU tensor on the same memory, from any device, that does not keep the memory alive. */
at::Tensor borrowed(const at::Tensor &tensor);
/* Return a CPU tensor on `storage`, or a meta tensor for a meta storage: see working_storage_of(). */
at::Tensor as_cpu(const at::Tensor &tensor, const c10::Storage &storage);
c10::Storage cpu_storage_of(const c10::Storage &storage);

/* Return the bytes from the storage's begin to the tensor's last element. */
size_t needed_nbytes(const at::Tensor &tensor);
/* Return the device tensor on `storage` with the sizes, strides and offset of `cpu`. */
at::Tensor view_of(c10::StorageImpl *storage, const at::Tensor &cpu);

/* Return the value with each of its tensors replaced by `with(tensor)`. */
c10::IValue changed(const c10::IValue &value, const std::function<at::Tensor(const at::Tensor &)> &with);
void for_each_tensor(const c10::IValue &value, const std::function<void(const at::Tensor &)> &body);

/* Return true for operators that accept CPU tensors with dimensions beside tensors of a GPU. */
bool takes_cpu_tensors(const std::string &name);

/* Copy the mark of a tensor made from a Python number, which has less weight in type promotion. */
void mark_wrapped_number(const at::Tensor &tensor, const at::Tensor &as);

} // namespace simulated_gpu
