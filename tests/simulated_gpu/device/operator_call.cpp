#include "operator_call.h"

namespace simulated_gpu {

using at::Tensor;
using c10::IValue;

operator_call::operator_call(const c10::OperatorHandle &operator_, std::vector<IValue> *values,
                             c10::DeviceIndex current)
    : op(operator_), schema(operator_.schema()), stack(values),
      first(values->size() - schema.arguments().size()), device(c10::kCUDA, current) {
}

void operator_call::find_device() {
    bool found = false, has_cpu_tensor = false;
    auto look = [&](const Tensor &each) {
        if (each.is_cuda()) {
            TORCH_CHECK(!found || device == each.device() || each.dim() == 0,
                        "Expected all tensors to be on the same device, but found at least two devices, ",
                        device, " and ", each.device(), "! (", schema.name(), ")");
            device = found ? device : each.device();
            found = true;
        }
        has_cpu_tensor = has_cpu_tensor || (each.is_cpu() && each.dim() > 0);
    };
    for (size_t i = first; i < stack->size(); i++) {
        const IValue &value = (*stack)[i];
        for_each_tensor(value, look);
        if (value.isDevice() && value.toDevice().is_cuda() && value.toDevice().has_index() && !found) {
            device = value.toDevice();
        }
    }
    TORCH_CHECK(!found || !has_cpu_tensor || takes_cpu_tensors(schema.name()),
                "Expected all tensors to be on the same device, but found at least two devices, ", device,
                " and cpu! (", schema.name(), ")");
}

Tensor operator_call::converted(const Tensor &tensor, const std::function<c10::Storage()> &make_storage) {
    c10::StorageImpl *storage = tensor.storage().unsafeGetStorageImpl();
    auto found = storages.find(storage);
    if (found == storages.end()) {
        found = storages.insert({storage, make_storage()}).first;
    }
    Tensor made = as_cpu(tensor, found->second);
    originals[made.unsafeGetTensorImpl()] = {tensor, made};
    return made;
}

void operator_call::hold_arguments() {
    std::vector<IValue> arguments(stack->begin() + (ptrdiff_t)first, stack->end());
    held = std::make_shared<held_operator>(
        op, arguments, [&](const Tensor &each) { return originals.count(each.unsafeGetTensorImpl()) != 0; });
    note_places(first, stack->size(), false);
}

void operator_call::hold_fill(const Tensor &into, const Tensor &cpu) {
    held->fill(places.at(cpu.unsafeGetTensorImpl()), into);
}

void operator_call::note_places(size_t begin, size_t end, bool are_results) {
    held_operator::for_each_place(
        *stack, begin, end, are_results,
        [&](const Tensor &each, value_place place) { places.insert({each.unsafeGetTensorImpl(), place}); });
}

void operator_call::return_results() {
    size_t begin = stack->size() - schema.returns().size();
    if (held) {
        note_places(begin, stack->size(), true);
    }
    for (auto &[_, pair] : originals) {
        follow(pair.first, pair.second);
    }
    for (size_t i = begin; i < stack->size(); i++) {
        (*stack)[i] = changed((*stack)[i], [&](const Tensor &cpu) { return from_cpu(cpu); });
    }
}

void operator_call::follow(const Tensor &original, const Tensor &cpu) {
    bool is_same_memory = cpu.is_meta() || original.storage().data() == cpu.storage().data();
    if (is_same_memory && original.sizes() == cpu.sizes() && original.strides() == cpu.strides()) {
        return;
    }
    original.unsafeGetTensorImpl()->set_sizes_and_strides(cpu.sizes(), cpu.strides(), cpu.storage_offset());
    make_room_for(original);
    if (!is_same_memory) {
        fill(original, cpu);
    }
}

Tensor operator_call::from_cpu(const Tensor &cpu) {
    if (!cpu.defined()) {
        return cpu;
    }
    auto known = originals.find(cpu.unsafeGetTensorImpl());
    if (known != originals.end()) {
        return known->second.first;
    }
    for (auto &[storage, of_cpu] : storages) {
        if (of_cpu.unsafeGetStorageImpl() == cpu.storage().unsafeGetStorageImpl()) {
            return view_of(storage, cpu);
        }
    }
    Tensor made = new_tensor(cpu);
    fill(made, cpu);
    mark_wrapped_number(made, cpu);
    return made;
}

} // namespace simulated_gpu
