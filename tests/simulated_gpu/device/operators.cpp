/* Operators of device type CUDA: CPU kernels on the same memory, with their accesses recorded.
 *
 * Allocation, views and copies have kernels here. Every other operator is a device_call: its tensors become
 * CPU tensors on the same memory, the CPU kernel runs, and its results become device tensors. */
#include <ATen/EmptyTensor.h>
#include <ATen/ExpandUtils.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/native/Resize.h>
#include <ATen/ops/_local_scalar_dense.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/copy_native.h>
#include <ATen/ops/view_native.h>
#include <ATen/record_function.h>
#include <c10/core/DeviceGuard.h>
#include <torch/library.h>

#include <cstring>
#include <limits>
#include <unordered_map>
#include <unordered_set>

#include "graph.h"
#include "operator_call.h"
#include "operator_costs.h"
#include "tensors.h"

namespace simulated_gpu {

using at::IntArrayRef;
using at::Tensor;
using c10::IValue;
using torch::jit::Stack;
using names = std::unordered_set<std::string>;

static stream *current_stream_of(const Tensor &tensor) {
    return current_stream(tensor.device().index());
}

/* ---- time: timeline.h ---- */

/* Charge one operator to the host and to the device. */
static void spend(stream *on, const char *name, enum span_kind kind, double us, device_use use) {
    host_spends(in_fsdp() ? costs().launch : costs().op);
    device_spends(on, name, kind, us, use);
}

static void spend_view() {
    host_spends(in_fsdp() ? 0 : costs().view);
}

/* ---- memory and views ---- */

/* Fill new memory on the current stream in deterministic mode, like torch. */
static Tensor filled(Tensor fresh) {
    const at::Context &context = at::globalContext();
    if (context.deterministicAlgorithms() && context.deterministicFillUninitializedMemory() && fresh.numel())
        fresh.fill_(fresh.is_floating_point() ? std::numeric_limits<double>::quiet_NaN() : 1.0);
    return fresh;
}

static Tensor empty(IntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
                    std::optional<at::Device> device, std::optional<bool>,
                    std::optional<at::MemoryFormat> format) {
    c10::OptionalDeviceGuard guard(device);
    return filled(at::detail::empty_generic(size, c10::GetAllocator(c10::kCUDA),
                                            c10::DispatchKeySet(c10::DispatchKey::CUDA),
                                            c10::dtype_or_default(dtype), format));
}

static Tensor empty_strided(IntArrayRef size, IntArrayRef stride, std::optional<at::ScalarType> dtype,
                            std::optional<at::Layout>, std::optional<at::Device> device,
                            std::optional<bool>) {
    c10::OptionalDeviceGuard guard(device);
    return filled(at::detail::empty_strided_generic(size, stride, c10::GetAllocator(c10::kCUDA),
                                                    c10::DispatchKeySet(c10::DispatchKey::CUDA),
                                                    c10::dtype_or_default(dtype)));
}

/* Grow the storage if new sizes or a new storage reach beyond its end. */
static void make_room(const Tensor &tensor) {
    size_t needed = needed_nbytes(tensor);
    if (tensor.numel() && needed > tensor.storage().nbytes()) {
        resize_storage(tensor.storage().unsafeGetStorageImpl(), needed);
    }
}

static bool has_memory(const Tensor &tensor) {
    return !tensor.numel() || tensor.storage().nbytes() >= needed_nbytes(tensor);
}

static const Tensor &resize_(const Tensor &self, IntArrayRef size, std::optional<at::MemoryFormat> format) {
    if (self.sizes() != size) {
        self.unsafeGetTensorImpl()->set_sizes_contiguous(size);
    }
    make_room(self);
    if (format) {
        self.unsafeGetTensorImpl()->empty_tensor_restride(*format);
    }
    return self;
}

static Tensor &set_storage(Tensor &self, at::Storage source, int64_t offset, IntArrayRef size,
                           IntArrayRef stride) {
    c10::TensorImpl *impl = self.unsafeGetTensorImpl();
    TORCH_CHECK(source.device() == self.device(), "Attempted to set the storage of a tensor on device ",
                self.device(), " to a storage on different device ", source.device());
    impl->set_storage_keep_dtype(std::move(source));
    if (stride.data()) {
        impl->set_sizes_and_strides(size, stride, offset);
    } else {
        impl->set_storage_offset(offset);
        impl->set_sizes_contiguous(size);
    }
    make_room(self);
    return self;
}

static Tensor &set_whole_storage(Tensor &self, at::Storage source) {
    int64_t numel = (int64_t)(source.nbytes() / self.element_size());
    return set_storage(self, std::move(source), 0, {numel}, IntArrayRef());
}

static Tensor &set_tensor(Tensor &self, const Tensor &source) {
    return set_storage(self, source.storage(), source.storage_offset(), source.sizes(), source.strides());
}

static bool is_set_to(const Tensor &self, const Tensor &source) {
    return self.storage().unsafeGetStorageImpl() == source.storage().unsafeGetStorageImpl() &&
           self.storage_offset() == source.storage_offset() && self.sizes() == source.sizes() &&
           self.strides() == source.strides();
}

static void record_stream_of(Tensor &self, c10::Stream user) {
    record_stream(self.storage().mutable_data(), stream_of(user));
}

/* ---- copies ---- */

static bool is_pageable(const Tensor &tensor) {
    return tensor.is_cpu() && !is_pinned(tensor.storage().data());
}

static const char *name_of_copy(const Tensor &self, const Tensor &source) {
    return self.is_cpu() ? "copy_ to the host" : source.is_cpu() ? "copy_ from the host" : "copy_";
}

/* Return the source that a held copy reads: a copy of pageable memory, otherwise the same memory. */
static Tensor lasting(const Tensor &source) {
    return is_pageable(source) ? source.clone() : borrowed(source);
}

/* Largest copy, in bytes, that moves values when operators run on shapes only: the host may read them. */
static const double SMALL_COPY = 1 << 16;

static void spend_copy(stream *on, const Tensor &self, const Tensor &source) {
    if (self.is_cuda() && source.is_cuda()) {
        double nbytes = nbytes_of(self) + nbytes_of(source), us = us_of_bytes(nbytes);
        spend(on, "aten::copy_", COMPUTE, us, use_of(us, nbytes));
    } else {
        double us = costs().least + nbytes_of(self) / costs().pcie;
        spend(on, name_of_copy(self, source), COPY, us, use_of(us, nbytes_of(self)));
    }
}

/* Copy like cudaMemcpyAsync: pageable memory passes through a staging buffer, so the host cannot race with
 * the copy. The host waits for copies into pageable memory, and for all copies that are not non_blocking. */
static void copy_between(const Tensor &self, const Tensor &source, bool non_blocking) {
    stream *on = current_stream_of(source.is_cuda() ? source : self);
    stream *other = self.is_cuda() ? current_stream_of(self) : on; /* stream of the written device */
    event before{}, after{};
    if (other != on) {
        event_record(&before, other);
        stream_wait(on, &before);
    }
    bool pageable = is_pageable(self) || is_pageable(source);
    bool is_between_devices = !self.is_cuda() || !source.is_cuda();
    {
        launch launch(on, name_of_copy(self, source));
        if (source.is_cuda() || !pageable) {
            touch(launch, source, READ);
        }
        if (self.is_cuda() || !pageable) {
            touch(launch, self, WRITE);
        }
        bool is_computed = !has_only_shapes() || (is_between_devices && nbytes_of(self) <= SMALL_COPY);
        auto copy = [is_computed, into = borrowed(self),
                     from = on->capture ? lasting(source) : as_cpu(source)]() mutable {
            if (!is_computed) {
                return;
            }
            at::AutoDispatchBelowADInplaceOrView below;
            at::native::copy_(into, from, false);
        };
        if (on->capture) {
            run_or_hold(on, copy);
        }
        graph *capturing = graph_of(on->capture);
        if (capturing && self.is_cuda()) { /* values for later operators, restored at the capture's end */
            saved_memory before;
            before.save(self);
            capturing->at_end([before]() mutable { before.restore(); });
        }
        if (!capturing || self.is_cuda()) {
            copy();
        }
    }
    spend_copy(on, self, source);
    if (other != on) {
        event_record(&after, on);
        stream_wait(other, &after);
    }
    if (is_between_devices && !non_blocking) {
        wait_as_torch(on);
    } else if (is_between_devices && is_pageable(self)) {
        host_wait_stream(on);
    }
}

static Tensor &copy_(Tensor &self, const Tensor &source, bool non_blocking) {
    TORCH_CHECK(source.device().is_cuda() || source.is_cpu(), "copy_ from ", source.device());
    if (self.numel() && !self.is_same(source)) {
        copy_between(self, source.expand_as(self), non_blocking);
    }
    return self;
}

static at::Scalar local_scalar_dense(const Tensor &self) {
    {
        launch launch(current_stream_of(self), "item");
        touch(launch, self, READ);
    }
    spend(current_stream_of(self), "item", COPY, costs().least, {});
    wait_as_torch(current_stream_of(self));
    return at::_local_scalar_dense(as_cpu(self));
}

/* ---- every other operator ---- */

/* Return true if the host needs the device's results for sizes or values. */
static bool makes_the_host_wait(const std::string &name) {
    static const names all = {"aten::equal",
                              "aten::nonzero",
                              "aten::masked_select",
                              "aten::_unique2",
                              "aten::unique_dim",
                              "aten::unique_consecutive",
                              "aten::repeat_interleave",
                              "aten::bincount",
                              "aten::histc",
                              "aten::_assert_async_wait"};
    return all.count(name) != 0;
}

class device_call final : public operator_call {
  public:
    device_call(const c10::OperatorHandle &operator_, Stack *values)
        : operator_call(operator_, values, (c10::DeviceIndex)current_device()) {
    }

