/* The subset of CUDA that runs the .cu files of csrc/kernels/ as plain C++ on the CPU, one thread at a time.
 *
 * Blocks run one after the other, and so do the threads of a block. The threads of a kernel with barriers run
 * on separate stacks, each up to its next barrier in turn. The compiler includes this file before every
 * source, by -include. */
#ifndef TESTS_NATIVE_CUDA_EMULATION_H
#define TESTS_NATIVE_CUDA_EMULATION_H

#define FSDP_CUDA_EMULATION

#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <ucontext.h>

#include <functional>
#include <vector>

#define __global__
#define __device__
#define __host__
#define __shared__ static
#define __grid_constant__
#define __launch_bounds__(threads)

struct alignas(16) uint4 {
    unsigned x, y, z, w;
};
struct alignas(8) uint2 {
    unsigned x, y;
};
inline int64_t emulated_vector_loads;
template <typename Vector> Vector __ldcg(const Vector *memory) {
    emulated_vector_loads++;
    return *memory;
}
template <typename Vector> void __stwb(Vector *memory, Vector value) {
    *memory = value;
}
struct emulated_index {
    unsigned x;
};
inline emulated_index blockIdx, threadIdx, gridDim;
inline int64_t emulated_launches;
inline int64_t emulated_launches_with_barriers;
inline int64_t emulated_most_blocks;

/* ---- threads of a block with barriers ---- */

enum { EMULATED_STACK_NBYTES = 256 * 1024 };

struct emulated_thread {
    ucontext_t context;
    std::vector<char> stack;
    bool ended;
};

inline ucontext_t emulated_scheduler;
inline emulated_thread *emulated_current; /* null in a kernel that was enqueued without barriers */
inline std::function<void()> emulated_body;

inline void emulated_stop(const char *message) {
    fprintf(stderr, "%s\n", message);
    abort();
}

inline void __syncthreads() {
    if (!emulated_current) {
        emulated_stop("__syncthreads in a kernel enqueued without barriers");
    }
    swapcontext(&emulated_current->context, &emulated_scheduler);
}

inline void emulated_entry() {
    emulated_body();
    emulated_current->ended = true;
    swapcontext(&emulated_current->context, &emulated_scheduler);
}

inline void emulated_start(emulated_thread *thread) {
    thread->stack.resize(EMULATED_STACK_NBYTES);
    thread->ended = false;
    getcontext(&thread->context);
    thread->context.uc_stack.ss_sp = thread->stack.data();
    thread->context.uc_stack.ss_size = thread->stack.size();
    thread->context.uc_link = nullptr;
    makecontext(&thread->context, emulated_entry, 0);
}

/* Run each thread up to its next barrier or its end. Return true if all ended; abort if only some did. */
inline bool emulated_round(std::vector<emulated_thread> &threads) {
    size_t ended = 0;
    for (size_t i = 0; i < threads.size(); i++) {
        threadIdx.x = (unsigned)i;
        emulated_current = &threads[i];
        swapcontext(&emulated_scheduler, &threads[i].context);
        ended += threads[i].ended;
    }
    emulated_current = nullptr;
    if (ended != 0 && ended != threads.size()) {
        emulated_stop("some threads of a block wait at a barrier that others do not reach");
    }
    return ended != 0;
}

/* ---- launches ---- */

inline int emulated_device;

/* Begin a launch. The device of the stream must be current. */
inline void emulated_grid(int64_t blocks, int device) {
    if (device != emulated_device || blocks <= 0) {
        fprintf(stderr, "launch of %lld blocks on a stream of device %d, current is %d\n", (long long)blocks,
                device, emulated_device);
        abort();
    }
    gridDim.x = (unsigned)blocks;
    blockIdx.x = 0;
    emulated_launches++;
    emulated_most_blocks = blocks > emulated_most_blocks ? blocks : emulated_most_blocks;
}

inline bool emulated_next_block(int64_t blocks) {
    return ++blockIdx.x < blocks;
}

template <typename Body> void emulate(int64_t blocks, unsigned threads, int device, Body body) {
    emulated_grid(blocks, device);
    do {
        for (threadIdx.x = 0; threadIdx.x < threads; threadIdx.x++) {
            body();
        }
    } while (emulated_next_block(blocks));
}

