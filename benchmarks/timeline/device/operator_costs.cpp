#include "operator_costs.h"

#include <algorithm>
#include <string>
#include <unordered_set>
#include <vector>

#include "timeline.h"

namespace simulated_gpu {

using at::Tensor;
using c10::IValue;
using names = std::unordered_set<std::string>;

/* Of matrices, or of batches of them. */
static double flops_of_product(const Tensor &one, const Tensor &other) {
    return 2.0 * (double)one.numel() * (double)other.size(-1);
}

static double us_of_product(const Tensor &one, const Tensor &other) {
    double per_us = one.element_size() <= 2 ? costs().flops_16 : costs().flops_32;
    return costs().product + flops_of_product(one, other) / per_us;
}

double us_of_flops(const std::string &name, const IValue *arguments) {
    if (name == "aten::mm" || name == "aten::bmm" || name == "aten::_grouped_mm") {
        return us_of_product(arguments[0].toTensor(), arguments[1].toTensor());
    }
    if (name == "aten::addmm" || name == "aten::baddbmm") {
        return us_of_product(arguments[1].toTensor(), arguments[2].toTensor());
    }
    bool is_forward = name == "aten::_scaled_dot_product_flash_attention";
    if (is_forward || name == "aten::_scaled_dot_product_flash_attention_backward") {
        const Tensor &query = arguments[is_forward ? 0 : 1].toTensor(),
                     &key = arguments[is_forward ? 1 : 2].toTensor();
        bool is_causal = arguments[is_forward ? 4 : 11].toBool();
        double forward = 4.0 * (double)query.numel() * (double)key.size(2) * (is_causal ? 0.5 : 1.0);
        /* five products in place of two */
        return (is_forward ? forward : 2.5 * forward) / costs().attention;
    }
    return 0;
}

bool reads_twice(const std::string &name) {
    return name == "aten::_fused_rms_norm_backward" || name == "aten::native_layer_norm_backward";
}

static bool is_of_lists(const std::string &name) {
    return name.rfind("aten::_foreach_", 0) == 0 || name.rfind("aten::_fused_adam", 0) == 0 ||
           name == "aten::_fused_sgd_" || name == "aten::_fused_adagrad_";
}

/* As ATen/native/cuda/MultiTensorApply.cuh has it since CUDA 13: a launch takes so many tensors of each list,
 * and so many chunks of them. */
static int64_t launches_over_lists(const c10::FunctionSchema &schema, const IValue *arguments) {
    static const int64_t most_tensors[] = {770, 448, 336, 252, 210}, most_chunks = 2240, chunk = 65536;
    std::vector<Tensor> first;
    int num_lists = 0;
    for (size_t i = 0; i < schema.arguments().size(); i++) {
        if (arguments[i].isTensorList() && !arguments[i].toTensorList().empty() &&
            schema.arguments()[i].name() != "state_steps") {
            first = first.empty() ? arguments[i].toTensorVector() : first;
            num_lists++;
        }
    }
    num_lists += schema.returns().empty() ? 0 : 1;
    int64_t launches = 0, tensors = 0, chunks = 0;
    for (const Tensor &each : first) {
        int64_t left = (each.numel() + chunk - 1) / chunk;
        tensors += left != 0;
        while (left) {
            int64_t taken = std::min(left, most_chunks - chunks);
            left -= taken;
            chunks += taken;
            if (chunks == most_chunks || (!left && tensors == most_tensors[std::min(num_lists, 5) - 1])) {
                launches++;
                chunks = 0;
                tensors = left != 0;
            }
        }
    }
    return std::max<int64_t>(launches + (chunks != 0), 1);
}

int64_t num_launches(const c10::FunctionSchema &schema, const IValue *arguments) {
    return is_of_lists(schema.name())   ? launches_over_lists(schema, arguments)
           : reads_twice(schema.name()) ? 2
                                        : 1;
}

bool overwrites(const std::string &name) {
    static const names all = {"aten::fill_",    "aten::zero_",          "aten::normal_",
                              "aten::uniform_", "aten::_foreach_copy_", "aten::_foreach_zero_"};
    return all.count(name) != 0;
}

bool reads_what_it_gives(const std::string &name) {
    static const names all = {"aten::index_select", "aten::embedding", "aten::gather", "aten::index"};
    return all.count(name) != 0;
}

} // namespace simulated_gpu
