#include "cpu_tensors.h"

#include <ATen/EmptyTensor.h>

namespace simulated_gpu {

using at::Tensor;
using c10::IValue;

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
    Tensor made = at::detail::make_tensor<c10::TensorImpl>(c10::Storage(storage), c10::DispatchKeySet(key),
                                                           tensor.dtype());
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

size_t needed_nbytes(const Tensor &tensor) {
    return at::detail::computeStorageNbytes(tensor.sizes(), tensor.strides(), tensor.element_size(),
                                            (size_t)tensor.storage_offset());
}

Tensor view_of(c10::StorageImpl *storage, const Tensor &cpu) {
    c10::Storage kept(c10::intrusive_ptr<c10::StorageImpl>::reclaim_copy(storage));
    Tensor made = at::detail::make_tensor<c10::TensorImpl>(
        std::move(kept), c10::DispatchKeySet(c10::DispatchKey::CUDA), cpu.dtype());
    made.unsafeGetTensorImpl()->set_sizes_and_strides(cpu.sizes(), cpu.strides(), cpu.storage_offset());
    return made;
}

IValue changed(const IValue &value, const std::function<Tensor(const Tensor &)> &with) {
    if (value.isTensor()) {
        return value.toTensor().defined() ? IValue(with(value.toTensor())) : value;
    }
    if (value.isTensorList()) {
        c10::List<Tensor> list;
        for (const Tensor &each : value.toTensorVector()) {
            list.push_back(with(each));
        }
        return list;
    }
    if (value.isOptionalTensorList()) {
        c10::List<std::optional<Tensor>> list;
        for (const std::optional<Tensor> &each : value.toOptionalTensorVector()) {
            list.push_back(each && each->defined() ? std::optional<Tensor>(with(*each)) : each);
        }
        return list;
    }
    return value;
}

void for_each_tensor(const IValue &value, const std::function<void(const Tensor &)> &body) {
    changed(value, [&](const Tensor &each) {
        body(each);
        return each;
    });
}

bool takes_cpu_tensors(const std::string &name) {
    return name.find("index") != std::string::npos || name.find("copy") != std::string::npos ||
           name.rfind("aten::_fused", 0) == 0 || name.rfind("aten::_foreach", 0) == 0;
}

} // namespace simulated_gpu
