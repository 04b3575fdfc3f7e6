/* One value out of those of all threads of a block. */
#ifndef FSDP_KERNELS_CUDA_JOIN_H
#define FSDP_KERNELS_CUDA_JOIN_H

#include "kernels/cuda_launch.h"

/* The values of all threads of a block, joined in a tree; the result is thread 0's. */
template <typename A, typename Kind> __device__ A join_block(A value, const Kind &kind) {
    __shared__ A values[THREADS];
    __syncthreads(); /* an earlier round has been read */
    values[threadIdx.x] = value;
    __syncthreads();
    for (unsigned width = THREADS / 2; width > 0; width /= 2) {
        if (threadIdx.x < width)
            values[threadIdx.x] = kind.joined(values[threadIdx.x], values[threadIdx.x + width]);
        __syncthreads();
    }
    return values[0];
}

#endif
