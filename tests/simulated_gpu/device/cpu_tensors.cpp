#include "cpu_tensors.h"

namespace simulated_gpu {

using at::Tensor;

void mark_wrapped_number(const Tensor &tensor, const Tensor &as) {
    if (as.unsafeGetTensorImpl()->is_wrapped_number()) {
        tensor.unsafeGetTensorImpl()->set_wrapped_number(true);
    }
}

c10::Storage cpu_storage_of(const c10::Storage &storage) {
    c10::DataPtr data(const_cast<void *>(storage.data()), c10::kCPU);
    return {c10::make_intrusive<c10::StorageImpl>(c10::StorageImpl::use_byte_size_t(), storage.nbytes(),
                                                  std::move(data), c10::GetAllocator(c10::kCPU), true)};
}

Tensor as_cpu(const Tensor &tensor, const c10::Storage &storage) {
    c10::DispatchKey key = storage.device().is_meta() ? c10::DispatchKey::Meta : c10::DispatchKey::CPU;
    Tensor made =
        at::detail::make_tensor<c10::TensorImpl>(c10::Storage(storage), c10::DispatchKeySet(key), tensor.dtype());
    c10::TensorImpl *impl = made.unsafeGetTensorImpl();
    impl->set_sizes_and_strides(tensor.sizes(), tensor.strides(), tensor.storage_offset());
    mark_wrapped_number(made, tensor);
    made._set_conj(tensor.is_conj());
    made._set_neg(tensor.is_neg());
    return made;
}

Tensor borrowed(const Tensor &tensor) {
    return as_cpu(tensor, cpu_storage_of(tensor.storage()));
}

Tensor as_cpu(const Tensor &tensor) {
    return tensor.is_cuda() ? borrowed(tensor) : tensor;
}

} // namespace simulated_gpu
