/* A launch of one of fsdp_c's kernels, between the runtime, the emulation, and a test that looks at it. */
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

/* Of all blocks, or of one alone if it is not negative. */
extern "C" typedef void emulated_kernel(const struct fake_cuda_launch *launch, int64_t only);
extern "C" typedef void launch_watcher(const struct fake_cuda_launch *launch);

extern "C" void fake_cuda_emulate(const char *name, emulated_kernel *run, const size_t *nbytes, size_t count);

/* From now on launches go to the watcher instead and are not run; null ends that. A block of one can be
 * run. */
extern "C" void fake_cuda_watch_launches(launch_watcher *by);
extern "C" void fake_cuda_run_block(const struct fake_cuda_launch *launch, int64_t block);