    void run() {
        find_device();
        on = current_stream(device.index());
        is_held = on->capture != 0;
        for (size_t i = 0; i < schema.arguments().size(); i++) {
            convert((*stack)[first + i], schema.arguments()[i]);
        }
        write_down();
        const IValue *arguments = stack->data() + first;
        double us_by_flops = is_timed() ? us_of_flops(schema.name(), arguments) : 0;
        int64_t launches = is_timed() ? num_launches(schema, arguments) : 1;
        bool draws = !has_only_shapes() && op.hasTag(at::Tag::nondeterministic_seeded);
        at::Tensor numbers_before =
            draws ? cpu_generator_in(default_generator(device.index())).get_state() : at::Tensor();
        if (is_held) {
            hold_arguments();
        }
        if (is_held && draws) {
            held->surround([index = device.index()](const auto &run) {
                drawing_from numbers(index);
                run();
            });
        }
        {
            at::AutoDispatchBelowADInplaceOrView below;
            std::optional<drawing_from> numbers;
            if (draws) {
                numbers.emplace(device.index());
            }
            op.redispatchBoxed(
                c10::DispatchKeySet(has_only_shapes() ? c10::DispatchKey::Meta : c10::DispatchKey::CPU),
                stack);
        }
        return_results();
        if (is_held) {
            run_or_hold(on, [kept = std::move(held)] { kept->run(); });
            undo();
            if (draws) {
                cpu_generator_in(default_generator(device.index())).set_state(numbers_before);
            }
        }
        if (is_timed()) {
            spend_time(us_by_flops, launches);
        }
        if (makes_the_host_wait(schema.name())) {
            wait_as_torch(on);
        }
    }

