#include "held_operator.h"

#include <cstring>
#include <unordered_map>

namespace simulated_gpu {

using at::Tensor;
using c10::IValue;
using values = std::vector<IValue>;
using change = std::function<Tensor(const Tensor &)>;

static values all_changed(const values &given, const change &with) {
    values made;
    for (const IValue &each : given) {
        made.push_back(changed(each, with));
    }
    return made;
}

void held_operator::for_each_place(const values &all, size_t begin, size_t end, bool are_results,
                                   const std::function<void(const Tensor &, value_place)> &body) {
    for (size_t i = begin; i < end; i++) {
        size_t element = 0;
        changed(all[i], [&](const Tensor &tensor) {
            body(tensor, {are_results, i - begin, element++});
            return tensor;
        });
    }
}

held_operator::held_operator(c10::OperatorHandle operator_, const values &given, const is_of_device &is)
    : op(std::move(operator_)), arguments(all_changed(given, [&](const Tensor &tensor) {
          if (is(tensor)) {
              return tensor;
          }
          Tensor copied = tensor.clone();
          mark_wrapped_number(copied, tensor);
          return copied;
      })) {
}

void held_operator::fill(value_place from, const Tensor &into) {
    fills.push_back({from, as_cpu(into)});
}

void held_operator::surround(std::function<void(const std::function<void()> &run)> with) {
    surroundings = std::move(with);
}

/* Make new tensors on the same memory, because the kernel may resize them. */
static values renewed(const values &given) {
    std::unordered_map<c10::StorageImpl *, c10::Storage> storages;
    return all_changed(given, [&](const Tensor &tensor) {
        auto [found, _] =
            storages.try_emplace(tensor.storage().unsafeGetStorageImpl(), cpu_storage_of(tensor.storage()));
        return as_cpu(tensor, found->second);
    });
}

void held_operator::run() const {
    at::AutoDispatchBelowADInplaceOrView below;
    c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::autocast_dispatch_keyset);
    values stack = renewed(arguments), before = stack;
    surroundings([&] { op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), &stack); });
    for (const auto &[from, into] : fills) {
        const values &of = from.is_result ? stack : before;
        for_each_place(of, from.value, from.value + 1, from.is_result,
                       [&, to = into](const Tensor &tensor, value_place place) {
                           if (place.element == from.element && tensor.numel()) {
                               to.copy_(tensor);
                           }
                       });
    }
}

void saved_memory::save(const Tensor &tensor) {
    if (!tensor.numel() || !tensor.storage().data()) {
        return;
    }
    size_t offset = (size_t)tensor.storage_offset() * tensor.element_size();
    size_t end = at::detail::computeStorageNbytes(tensor.sizes(), tensor.strides(), tensor.element_size(),
                                                  (size_t)tensor.storage_offset());
    char *first = (char *)const_cast<void *>(tensor.storage().data()) + offset;
    saved.push_back({first, std::vector<char>(first, first + (end - offset))});
}

void saved_memory::restore() {
    for (auto each = saved.rbegin(); each != saved.rend(); ++each) {
        memcpy(each->at, each->were.data(), each->were.size());
    }
    saved.clear();
}

} // namespace simulated_gpu
