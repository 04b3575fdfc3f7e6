/* Device type CUDA for a torch built for the CPU: memory, streams, events, generators and hooks. */
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/core/CachingHostAllocator.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include "tensors.h"
#include "timeline.h"

namespace simulated_gpu {

using c10::Device;
using c10::DeviceIndex;
using c10::Stream;

int sync_debug_mode;

static int index_of(Device device) {
    return device.has_index() ? device.index() : current_device();
}

stream *stream_of(Stream stream) {
    return stream_of_id(stream.device_index(), stream.id());
}

Stream torch_stream(stream *which) {
    return Stream(Stream::UNSAFE, device_of_index(which->device), which->id);
}

void wait_as_torch(stream *until) {
    TORCH_CHECK(sync_debug_mode != 2, "called a synchronizing CUDA operation");
    if (sync_debug_mode == 1) {
        TORCH_WARN("called a synchronizing CUDA operation");
    }
    host_wait_stream(until);
}

/* ---- memory ---- */

struct device_allocator final : c10::DeviceAllocator {
    c10::DataPtr allocate(size_t nbytes) override {
        int device = current_device();
        void *memory = device_alloc(nbytes, device, current_stream(device));
        TORCH_CHECK_WITH(OutOfMemoryError, memory || !nbytes, "CUDA out of memory. Tried to allocate ",
                         nbytes, " bytes. GPU ", device, " is simulated and has ", total_memory(), " bytes");
        return {memory, memory, &device_free, device_of_index(device)};
    }
    c10::DeleterFnPtr raw_deleter() const override {
        return &device_free;
    }
    void copy_data(void *to, const void *from, size_t nbytes) const override {
        stream *on = current_stream(current_device());
        launch launch(on, "copy of data");
        launch.access(from, nbytes, READ);
        launch.access(to, nbytes, WRITE);
        host_spends(costs().launch);
        double moved = 2.0 * (double)nbytes, us = us_of_bytes(moved);
        device_spends(on, "copy of data", COMPUTE, us, use_of(us, moved));
        if (!has_only_shapes()) {
            run_or_hold(on, [=] { memcpy(to, from, nbytes); });
        }
    }
    bool initialized() override {
        return true;
    }
    void emptyCache(c10::MempoolId_t) override {
        empty_cache();
    }
    void recordStream(const c10::DataPtr &data, Stream stream) override {
        record_stream(data.get(), stream_of(stream));
    }
    c10::CachingDeviceAllocator::DeviceStats getDeviceStats(DeviceIndex) override {
        return {};
    }
    void resetAccumulatedStats(DeviceIndex) override {
    }
    void resetPeakStats(DeviceIndex device) override {
        reset_peaks(device);
    }
};
static device_allocator allocator_of_device;

struct pinned_allocator final : at::HostAllocator {
    c10::DataPtr allocate(size_t nbytes) override {
        void *memory = pinned_alloc(nbytes);
        return {memory, memory, &pinned_free, c10::kCPU};
    }
    c10::DeleterFnPtr raw_deleter() const override {
        return &pinned_free;
    }
    void copy_data(void *to, const void *from, size_t nbytes) const override {
        memcpy(to, from, nbytes);
    }
    bool record_event(void *, void *, Stream) override {
        return true;
    }
    void empty_cache() override {
    }
    at::HostStats get_stats() override {
        return {};
    }
    void reset_accumulated_stats() override {
    }
    void reset_peak_stats() override {
    }
};
static pinned_allocator allocator_of_pinned;

void resize_storage(c10::StorageImpl *storage, size_t nbytes) {
    TORCH_CHECK(storage->resizable(), "Trying to resize storage that is not resizable");
    c10::DeviceGuard guard(storage->device());
    c10::DataPtr data = allocator_of_device.allocate(nbytes);
    size_t kept = std::min(nbytes, storage->nbytes());
    if (kept && storage->data()) {
        allocator_of_device.copy_data(data.get(), storage->data(), kept);
    }
    storage->set_data_ptr_noswap(std::move(data));
    storage->set_nbytes(nbytes);
}

/* ---- streams and events ---- */

struct device_guard final : c10::impl::DeviceGuardImplInterface {
    c10::DeviceType type() const override {
        return c10::kCUDA;
    }
    Device exchangeDevice(Device device) const override {
        Device before = getDevice();
        setDevice(device);
        return before;
    }
    Device getDevice() const override {
        return device_of_index(current_device());
    }
    void setDevice(Device device) const override {
        TORCH_CHECK(index_of(device) < device_count(), "CUDA error: invalid device ordinal");
        set_device(index_of(device));
    }
    void uncheckedSetDevice(Device device) const noexcept override {
        set_device(index_of(device));
    }
    Stream getStream(Device device) const override {
        return torch_stream(current_stream(index_of(device)));
    }
    Stream getDefaultStream(Device device) const override {
        return torch_stream(stream_of_id(index_of(device), 0));
    }
    Stream getStreamFromGlobalPool(Device device, bool has_high_priority) const override {
        return torch_stream(stream_from_pool(index_of(device), has_high_priority ? -1 : 0));
    }
    Stream getNewStream(Device device, int priority) const override {
        return torch_stream(stream_from_pool(index_of(device), priority));
    }
    Stream exchangeStream(Stream stream) const override {
        Stream before = getStream(stream.device());
        set_current_stream(stream_of(stream));
        return before;
    }
    void *getStreamNativeHandle(const Stream stream) const override {
        return handle_of(stream_of(stream));
    }
    void destroyEvent(void *which, const DeviceIndex) const noexcept override {
        event_free((event *)which);
    }
    void record(void **which, const Stream &stream, const DeviceIndex, const c10::EventFlag) const override {
        if (!*which) {
            *which = event_new();
        }
        event_record((event *)*which, stream_of(stream));
    }
    void block(void *which, const Stream &stream) const override {
        if (which) {
            stream_wait(stream_of(stream), (event *)which);
        }
    }
    bool queryEvent(void *which) const override {
        return !which || event_query((event *)which);
    }
    DeviceIndex deviceCount() const noexcept override {
        return (DeviceIndex)device_count();
    }
    bool queryStream(const Stream &stream) const override {
        return stream_query(stream_of(stream));
    }
    void synchronizeStream(const Stream &stream) const override {
        wait_as_torch(stream_of(stream));
    }
    void synchronizeEvent(void *which) const override {
        if (which) {
            host_wait((event *)which);
        }
    }
    void synchronizeDevice(const DeviceIndex device) const override {
        host_wait_device(device);
    }
    void recordDataPtrOnStream(const c10::DataPtr &data, const Stream &stream) const override {
        record_stream(data.get(), stream_of(stream));
    }
    double elapsedTime(void *from, void *to, const DeviceIndex) const override {
        return host_ms_between((const event *)from, (const event *)to);
    }
};
C10_REGISTER_GUARD_IMPL(CUDA, device_guard)

/* ---- random numbers ---- */

struct device_generator final : c10::GeneratorImpl {
    device_generator(int device, at::Generator cpu)
        : GeneratorImpl(device_of_index(device), c10::DispatchKeySet(c10::DispatchKey::CUDA)),
          inner(std::move(cpu)) {
    }
    void set_current_seed(uint64_t seed) override {
        inner.set_current_seed(seed);
    }
    void set_offset(uint64_t offset) override {
        inner.set_offset(offset);
    }
    uint64_t get_offset() const override {
        return inner.get_offset();
    }
    uint64_t current_seed() const override {
        return inner.current_seed();
    }
    uint64_t seed() override {
        return inner.seed();
    }
    void set_state(const c10::TensorImpl &state) override {
        inner.unsafeGetGeneratorImpl()->set_state(state);
    }
    c10::intrusive_ptr<c10::TensorImpl> get_state() const override {
        return inner.unsafeGetGeneratorImpl()->get_state();
    }
    at::Generator inner;

