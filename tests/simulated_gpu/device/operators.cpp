/* The operators of device type CUDA: those of the CPU on the same memory, with what they touch written down.
 *
 * Memory, views and copies are done here by themselves. Every other operator takes the one way of
 * device_call: its tensors become tensors of the CPU on the same memory, the CPU's kernel runs, and its
 * results become tensors of the device. */
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
#include "held_operator.h"
#include "later.h"
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

/* One operator, on the host and then on the device. */
static void spend(stream *on, const char *name, enum span_kind kind, double us, device_use use) {
    host_spends(in_fsdp() ? costs().launch : costs().op);
    device_spends(on, name, kind, us, use);
}

static void spend_view() {
    host_spends(in_fsdp() ? 0 : costs().view);
}

/* Of matrices, or of batches of them. */
static double flops_of_product(const Tensor &one, const Tensor &other) {
    return 2.0 * (double)one.numel() * (double)other.size(-1);
}

static double us_of_product(const Tensor &one, const Tensor &other) {
    double per_us = one.element_size() <= 2 ? costs().flops_16 : costs().flops_32;
    return costs().product + flops_of_product(one, other) / per_us;
}

/* By its floating-point operations; 0: it has none. */
static double us_of_flops(const std::string &name, const IValue *arguments) {
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

/* CUDA's kernels of norms go twice through what comes in: for the gradient of the input, and of the weight.
 */
static bool reads_twice(const std::string &name) {
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

static int64_t num_launches(const c10::FunctionSchema &schema, const IValue *arguments) {
    return is_of_lists(schema.name())   ? launches_over_lists(schema, arguments)
           : reads_twice(schema.name()) ? 2
                                        : 1;
}

/* Of what it is given to change it reads nothing. */
static bool overwrites(const std::string &name) {
    static const names all = {"aten::fill_",    "aten::zero_",          "aten::normal_",
                              "aten::uniform_", "aten::_foreach_copy_", "aten::_foreach_zero_"};
    return all.count(name) != 0;
}

/* It reads as much of its tensors as it gives. */
static bool reads_what_it_gives(const std::string &name) {
    static const names all = {"aten::index_select", "aten::embedding", "aten::gather", "aten::index"};
    return all.count(name) != 0;
}

/* ---- memory and views ---- */

/* In deterministic mode torch writes to memory that it hands out, by a kernel on the stream that is
 * current. */
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

/* A tensor may show more than its storage holds once its sizes or its storage were set. */
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

/* What a launch takes with it: addresses, but the values of memory that is not pinned. */
static Tensor lasting(const Tensor &source) {
    return is_pageable(source) ? source.clone() : borrowed(source);
}

/* Bytes: numbers that the host may look at are copied even where nothing is computed. */
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

/* As cudaMemcpyAsync: memory that is not pinned goes by way of a staging buffer, so that nobody races with
 * the host; for what ends there the host waits, as it does for every copy that may block. */
static void copy_between(const Tensor &self, const Tensor &source, bool non_blocking) {
    stream *on = current_stream_of(source.is_cuda() ? source : self);
    stream *other = self.is_cuda() ? current_stream_of(self) : on; /* of the device that is written */
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
                     from = is_later(on) ? lasting(source) : as_cpu(source)]() mutable {
            if (!is_computed) {
                return;
            }
            at::AutoDispatchBelowADInplaceOrView below;
            at::native::copy_(into, from, false);
        };
        if (is_later(on)) {
            hold(on, copy);
        }
        graph *capturing = graph_of(on->capture);
        if (capturing && self.is_cuda()) { /* values for those that follow, until the capture's end */
            saved_memory before;
            before.save(self);
            capturing->at_end([before]() mutable { before.restore(); });
        }
        if (!is_late(on) && (!capturing || self.is_cuda())) {
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

/* The sizes, or the values, of their results are known to the host alone once the device is through. */
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

/* Values that are addresses, and would be wrong ones before they are there. */
static bool may_hold_indices(const Tensor &tensor) {
    return at::isIntegralType(tensor.scalar_type(), false);
}

class device_call {
  public:
    device_call(const c10::OperatorHandle &operator_, Stack *values)
        : op(operator_), schema(operator_.schema()), stack(values),
          first(values->size() - schema.arguments().size()) {
    }

    void run() {
        find_device();
        is_held = is_later(on);
        if (is_held && !on->capture && must_run_now()) {
            run_held(on);
            is_held = false;
        }
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
            hold_arguments(draws);
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
        if (is_held) {
            note_places(stack->size() - schema.returns().size(), stack->size(), true);
        }
        for (auto &[_, pair] : originals) {
            follow(pair.first, pair.second);
        }
        size_t begin = stack->size() - schema.returns().size();
        for (size_t i = begin; i < stack->size(); i++) {
            bring_back((*stack)[i]);
        }
        if (is_held) {
            simulated_gpu::hold(on, [kept = std::move(held)] { kept->run(); });
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
    const c10::OperatorHandle &op;
    const c10::FunctionSchema &schema;
    Stack *stack;
    size_t first; /* of the arguments on the stack */
    at::Device device{c10::kCUDA, 0};
    stream *on = nullptr;
    std::unordered_map<c10::TensorImpl *, std::pair<Tensor, Tensor>>
        originals;                                                 /* by the CPU's: the device's, the CPU's */
    std::unordered_map<c10::StorageImpl *, c10::Storage> storages; /* by the device's: the CPU's */
    std::vector<std::pair<Tensor, enum access>> accesses;
    double moved_nbytes = 0; /* to and from the device's memory */
    bool is_view = true;     /* it touches nothing */

    /* A write reads too, unless the operator replaces all that was there. */
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

    /* Of work that runs later: it runs now as well, as nothing else tells what its results will be, and is
     * undone. */
    bool is_held = false;
    std::shared_ptr<held_operator> held;
    std::unordered_map<c10::TensorImpl *, value_place> places; /* by the CPU's tensors */
    saved_memory saved;

    bool must_run_now() const {
        bool must = makes_the_host_wait(schema.name()) || op.hasTag(at::Tag::nondeterministic_seeded);
        for (size_t i = first; i < stack->size(); i++) {
            for_each_tensor((*stack)[i], [&](const Tensor &each) {
                must = must || (each.is_cuda() && may_hold_indices(each));
            });
        }
        return must;
    }

    void hold_arguments(bool draws) {
        Stack arguments(stack->begin() + (ptrdiff_t)first, stack->end());
        held = std::make_shared<held_operator>(op, arguments, [&](const Tensor &each) {
            return originals.count(each.unsafeGetTensorImpl()) != 0;
        });
        if (draws) {
            held->surround([index = device.index()](const auto &run) {
                drawing_from numbers(index);
                run();
            });
        }
        note_places(first, stack->size(), false);
    }

    void note_places(size_t begin, size_t end, bool are_results) {
        held_operator::for_each_place(*stack, begin, end, are_results,
                                      [&](const Tensor &each, value_place place) {
                                          places.insert({each.unsafeGetTensorImpl(), place});
                                      });
    }

    /* Before it is written. */
    void save(const Tensor &tensor) {
        if (is_held) {
            saved.save(tensor);
        }
    }

    /* What is captured works on the values that were there until the capture's end, as indices among them
     * must be right. */
    void undo() {
        if (graph *capturing = graph_of(on->capture)) {
            capturing->at_end([kept = std::move(saved)]() mutable { kept.restore(); });
        } else {
            saved.restore();
        }
    }

    void find_device() {
        bool found = false, has_cpu_tensor = false;
        auto look = [&](const Tensor &each) {
            if (each.is_cuda()) {
                TORCH_CHECK(!found || device == each.device(),
                            "Expected all tensors to be on the same device, but found "
                            "",
                            "at least two devices, ", device, " and ", each.device(), "! (", schema.name(),
                            ")");
                device = each.device();
                found = true;
            }
            has_cpu_tensor = has_cpu_tensor || (each.is_cpu() && each.dim() > 0);
        };
        for (size_t i = first; i < stack->size(); i++) {
            const IValue &value = (*stack)[i];
            for_each_tensor(value, look);
            if (value.isDevice() && value.toDevice().is_cuda() && !found) {
                int index = value.toDevice().index();
                device = device_of_index(index < 0 ? current_device() : index);
            }
        }
        TORCH_CHECK(!found || !has_cpu_tensor || takes_cpu_tensors(schema.name()),
                    "Expected all tensors to be on the ",
                    "same device, but found at least two devices, "
                    "",
                    device, " and cpu! (", schema.name(), ")");
        on = current_stream(device.index());
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
        c10::StorageImpl *storage = tensor.storage().unsafeGetStorageImpl();
        auto found = storages.find(storage);
        if (found == storages.end()) {
            found = storages.insert({storage, working_storage_of(tensor.storage())}).first;
        }
        Tensor made = as_cpu(tensor, found->second);
        originals[made.unsafeGetTensorImpl()] = {tensor, made};
        return made;
    }

    void convert(IValue &value, const c10::Argument &argument) {
        const c10::AliasInfo *alias = argument.alias_info();
        bool is_access = !alias || alias->isWrite(); /* a view touches nothing */
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

    /* An output that the operator resized is resized too. */
    void follow(const Tensor &original, const Tensor &cpu) {
        bool is_same_memory = cpu.is_meta() || original.storage().data() == cpu.storage().data();
        if (is_same_memory && original.sizes() == cpu.sizes() && original.strides() == cpu.strides()) {
            return;
        }
        original.unsafeGetTensorImpl()->set_sizes_and_strides(cpu.sizes(), cpu.strides(),
                                                              cpu.storage_offset());
        make_room(original);
        if (!is_same_memory) {
            fill(original, cpu);
        }
    }

    void fill(const Tensor &original, const Tensor &cpu) {
        launch launch(on, schema.name().c_str());
        touch(launch, original, WRITE);
        count_bytes(original, WRITE, true);
        if (is_held) {
            save(original);
            held->fill(places.at(cpu.unsafeGetTensorImpl()), original);
        }
        if (cpu.numel() && !cpu.is_meta()) {
            at::AutoDispatchBelowADInplaceOrView below;
            Tensor into = as_cpu(original);
            at::native::copy_(into, cpu, false);
        }
    }

    /* An argument, a view of one's storage, or memory of its own. */
    Tensor from_cpu(const Tensor &cpu) {
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
        Tensor made =
            empty_strided(cpu.sizes(), cpu.strides(), cpu.scalar_type(), std::nullopt, device, std::nullopt);
        fill(made, cpu);
        mark_wrapped_number(made, cpu);
        return made;
    }

    void bring_back(IValue &value) {
        value = changed(value, [&](const Tensor &cpu) { return from_cpu(cpu); });
    }
};

static void fallback(const c10::OperatorHandle &op, c10::DispatchKeySet, Stack *stack) {
    device_call(op, stack).run();
}

/* torch's CUDA kernel multiplies by the reciprocal where the divisor is a number of the host. */
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

/* Kernels of a GPU's own, where a build for the CPU composes operators or loops over tensors, so that time
 * and what autograd saves are a GPU's: all that torch's native_functions.yaml has a kernel for CUDA of. */
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
    if (has_only_shapes()) { /* the CPU has no kernel for its backward */
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

/* ---- what the host does with pinned memory ---- */

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

/* Called before each operator: one of the CPU that touches pinned memory is an access of the host. */
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

/* ---- an FSDP's own code, by the ranges that it names for the profiler ---- */

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
