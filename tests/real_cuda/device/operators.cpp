/* CPU kernels for the dispatch key CUDA, in a torch built for CUDA.
 *
 * Allocation, views, streams and copies of bytes stay torch's own. Every other kernel under the key CUDA is
 * replaced: its tensors become CPU tensors on the same memory, the CPU kernel runs, and its results are
 * copied into tensors of torch's CUDA allocator. */
#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/cuda/CUDAGeneratorImpl.h>
#include <ATen/cuda/EmptyTensor.h>
#include <ATen/native/Resize.h>
#include <ATen/native/cuda/Resize.h>
#include <ATen/ops/copy_native.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#include <torch/library.h>

#include <unordered_map>
#include <unordered_set>

#include "cpu_tensors.h"
#include "graph.h"
#include "operator_call.h"

namespace {

using at::Tensor;
using c10::IValue;
using torch::jit::Stack;
using names = std::unordered_set<std::string>;
using simulated_gpu::as_cpu;
using simulated_gpu::borrowed;
using simulated_gpu::changed;
using simulated_gpu::cpu_storage_of;
using simulated_gpu::for_each_tensor;
using simulated_gpu::needed_nbytes;

CUstream_st *stream_on(const c10::Device &device) {
    return fake::stream_of(c10::cuda::getCurrentCUDAStream(device.index()).stream());
}

fake::bytes bytes_of(const Tensor &tensor) {
    size_t offset = (size_t)tensor.storage_offset() * tensor.element_size();
    return {(char *)const_cast<void *>(tensor.storage().data()) + offset,
            tensor.numel() ? needed_nbytes(tensor) - offset : 0};
}

/* Launch a copy of one CPU tensor into another. */
void copy_later(CUstream_st *on, const Tensor &into, const Tensor &from) {
    fake::run(on,
              [to = into, from] {
                  at::AutoDispatchBelowADInplaceOrView below;
                  Tensor result = to;
                  at::native::copy_(result, from, false);
              },
              {bytes_of(into)});
}

/* ---- random numbers: a CPU generator, seeded by the CUDA generator's seed and offset ---- */

/* Take seed and offset from the generator. A graph reads them from memory at each launch. */
at::PhiloxCudaState take_numbers(const at::Generator &of_device) {
    auto *from = at::check_generator<at::CUDAGeneratorImpl>(of_device);
    std::lock_guard<std::mutex> held(from->mutex_);
    return from->philox_cuda_state(4);
}

void draw(const at::PhiloxCudaState &numbers, const std::function<void()> &run) {
    uint64_t seed = numbers.captured_ ? (uint64_t)*numbers.seed_.ptr : numbers.seed_.val;
    uint64_t offset =
        numbers.captured_ ? (uint64_t)*numbers.offset_.ptr + numbers.offset_intragraph_ : numbers.offset_.val;
    at::Generator cpu = at::detail::getDefaultCPUGenerator();
    Tensor before;
    {
        std::lock_guard<std::mutex> held(cpu.mutex());
        before = cpu.get_state();
        cpu.set_current_seed(seed * 1000003 + offset * 7919 + 1);
    }
    run();
    std::lock_guard<std::mutex> held(cpu.mutex());
    cpu.set_state(before);
}

/* ---- one call ---- */

/* Return true if the sizes of the operator's results depend on values. */
bool makes_the_host_wait(const std::string &name) {
    static const names all = {"aten::equal",    "aten::nonzero",          "aten::masked_select",
                              "aten::_unique2", "aten::unique_dim",       "aten::unique_consecutive",
                              "aten::bincount", "aten::repeat_interleave"};
    return all.count(name) != 0;
}

class device_call final : public simulated_gpu::operator_call {
  public:
    device_call(const c10::OperatorHandle &operator_, Stack *values)
        : operator_call(operator_, values, c10::cuda::current_device()) {
    }

