/* Enough of CUDA to run the .cu files of csrc/kernels/ as plain C++ on the CPU, one thread of the grid after the other.
 *
 * Blocks run one by one. The threads of a block run one by one too, unless the kernel has barriers: then each is a real thread,
 * and __syncthreads is a real barrier. Included before everything else by -include. */
#ifndef TESTS_NATIVE_CUDA_EMULATION_H
#define TESTS_NATIVE_CUDA_EMULATION_H

#define FSDP_CUDA_EMULATION

#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>

#include <thread>
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
inline uint4 __ldcg(const uint4 *memory) {
    return *memory;
}
inline void __stwb(uint4 *memory, uint4 value) {
    *memory = value;
}
struct emulated_index {
    unsigned x;
};
inline thread_local emulated_index blockIdx, threadIdx;
inline emulated_index gridDim;
inline pthread_barrier_t *emulated_barrier;
inline int64_t emulated_launches;
inline int64_t emulated_most_blocks;

/* A barrier in a kernel that was enqueued as one without would let its threads run ahead unseen. */
inline void __syncthreads() {
    if (!emulated_barrier) {
        fprintf(stderr, "__syncthreads in a kernel enqueued without barriers\n");
        abort();
    }
    pthread_barrier_wait(emulated_barrier);
}

inline thread_local int emulated_device;

/* A stream takes launches only while its device is the current one. */
inline void emulated_grid(int64_t blocks, int device) {
    if (device != emulated_device || blocks <= 0) {
        fprintf(stderr, "launch of %lld blocks on a stream of device %d, current is %d\n", (long long)blocks, device,
                emulated_device);
        abort();
    }
    gridDim.x = (unsigned)blocks;
    emulated_launches++;
    emulated_most_blocks = blocks > emulated_most_blocks ? blocks : emulated_most_blocks;
}

template <typename Body> void emulate(int64_t blocks, unsigned threads, int device, Body body) {
    emulated_grid(blocks, device);
    for (blockIdx.x = 0; blockIdx.x < blocks; blockIdx.x++) {
        for (threadIdx.x = 0; threadIdx.x < threads; threadIdx.x++) {
            body();
        }
    }
}

template <typename Body> void emulate_with_barriers(int64_t blocks, unsigned threads, int device, Body body) {
    pthread_barrier_t barrier;
    emulated_grid(blocks, device);
    pthread_barrier_init(&barrier, nullptr, threads);
    emulated_barrier = &barrier;
    for (int64_t block = 0; block < blocks; block++) {
        std::vector<std::thread> running;
        for (unsigned thread = 0; thread < threads; thread++) {
            running.emplace_back([=] {
                blockIdx.x = (unsigned)block;
                threadIdx.x = thread;
                body();
            });
        }
        for (std::thread &thread : running) {
            thread.join();
        }
    }
    emulated_barrier = nullptr;
    pthread_barrier_destroy(&barrier);
}

/* ---- the runtime, of one device unless a test says otherwise ---- */

typedef int cudaError_t;
enum { cudaSuccess = 0, cudaErrorInvalidDevice = 101, cudaDevAttrMultiProcessorCount = 16 };

inline int emulated_processors = 2;
inline cudaError_t emulated_launch_error;

inline cudaError_t cudaGetDevice(int *device) {
    *device = emulated_device;
    return cudaSuccess;
}
inline cudaError_t cudaSetDevice(int device) {
    if (device < 0 || device > 1) {
        return cudaErrorInvalidDevice;
    }
    emulated_device = device;
    return cudaSuccess;
}
inline cudaError_t cudaDeviceGetAttribute(int *value, int, int) {
    *value = emulated_processors;
    return cudaSuccess;
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
