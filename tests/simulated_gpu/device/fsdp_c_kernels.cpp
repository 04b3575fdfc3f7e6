/* fsdp_c's library of CUDA kernels for the simulated device: its own .cu files, run by
 * tests/native/cuda_emulation.h, with each launch's accesses recorded. No other file here depends on fsdp_c.
 *
 * The build includes the emulation's header before everything, and renames the symbol of table.cu to
 * emulated_kernels. */
#include <deque>
#include <memory>
#include <mutex>

#include "accesses.h"
#include "driver.h"
#include "kernels/table.h"
#include "timeline.h"

extern "C" const struct kernel_table *emulated_kernels(const char **why);

static const struct kernel_table *inner;

/* Return the number of elements from a tensor's first to its last. */
static int64_t span(const struct tensor_view &view, int64_t numel) {
    int64_t last = 0;
    for (int32_t d = 0; view.strides && d < view.ndim; d++) {
        last += view.sizes[d] > 0 ? (view.sizes[d] - 1) * view.strides[d] : 0;
    }
    return view.strides && numel ? last + 1 : numel;
}

/* Arguments by value, like those of a launch, with copies of the sizes and strides that they point to. */
template <typename Argument> class kept {
  public:
    kept(const Argument *given, int64_t count) : all(new contents) {
        all->arguments.assign(given, given + count);
        for (Argument &each : all->arguments) {
            keep(each);
        }
    }
    const Argument *data() const {
        return all->arguments.data();
    }

  private:
    struct contents {
        std::vector<Argument> arguments;
        std::deque<std::vector<int64_t>> numbers;
    };
    std::shared_ptr<contents> all;

    void keep(const int64_t *&numbers, int32_t count) {
        if (numbers) {
            numbers = all->numbers.emplace_back(numbers, numbers + count).data();
        }
    }
    void keep(struct tensor_view &view) {
        keep(view.sizes, view.ndim);
        keep(view.strides, view.ndim);
    }
    void keep(struct pack_source &source) {
        keep(source.view);
        keep(source.output_strides, source.view.ndim);
    }
    void keep(int64_t &) {
    }
};

/* One launch. Its accesses are recorded before it runs. A mutex admits one launch at a time, because the
 * emulation has the state of one thread. */
class kernel_launch {
  public:
    kernel_launch(const char *name, const struct kernel_stream *stream)
        : name(name), at(*stream),
          on(simulated_gpu::stream_of_handle(stream->cuda_stream, stream->device_index)), alone(mutex()),
          launch(on, name) {
        int device;
        emulated_device = cuCtxGetDevice(&device) == 0 ? device : EMULATED_NO_DEVICE;
    }
    void reads(const void *data, int64_t nbytes) {
        launch.access(data, (size_t)nbytes, simulated_gpu::READ);
        moved_nbytes += data ? (double)nbytes : 0;
    }
    void writes(const void *data, int64_t nbytes) {
        launch.access(data, (size_t)nbytes, simulated_gpu::WRITE);
        moved_nbytes += data ? (double)nbytes : 0;
    }
    /* Record a read and a write of the same bytes. */
    void changes(const void *data, int64_t nbytes) {
        writes(data, nbytes);
        moved_nbytes += data ? (double)nbytes : 0;
    }
    void reads_source(const struct pack_source &source) {
        if (source.view.data) {
            reads(source.view.data, span(source.view, source.numel) * dtype_nbytes(source.view.dtype));
        }
    }

    /* Run the kernel now, or hold it until its stream reaches it. */
    template <typename Kernel> enum status run(Kernel kernel) {
        simulated_gpu::host_spends(simulated_gpu::costs().launch);
        double us = simulated_gpu::us_of_bytes(moved_nbytes);
        simulated_gpu::device_spends(on, name, simulated_gpu::COMPUTE, us,
                                     simulated_gpu::use_of(us, moved_nbytes));
        if (simulated_gpu::has_only_shapes()) {
            return STATUS_OK;
        }
        if (!on->capture) {
            return kernel(&at);
        }
        simulated_gpu::run_or_hold(on, [kernel, at = at, device = emulated_device] {
            std::unique_lock<std::recursive_mutex> alone(mutex());
            emulated_device = device;
            kernel(&at);
        });
        return STATUS_OK;
    }

  private:
    static std::recursive_mutex &mutex() {
        static std::recursive_mutex made;
        return made;
    }
    const char *name;
    double moved_nbytes = 0;
    struct kernel_stream at;
    simulated_gpu::stream *on;
    std::unique_lock<std::recursive_mutex> alone;
    simulated_gpu::launch launch;
};

static enum status pack(void *output, enum dtype dtype, int64_t numel, const struct pack_source *sources,
                        int64_t count, double divisor, const struct kernel_stream *stream) {
    kernel_launch now("fsdp_c pack", stream);
    for (int64_t i = 0; i < count; i++) {
        now.reads_source(sources[i]);
    }
    now.writes(output, numel * dtype_nbytes(dtype));
    return now.run([=, kept_sources = kept(sources, count)](const struct kernel_stream *at) {
        return inner->pack(output, dtype, numel, kept_sources.data(), count, divisor, at);
    });
}

static enum status pack_add(void *output, enum dtype dtype, const struct pack_source *sources, int64_t count,
                            const struct kernel_stream *stream) {
    kernel_launch now("fsdp_c pack_add", stream);
    int64_t size = dtype_nbytes(dtype);
    for (int64_t i = 0; i < count; i++) {
        now.reads_source(sources[i]);
        if (sources[i].view.data) {
            now.changes((char *)output + sources[i].offset * size, sources[i].numel * size);
        }
    }
    return now.run([=, kept_sources = kept(sources, count)](const struct kernel_stream *at) {
        return inner->pack_add(output, dtype, kept_sources.data(), count, at);
    });
}

static enum status cast_divide(void *output, enum dtype to, const void *input, enum dtype from, int64_t numel,
                               double divisor, const struct kernel_stream *stream) {
    kernel_launch now("fsdp_c cast_divide", stream);
    now.reads(input, numel * dtype_nbytes(from));
    now.writes(output, numel * dtype_nbytes(to));
    return now.run([=](const struct kernel_stream *at) {
        return inner->cast_divide(output, to, input, from, numel, divisor, at);
    });
}

static enum status accumulate(void *output, enum dtype to, const void *input, enum dtype from, int64_t numel,
                              double divisor, const struct kernel_stream *stream) {
    kernel_launch now("fsdp_c accumulate", stream);
    now.reads(input, numel * dtype_nbytes(from));
    now.changes(output, numel * dtype_nbytes(to));
    return now.run([=](const struct kernel_stream *at) {
        return inner->accumulate(output, to, input, from, numel, divisor, at);
    });
}

static const char *device_error() {
    return inner->device_error();
}

static int32_t device_without_code = -1;

static const char *unsupported_reason(int32_t device_index) {
    return device_index == device_without_code ? "no code for this GPU" : nullptr;
}

/* From now on, report that the kernels have no code for this device; -1: for no device. */
extern "C" DEVICE_API void simulated_gpu_without_code(int32_t device_index) {
    device_without_code = device_index;
}

extern "C" DEVICE_API const struct kernel_table *fsdp_c_cuda_kernels(const char **why) {
    static const struct kernel_table table = {
        KERNEL_TABLE_VERSION, pack, pack_add, cast_divide, accumulate, device_error, unsupported_reason,
    };
    inner = emulated_kernels(why);
    return inner ? &table : nullptr;
}