  private:
    stream *on = nullptr;
    std::vector<std::pair<Tensor, enum access>> accesses;
    double moved_nbytes = 0; /* bytes to and from device memory */
    bool is_view = true;     /* true if the operator accesses no memory */

    /* Count a write twice, because it also reads, unless the operator replaces the tensor. */
    void count_bytes(const Tensor &tensor, enum access how, bool is_replaced) {
        is_view = false;
        bool reads_part = reads_what_it_gives(schema.name());
        if (how == WRITE) {
            moved_nbytes += nbytes_of(tensor) * (is_replaced && !reads_part ? 1 : 2);
        } else if (!reads_part) {
            moved_nbytes += nbytes_of(tensor) * (reads_twice(schema.name()) ? 2 : 1);
        }
    }

    void spend_time(double us_by_flops, int64_t launches) const {
        if (is_view) {
            spend_view();
            return;
        }
        double share = 1.0 / (double)launches;
        double us = std::max(us_of_bytes(moved_nbytes * share), us_by_flops * share);
        device_use use = use_of(us, moved_nbytes * share, us_by_flops * share);
        spend(on, schema.name().c_str(), COMPUTE, us, use);
        for (int64_t i = 1; i < launches; i++) {
            host_spends(costs().launch);
            device_spends(on, schema.name().c_str(), COMPUTE, us, use);
        }
    }

    /* State of held work. It runs now as well, to find the sizes of its results, and is undone. */
    bool is_held = false;
    saved_memory saved;

    /* Before it is written. */
    void save(const Tensor &tensor) {
        if (is_held) {
            saved.save(tensor);
        }
    }

    /* Undo the run. Captured work is undone at the capture's end, because later operators may use its results
     * as indices. */
    void undo() {
        graph_of(on->capture)->at_end([kept = std::move(saved)]() mutable { kept.restore(); });
    }