template <typename Body> void emulate_with_barriers(int64_t blocks, unsigned threads, int device, Body body) {
    std::vector<emulated_thread> running(threads);
    emulated_grid(blocks, device);
    emulated_launches_with_barriers++;
    emulated_body = body;
    do {
        for (emulated_thread &thread : running) {
            emulated_start(&thread);
        }
        while (!emulated_round(running)) {
        }
    } while (emulated_next_block(blocks));
}

/* ---- the CUDA runtime, with two devices ---- */

typedef int cudaError_t;
enum {
    cudaSuccess = 0,
    cudaErrorInvalidDevice = 101,
    cudaErrorNotSupported = 801,
    cudaErrorNoKernelImageForDevice = 209,
    cudaDevAttrMultiProcessorCount = 16,
    cudaDevAttrComputeCapabilityMajor = 75,
    cudaDevAttrComputeCapabilityMinor = 76
};
#define CUDART_VERSION 13000
enum { cudaEnableDefault = 0 };
enum cudaDriverEntryPointQueryResult { cudaDriverEntryPointSuccess, cudaDriverEntryPointSymbolNotFound };

inline int emulated_processors = 1;
inline cudaError_t emulated_launch_error;

inline cudaError_t cudaGetDevice(int *device) {
    *device = emulated_device;
    return cudaSuccess;
}
inline cudaError_t cudaSetDevice(int device) {
    if (device < 0 || device > 1) {
        return emulated_launch_error = cudaErrorInvalidDevice; /* sticky until cudaGetLastError() */
    }
    emulated_device = device;
    return cudaSuccess;
}
/* A context is the number of its device plus 1; NULL for a thread that uses no device. */
enum { EMULATED_NO_DEVICE = -1 };

inline int emulated_get_context(void **context) {
    *context = (void *)(uintptr_t)(emulated_device + 1);
    return 0;
}
inline int emulated_set_context(void *context) {
    emulated_device = (int)(uintptr_t)context - 1;
    return 0;
}
inline int emulated_context_device(int *device) {
    *device = emulated_device;
    return 0;
}
inline cudaError_t emulated_entry_point(const char *name, void **function) {
    bool gets = strcmp(name, "cuCtxGetCurrent") == 0, sets = strcmp(name, "cuCtxSetCurrent") == 0;
    *function = gets   ? (void *)emulated_get_context
                : sets ? (void *)emulated_set_context
                       : (void *)emulated_context_device;
    return cudaSuccess;
}
inline cudaError_t cudaGetDriverEntryPointByVersion(const char *name, void **function, unsigned, int,
                                                    cudaDriverEntryPointQueryResult *) {
    return emulated_entry_point(name, function);
}
inline cudaError_t cudaGetDriverEntryPoint(const char *name, void **function, int,
                                           cudaDriverEntryPointQueryResult *) {
    return emulated_entry_point(name, function);
}
inline cudaError_t cudaDeviceGetAttribute(int *value, int attribute, int) {
    *value = attribute == cudaDevAttrMultiProcessorCount      ? emulated_processors
             : attribute == cudaDevAttrComputeCapabilityMajor ? 7
                                                              : 5;
    return cudaSuccess;
}
struct cudaFuncAttributes {};
inline int emulated_device_without_code = EMULATED_NO_DEVICE;
inline cudaError_t cudaFuncGetAttributes(cudaFuncAttributes *, void (*)()) {
    return emulated_device == emulated_device_without_code ? cudaErrorNoKernelImageForDevice : cudaSuccess;
}
inline cudaError_t cudaGetLastError() {
    cudaError_t error = emulated_launch_error;
    emulated_launch_error = cudaSuccess;
    return error;
}
inline cudaError_t cudaDriverGetVersion(int *version) {
    *version = 13000;
    return cudaSuccess;
}
inline cudaError_t cudaRuntimeGetVersion(int *version) {
    *version = 13000;
    return cudaSuccess;
}
inline const char *cudaGetErrorString(cudaError_t error) {
    return error == cudaSuccess ? "no error" : "an emulated error";
}

#endif