  private:
    GeneratorImpl *clone_impl() const override {
        return new device_generator(device_.index(), inner.clone());
    }
};

static at::Generator new_generator(int device) {
    return at::make_generator<device_generator>(device, at::make_generator<at::CPUGeneratorImpl>());
}

const at::Generator &default_generator(int device) {
    static std::vector<at::Generator> made = [] {
        std::vector<at::Generator> all;
        for (int i = 0; i < device_count(); i++) {
            all.push_back(new_generator(i));
        }
        return all;
    }();
    return made.at((size_t)(device < 0 ? current_device() : device));
}

at::Generator cpu_generator_in(const at::Generator &generator) {
    TORCH_CHECK(generator.device().is_cuda(), "Expected a 'cuda' device type for generator but found '",
                generator.device().type(), "'");
    return static_cast<device_generator *>(generator.unsafeGetGeneratorImpl())->inner;
}

drawing_from::drawing_from(int device)
    : of_device(cpu_generator_in(default_generator(device))), of_cpu(at::detail::getDefaultCPUGenerator()),
      kept(of_cpu.get_state()) {
    of_cpu.set_state(of_device.get_state());
}

drawing_from::~drawing_from() {
    of_device.set_state(of_cpu.get_state());
    of_cpu.set_state(kept);
}

/* ---- hooks ---- */

struct hooks final : at::CUDAHooksInterface {
    void init() const override {
    }
    bool isBuilt() const override {
        return true;
    }
    bool isAvailable() const override {
        return true;
    }
    bool hasCUDA() const override {
        return true;
    }
    bool hasPrimaryContext(DeviceIndex) const override {
        return true;
    }
    const at::Generator &getDefaultGenerator(DeviceIndex device) const override {
        return default_generator(device);
    }
    at::Generator getNewGenerator(DeviceIndex device) const override {
        return new_generator(device < 0 ? simulated_gpu::current_device() : device);
    }
    Device getDeviceFromPtr(void *memory) const override {
        int device = device_of_memory(memory);
        TORCH_CHECK(device >= 0, "The specified pointer does not belong to a simulated GPU");
        return device_of_index(device);
    }
    bool isPinnedPtr(const void *data) const override {
        return is_pinned(data);
    }
    at::Allocator *getPinnedMemoryAllocator() const override {
        return &allocator_of_pinned;
    }
    at::Allocator *getCUDADeviceAllocator() const override {
        return &allocator_of_device;
    }
    DeviceIndex deviceCount() const override {
        return (DeviceIndex)device_count();
    }
    DeviceIndex current_device() const override {
        return (DeviceIndex)simulated_gpu::current_device();
    }
    DeviceIndex getCurrentDevice() const override {
        return current_device();
    }
    void setCurrentDevice(DeviceIndex device) const override {
        set_device(device);
    }
    DeviceIndex exchangeDevice(DeviceIndex device) const override {
        DeviceIndex before = current_device();
        set_device(device);
        return before;
    }
    DeviceIndex maybeExchangeDevice(DeviceIndex device) const override {
        return exchangeDevice(device);
    }
    void deviceSynchronize(DeviceIndex device) const override {
        host_wait_device(device);
    }
};

static std::unique_ptr<at::CUDAHooksInterface> make_hooks(at::CUDAHooksArgs) {
    return std::make_unique<hooks>();
}

/* Register when the library is loaded, because torch caches the first result. */
[[maybe_unused]] static const bool registered = [] {
    const uint8_t highest_priority = 255;
    c10::SetAllocator(c10::kCUDA, &allocator_of_device, highest_priority);
    at::setHostAllocator(c10::kCUDA, &allocator_of_pinned, highest_priority);
    at::CUDAHooksRegistry()->Register("CUDAHooks", &make_hooks);
    return true;
}();

} // namespace simulated_gpu

/* Function of libtorch_cuda that fsdp_c and ahead-of-time compiled code call. */
extern "C" DEVICE_API int32_t aoti_torch_get_current_cuda_stream(int32_t device, void **stream) {
    *stream = simulated_gpu::handle_of(simulated_gpu::current_stream(device));
    return 0;
}