    Tensor to_cpu(const Tensor &tensor, bool is_access, enum access how, bool is_replaced) {
        if (!tensor.defined() || !tensor.is_cuda()) {
            return tensor;
        }
        if (is_access) {
            TORCH_CHECK(has_memory(tensor), "CUDA error: an illegal memory access was encountered (",
                        schema.name(), " uses a tensor whose storage was freed)");
            accesses.push_back({tensor, how});
            count_bytes(tensor, how, is_replaced);
        }
        return converted(tensor, [&] { return working_storage_of(tensor.storage()); });
    }

    void convert(IValue &value, const c10::Argument &argument) {
        const c10::AliasInfo *alias = argument.alias_info();
        bool is_access = !alias || alias->isWrite(); /* a view accesses no memory */
        enum access how = alias && alias->isWrite() ? WRITE : READ;
        bool is_replaced = argument.is_out() || overwrites(schema.name());
        value = changed(value, [&](const Tensor &each) { return to_cpu(each, is_access, how, is_replaced); });
        if (value.isDevice() && value.toDevice().is_cuda()) {
            value = c10::Device(has_only_shapes() ? c10::kMeta : c10::kCPU);
        } else if (value.isGenerator()) {
            value = cpu_generator_in(value.toGenerator());
        }
    }

    void write_down() {
        launch launch(on, schema.name().c_str());
        for (enum access how : {READ, WRITE}) {
            for (auto &[tensor, done] : accesses) {
                if (done == how) {
                    touch(launch, tensor, how);
                }
                if (done == how && how == WRITE) {
                    save(tensor);
                }
            }
        }
    }

    void make_room_for(const Tensor &resized) override {
        make_room(resized);
    }

    Tensor new_tensor(const Tensor &like) override {
        return empty_strided(like.sizes(), like.strides(), like.scalar_type(), std::nullopt, device,
                             std::nullopt);
    }

    void fill(const Tensor &original, const Tensor &cpu) override {
        launch launch(on, schema.name().c_str());
        touch(launch, original, WRITE);
        count_bytes(original, WRITE, true);
        if (is_held) {
            save(original);
            hold_fill(original, cpu);
        }
        if (cpu.numel() && !cpu.is_meta()) {
            at::AutoDispatchBelowADInplaceOrView below;
            Tensor into = as_cpu(original);
            at::native::copy_(into, cpu, false);
        }
    }
};

static void fallback(const c10::OperatorHandle &op, c10::DispatchKeySet, Stack *stack) {
    device_call(op, stack).run();
}

/* torch's CUDA kernel multiplies by the reciprocal of a divisor on the host. */
static Tensor &divide(const Tensor &self, const Tensor &other, Tensor &out) {
    static auto mul = c10::Dispatcher::singleton().findSchemaOrThrow("aten::mul", "out");
    static auto div = c10::Dispatcher::singleton().findSchemaOrThrow("aten::div", "out");
    bool by_number = other.is_cpu() && other.dim() == 0 && at::isFloatingType(out.scalar_type());
    Tensor factor = by_number ? at::scalar_tensor(1.0 / other.item<double>(), at::kDouble) : other;
    if (by_number) {
        factor.unsafeGetTensorImpl()->set_wrapped_number(true);
    }
    Stack stack = {self, factor, out};
    device_call(by_number ? mul : div, &stack).run();
    return out;
}

TORCH_LIBRARY_IMPL(_, CUDA, library) {
    library.fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>());
}

TORCH_LIBRARY_IMPL(aten, CUDA, library) {
    library.impl("empty.memory_format", TORCH_FN(empty));
    library.impl("empty_strided", TORCH_FN(empty_strided));
    library.impl("as_strided", TORCH_FN(at::native::as_strided_tensorimpl));
    library.impl("view", TORCH_FN(at::native::view));
    library.impl("resize_", TORCH_FN(resize_));
    library.impl("set_.source_Storage_storage_offset", TORCH_FN(set_storage));
    library.impl("set_.source_Storage", TORCH_FN(set_whole_storage));
    library.impl("set_.source_Tensor", TORCH_FN(set_tensor));
    library.impl("is_set_to", TORCH_FN(is_set_to));
    library.impl("record_stream", TORCH_FN(record_stream_of));
    library.impl("copy_", TORCH_FN(copy_));
    library.impl("_local_scalar_dense", TORCH_FN(local_scalar_dense));
    library.impl("div.out", TORCH_FN(divide));
}

/* Single kernels for operators that have a CUDA kernel in torch's native_functions.yaml, while a CPU build
 * composes other operators or loops over tensors: time and saved tensors are then those of a GPU. */
