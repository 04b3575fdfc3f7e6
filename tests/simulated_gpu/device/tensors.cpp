#include "tensors.h"

namespace simulated_gpu {

using at::Tensor;

enum { MOST_RANGES = 512 };

/* (stride, size) in elements of the dimensions with a stride and more than one element, innermost first. */
static std::vector<std::pair<int64_t, int64_t>> moving_dims(const Tensor &tensor) {
    std::vector<std::pair<int64_t, int64_t>> dims;
    for (int64_t d = 0; d < tensor.dim(); d++) {
        if (tensor.size(d) != 1 && tensor.stride(d) != 0) {
            dims.push_back({tensor.stride(d), tensor.size(d)});
        }
    }
    std::sort(dims.begin(), dims.end());
    return dims;
}

void touch(launch &launch, const Tensor &tensor, enum access how) {
    if (!tensor.defined() || !tensor.has_storage() || tensor.numel() == 0 || !tensor.storage().data()) {
        return;
    }
    int64_t size = (int64_t)tensor.element_size(), run = 1, num_ranges = 1;
    const char *data = (const char *)tensor.storage().data() + tensor.storage_offset() * size;
    auto dims = moving_dims(tensor);
    size_t outer = 0;
    for (; outer < dims.size() && dims[outer].first == run; outer++) {
        run *= dims[outer].second;
    }
    int64_t span = run;
    for (size_t d = outer; d < dims.size(); d++) {
        num_ranges *= dims[d].second;
        span += dims[d].first * (dims[d].second - 1);
    }
    if (num_ranges > MOST_RANGES) {
        launch.access(data, (size_t)(span * size), how);
        return;
    }
    for (int64_t i = 0; i < num_ranges; i++) {
        int64_t rest = i, offset = 0;
        for (size_t d = outer; d < dims.size(); d++) {
            offset += rest % dims[d].second * dims[d].first;
            rest /= dims[d].second;
        }
        launch.access(data + offset * size, (size_t)(run * size), how);
    }
}

c10::Storage working_storage_of(const c10::Storage &storage) {
    if (!has_only_shapes()) {
        return cpu_storage_of(storage);
    }
    c10::DataPtr nothing(nullptr, c10::kMeta);
    return {c10::make_intrusive<c10::StorageImpl>(c10::StorageImpl::use_byte_size_t(), storage.nbytes(),
                                                  std::move(nothing), c10::GetAllocator(c10::kMeta), true)};
}

double nbytes_of(const Tensor &tensor) {
    double numel = 1;
    for (int64_t d = 0; d < tensor.dim(); d++) {
        numel *= tensor.stride(d) || !tensor.size(d) ? (double)tensor.size(d) : 1.0;
    }
    return numel * (double)tensor.element_size();
}

} // namespace simulated_gpu
