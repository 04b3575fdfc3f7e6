/* links: torch/kernel_library.c */
#ifndef _GNU_SOURCE
#define _GNU_SOURCE /* dladdr */
#endif
#include <dlfcn.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include "harness.h"
#include "torch/kernel_library.h"
#include "torch/tensor.h"
#include "torch/torch_abi.h"

struct torch_abi torch_abi;
const struct kernel_table cpu_kernels = {.version = KERNEL_TABLE_VERSION};
const struct kernel_table operator_kernels = {.version = KERNEL_TABLE_VERSION};

static AOTITorchError some_stream(int32_t device_index, void **stream) {
    (void)device_index;
    *stream = NULL;
    return 0;
}

/* Check the reason in a child process: a process looks for the library once. */
static void check_reason(const char *expected) {
    pid_t child = fork();
    int status = 0;
    if (child == 0) {
        const char *reason = NULL;
        bool is_torchs = kernels_of(DEVICE_CUDA, 0, &reason) == &operator_kernels;
        fprintf(stderr, "%s\n", reason);
        _exit(is_torchs && reason && strstr(reason, expected) ? 0 : 1);
    }
    CHECK(waitpid(child, &status, 0) == child && WIFEXITED(status));
    CHECK_EQUAL(WEXITSTATUS(status), 0);
}

/* Write a file that is not a library to the path of the CUDA library, in the folder of this program. */
static void put_library(void) {
    char path[4096];
    Dl_info module;
    CHECK(dladdr((const void *)&cpu_kernels, &module) != 0);
    const char *slash = strrchr(module.dli_fname, '/');
    snprintf(path, sizeof path, "%.*s_cuda13.so", (int)(slash - module.dli_fname) + 1, module.dli_fname);
    FILE *file = fopen(path, "w");
    CHECK(file && fputs("not a library", file) >= 0 && fclose(file) == 0);
}

TEST(test_the_reason_distinguishes_a_missing_library_from_a_broken_one) {
    check_reason("this torch has no CUDA");
    torch_abi.aoti_torch_get_current_cuda_stream = some_stream;
    check_reason("CUDA version of this torch is unknown");
    torch_abi.cuda_major = 13;
    check_reason("built without its CUDA kernels for CUDA 13");
    put_library();
    check_reason("_cuda13.so: "); /* begins the loader's message */
    torch_abi.cuda_major = 12;
    check_reason(
        "built without its CUDA kernels for CUDA 12"); /* a library of a different CUDA version is ignored */
    CHECK(setenv("FSDP_C_CUDA_KERNELS", "/nowhere/else.so", 1) == 0);
    check_reason("built without its CUDA kernels");
    CHECK(unsetenv("FSDP_C_CUDA_KERNELS") == 0);
}

TEST(test_the_environment_selects_torchs_operators) {
    const char *reason = NULL;
    CHECK(kernels_of(DEVICE_CPU, 0, &reason) == &cpu_kernels && !reason);
    CHECK(setenv("FSDP_C_KERNELS", "torch", 1) == 0);
    CHECK(kernels_of(DEVICE_CPU, 0, &reason) == &operator_kernels && reason);
    CHECK(unsetenv("FSDP_C_KERNELS") == 0);
    CHECK(kernels_of(DEVICE_PRIVATE, 0, &reason) == &operator_kernels && reason);
}

int main(void) {
    return run_tests();
}