TORCH_LIBRARY_IMPL(aten, CUDA, library) {
    if (!is_timed()) {
        return;
    }
    std::vector<std::string> names = {"_chunk_cat",        "_chunk_cat.out",
                                      "_grouped_mm",       "addr",
                                      "addr.out",          "all.dims_out",
                                      "any.dims_out",      "convolution_backward",
                                      "linalg__powsum",    "mish_backward",
                                      "native_group_norm", "native_layer_norm",
                                      "silu_backward",     "split_with_sizes_copy.out"};
    if (has_only_shapes()) { /* the CPU has no kernel for the backward */
        names.push_back("_fused_rms_norm");
    }
    for (const c10::OperatorName &each : c10::Dispatcher::singleton().getAllOpNames()) {
        bool writes_to_out = each.overload_name.find("out") != std::string::npos;
        if (each.name.rfind("aten::_foreach_", 0) == 0 && !writes_to_out) {
            names.push_back(c10::toString(each).substr(strlen("aten::")));
        }
    }
    for (const std::string &name : names) {
        library.impl(name.c_str(), torch::CppFunction::makeFromBoxedFunction<&fallback>());
    }
}

/* ---- host accesses to pinned memory ---- */

static bool reads_no_values(const char *name) {
    static const names all = {"aten::to",
                              "aten::_to_copy",
                              "aten::copy_",
                              "aten::empty_like",
                              "aten::is_pinned",
                              "aten::pin_memory",
                              "aten::_pin_memory",
                              "aten::set_",
                              "aten::resize_",
                              "aten::zeros_like",
                              "aten::ones_like",
                              "aten::cuda",
                              "aten::cpu",
                              "aten::empty_strided",
                              "aten::new_empty",
                              "aten::new_zeros",
                              "aten::clone",
                              "aten::contiguous",
                              "aten::detach",
                              "aten::detach_",
                              "aten::requires_grad_",
                              "aten::_has_compatible_shallow_copy_type",
                              "aten::result_type"};
    return all.count(name) != 0;
}

/* Called before each operator. A CPU operator on pinned memory is an access of the host. */
static std::unique_ptr<at::ObserverContext> watch_host(const at::RecordFunction &function) {
    if (!any_pinned() || reads_no_values(function.name())) {
        return nullptr;
    }
    auto schema = function.operator_schema();
    auto inputs = function.inputs();
    if (!schema || schema->arguments().size() != inputs.size()) {
        return nullptr;
    }
    std::vector<std::pair<Tensor, enum access>> found;
    bool is_of_device = false;
    auto look = [&](const Tensor &tensor, const c10::AliasInfo *alias) {
        is_of_device = is_of_device || (tensor.defined() && tensor.is_cuda());
        if (tensor.defined() && tensor.is_cpu() && tensor.has_storage() &&
            is_pinned(tensor.storage().data()) && (!alias || alias->isWrite())) {
            found.push_back({tensor, alias ? WRITE : READ});
        }
    };
    for (size_t i = 0; i < inputs.size(); i++) {
        const c10::AliasInfo *alias = schema->arguments()[i].alias_info();
        if (inputs[i].isTensor()) {
            look(inputs[i].toTensor(), alias);
        } else if (inputs[i].isTensorList()) {
            for (const Tensor &each : inputs[i].toTensorVector()) {
                look(each, alias);
            }
        }
    }
    if (is_of_device || found.empty()) {
        return nullptr;
    }
    launch launch(nullptr, function.name());
    for (auto &[tensor, how] : found) {
        touch(launch, tensor, how);
    }
    return nullptr;
}

/* ---- code of FSDP, recognised by its profiler ranges ---- */

struct range_of_fsdp : at::ObserverContext {};

static std::unique_ptr<at::ObserverContext> begin_range(const at::RecordFunction &function) {
    std::string name = function.name();
    bool is_fsdp1 =
        name.rfind("FullyShardedDataParallel.", 0) == 0 && name != "FullyShardedDataParallel.forward";
    if (name.rfind("FSDP::", 0) != 0 && !is_fsdp1) {
        return nullptr;
    }
    enter_fsdp();
    return std::make_unique<range_of_fsdp>();
}

static void end_range(const at::RecordFunction &, at::ObserverContext *context) {
    if (context) {
        leave_fsdp();
    }
}

[[maybe_unused]] static const bool registered = [] {
    if (is_timed()) {
        auto ranges = at::RecordFunctionCallback(&begin_range, &end_range);
        at::addGlobalCallback(ranges.scopes({at::RecordScope::USER_SCOPE}));
    }
    auto callback = at::RecordFunctionCallback(&watch_host);
    at::addGlobalCallback(callback.needsInputs(true).scopes({at::RecordScope::FUNCTION}));
    return true;
}();

} // namespace simulated_gpu