    void run() {
        find_device();
        c10::cuda::CUDAGuard guard(device);
        on = stream_on(device);
        std::optional<at::PhiloxCudaState> numbers;
        if (op.hasTag(at::Tag::nondeterministic_seeded)) {
            numbers = take_numbers(generator());
        }
        for (size_t i = 0; i < schema.arguments().size(); i++) {
            convert((*stack)[first + i]);
        }
        if (on->capture) {
            hold_with(numbers);
        }
        {
            fake::turn mine(on);
            at::AutoDispatchBelowADInplaceOrView below;
            auto compute = [&] { op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), stack); };
            if (numbers) {
                draw(*numbers, compute);
            } else {
                compute();
            }
        }
        return_results();
        if (on->capture) {
            on->capture->hold([kept = std::move(held)] { kept->run(); });
        }
        if (makes_the_host_wait(schema.name())) {
            c10::cuda::stream_synchronize(c10::cuda::getCurrentCUDAStream(device.index()));
        }
    }

  private:
    CUstream_st *on = nullptr;

    /* For a capture: the operator that the graph runs, with the memory that the run of this call writes. */
    void hold_with(const std::optional<at::PhiloxCudaState> &numbers) {
        hold_arguments();
        if (numbers) {
            held->surround([kept = *numbers](const auto &run) { draw(kept, run); });
        }
        for (size_t i = 0; i < schema.arguments().size(); i++) {
            const c10::AliasInfo *alias = schema.arguments()[i].alias_info();
            if (alias && alias->isWrite()) {
                for_each_tensor((*stack)[first + i],
                                [&](const Tensor &each) { on->capture->save(bytes_of(each)); });
            }
        }
    }

    at::Generator generator() const {
        for (size_t i = first; i < stack->size(); i++) {
            if ((*stack)[i].isGenerator()) {
                return (*stack)[i].toGenerator();
            }
        }
        return at::cuda::detail::getDefaultCUDAGenerator(device.index());
    }

    Tensor to_cpu(const Tensor &tensor) {
        if (!tensor.defined() || !tensor.is_cuda()) {
            return tensor;
        }
        TORCH_CHECK(!tensor.numel() || tensor.storage().nbytes() >= needed_nbytes(tensor),
                    "CUDA error: an illegal memory access was encountered (", schema.name(),
                    " uses a tensor whose storage was freed)");
        return converted(tensor, [&] { return cpu_storage_of(tensor.storage()); });
    }

    void convert(IValue &value) {
        value = changed(value, [&](const Tensor &each) { return to_cpu(each); });
        if (value.isDevice() && value.toDevice().is_cuda()) {
            value = c10::Device(c10::kCPU);
        } else if (value.isGenerator()) {
            value = at::detail::getDefaultCPUGenerator();
        }
    }

    void make_room_for(const Tensor &resized) override {
        if (resized.numel() && needed_nbytes(resized) > resized.storage().nbytes()) {
            at::native::resize_bytes_cuda(resized.storage().unsafeGetStorageImpl(), needed_nbytes(resized));
        }
    }

    Tensor new_tensor(const Tensor &like) override {
        return at::detail::empty_strided_cuda(like.sizes(), like.strides(), like.scalar_type(), device);
    }

    void fill(const Tensor &original, const Tensor &cpu) override {
        if (!cpu.numel()) {
            return;
        }
        if (on->capture) {
            on->capture->save(bytes_of(original));
            hold_fill(original, cpu);
        }
        fake::turn mine(on);
        at::AutoDispatchBelowADInplaceOrView below;
        Tensor into = as_cpu(original);
        at::native::copy_(into, cpu, false);
    }
};

void by_cpu(const c10::OperatorHandle &op, c10::DispatchKeySet, Stack *stack) {
    device_call(op, stack).run();
}

/* ---- operators with kernels of their own ---- */

bool is_of_bytes(const Tensor &self, const Tensor &source) {
    bool same_memory = (self.is_contiguous() && source.is_contiguous()) ||
                       (self.is_non_overlapping_and_dense() && source.is_non_overlapping_and_dense() &&
                        self.strides() == source.strides() && self.sizes() == source.sizes());
    return same_memory && self.dtype() == source.dtype() && self.is_conj() == source.is_conj() &&
           self.is_neg() == source.is_neg() && self.numel() == source.numel();
}

