/* A launch of a kernel of fsdp_c, passed from the runtime to the emulation. */
#pragma once
#include <stddef.h>
#include <stdint.h>

struct fake_cuda_launch {
    const char *name; /* mangled */
    unsigned grid[3], block[3];
    size_t shared; /* bytes of dynamic shared memory */
    void *stream;
    void **arguments;
    const size_t *nbytes; /* size of each argument in the emulation */
    size_t count;
    int device;
};

extern "C" typedef void emulated_kernel(const struct fake_cuda_launch *launch);

extern "C" void fake_cuda_emulate(const char *name, emulated_kernel *run, const size_t *nbytes, size_t count);
