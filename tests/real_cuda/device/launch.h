/* A launch of one of fsdp_c's kernels, between the runtime and the emulation. */
#pragma once
#include <stddef.h>
#include <stdint.h>

struct fake_cuda_launch {
    const char *name; /* mangled */
    unsigned grid[3], block[3];
    size_t shared; /* bytes, beside the kernel's own */
    void *stream;
    void **arguments;
    const size_t *nbytes; /* of each argument, as the emulation has it */
    size_t count;
    int device;
};

extern "C" typedef void emulated_kernel(const struct fake_cuda_launch *launch);

extern "C" void fake_cuda_emulate(const char *name, emulated_kernel *run, const size_t *nbytes, size_t count);