/* Copies of bytes, and between host and device, stay torch's own; this function replaces the kernels. Like in
 * torch, a copy between devices runs on the source's stream, which waits for the destination's stream, and
 * the destination's stream waits for the copy. */
Tensor &copy_(Tensor &self, const Tensor &source, bool non_blocking) {
    if (self.is_cuda() && source.is_cuda() && self.numel() && !self.is_same(source) &&
        !is_of_bytes(self, source)) {
        c10::cuda::CUDAGuard guard(source.device());
        copy_later(stream_on(source.device()), borrowed(self), borrowed(source));
        return self;
    }
    return at::native::copy_(self, source, non_blocking);
}

/* Select the math kernel of scaled dot product attention, for which the CPU has all operators. */
int64_t choose_math(const Tensor &, const Tensor &, const Tensor &, const std::optional<Tensor> &, double,
                    bool, std::optional<double>, bool) {
    return 0;
}

/* aten::div and aten::div_: torch's CUDA kernel multiplies by the reciprocal of a divisor on the host. */
void divide(const c10::OperatorHandle &op, c10::DispatchKeySet, Stack *stack) {
    const c10::OperatorName &name = op.operator_name();
    size_t first = stack->size() - op.schema().arguments().size();
    const Tensor self = (*stack)[first].toTensor(), other = (*stack)[first + 1].toTensor();
    if (!other.is_cpu() || other.dim() != 0 || !at::isFloatingType(at::result_type(self, other))) {
        device_call(op, stack).run();
        return;
    }
    Tensor factor = at::scalar_tensor(1.0 / other.item<double>(), at::kDouble);
    factor.unsafeGetTensorImpl()->set_wrapped_number(true);
    (*stack)[first + 1] = factor;
    auto mul = c10::Dispatcher::singleton().findSchemaOrThrow(
        name.name == "aten::div" ? "aten::mul" : "aten::mul_", name.overload_name.c_str());
    device_call(mul, stack).run();
}

/* ---- registration ---- */

bool stays(const c10::OperatorName &name) {
    static const names all = {"aten::empty",
                              "aten::empty_strided",
                              "aten::as_strided",
                              "aten::view",
                              "aten::_reshape_alias",
                              "aten::resize_",
                              "aten::set_",
                              "aten::is_set_to",
                              "aten::record_stream",
                              "aten::unfold",
                              "aten::_local_scalar_dense",
                              "aten::is_pinned",
                              "aten::_pin_memory",
                              "aten::_efficientzerotensor",
                              "aten::_fused_sdp_choice",
                              "aten::copy_",
                              "aten::_sparse_coo_tensor_with_dims"};
    return all.count(name.name) != 0 || name.name.rfind("aten::", 0) != 0;
}

torch::Library &library() {
    static auto *made =
        new torch::Library(torch::Library::IMPL, "aten", c10::DispatchKey::CUDA, __FILE__, __LINE__);
    return *made;
}

struct silent : c10::WarningHandler {
    void process(const c10::Warning &) override {
    }
};

[[maybe_unused]] const bool installed = [] {
    silent quiet; /* replacing kernels is intended */
    c10::WarningUtils::WarningHandlerGuard guard(&quiet);
    for (const c10::OperatorName &name :
         c10::Dispatcher::singleton().getRegistrationsForDispatchKey(c10::DispatchKey::CUDA)) {
        auto op = c10::Dispatcher::singleton().findOp(name);
        if (stays(name) || !op || !op->hasSchema()) {
            continue;
        }
        std::string full = name.name + (name.overload_name.empty() ? "" : "." + name.overload_name);
        library().impl(full.c_str(), torch::CppFunction::makeFromBoxedFunction<&by_cpu>());
    }
    library().impl("copy_", TORCH_FN(copy_));
    library().impl("_fused_sdp_choice", TORCH_FN(choose_math));
    for (const char *each : {"div.out", "div.Tensor", "div_.Tensor"}) {
        library().impl(each, torch::CppFunction::makeFromBoxedFunction<&divide>());
    }
    return true;
}();

} // namespace
