/* Kernels of .cu files, compiled for the CPU with tests/native/cuda_emulation.h and registered under the
 * mangled names that nvcc's host code launches. */
#pragma once
#include <mutex>
#include <type_traits>
#include <utility>

#include "kernels/cuda_launch.h"

#include "launch.h"

static std::mutex &emulation_lock() {
    static auto *made = new std::mutex; /* __shared__ variables are static: one block runs at a time */
    return *made;
}

template <auto kernel, bool barriers> struct emulated_launch;
template <class... A, void (*kernel)(A...), bool barriers> struct emulated_launch<kernel, barriers> {
    template <size_t... I> static void call(void **arguments, std::index_sequence<I...>) {
        kernel(*(std::remove_reference_t<A> *)arguments[I]...);
    }
    static void bring(const char *name) {
        const size_t nbytes[] = {sizeof(std::remove_reference_t<A>)...};
        fake_cuda_emulate(name, &run, nbytes, sizeof...(A));
    }
    static void run(const fake_cuda_launch *launch) {
        std::lock_guard<std::mutex> held(emulation_lock());
        emulated_device = launch->device;
        if (launch->block[0] != THREADS) {
            emulated_stop("a launch with another number of threads than the kernel was compiled for");
        }
        auto body = [&] { call(launch->arguments, std::index_sequence_for<A...>{}); };
        if constexpr (barriers) {
            emulate_with_barriers(launch->grid[0], launch->block[0], launch->device, body);
        } else {
            emulate(launch->grid[0], launch->block[0], launch->device, body);
        }
    }
};

/* Register the kernel when the library is loaded. */
#define EMULATED(name, barriers, ...) EMULATED_AT(__COUNTER__, name, barriers, __VA_ARGS__)
#define EMULATED_AT(count, ...)       EMULATED_AS(count, __VA_ARGS__)
#define EMULATED_AS(count, name, barriers, ...)                                                              \
    [[maybe_unused]] static const bool emulated_##count =                                                    \
        (emulated_launch<&__VA_ARGS__, barriers>::bring(name), true);
