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

/* In a process of its own, as the library is looked for once. */
static void check_told(const char *what) {
    pid_t child = fork();
    int status = 0;
    if (child == 0) {
        const char *why = NULL;
        bool is_torchs = kernels_of(DEVICE_CUDA, 0, &why) == &operator_kernels;
        fprintf(stderr, "%s\n", why);
        _exit(is_torchs && why && strstr(why, what) ? 0 : 1);
    }
    CHECK(waitpid(child, &status, 0) == child && WIFEXITED(status));
    CHECK_EQUAL(WEXITSTATUS(status), 0);
}

/* Beside the file of this program. */
static void put_library(void) {
    char path[4096];
    Dl_info module;
    CHECK(dladdr((const void *)&cpu_kernels, &module) != 0);
    const char *slash = strrchr(module.dli_fname, '/');
    snprintf(path, sizeof path, "%.*s_cuda13.so", (int)(slash - module.dli_fname) + 1, module.dli_fname);
    FILE *file = fopen(path, "w");
    CHECK(file && fputs("not a library", file) >= 0 && fclose(file) == 0);
}

TEST(test_a_missing_library_is_told_from_one_that_cannot_be_loaded) {
    check_told("this torch has no CUDA");
    torch_abi.aoti_torch_get_current_cuda_stream = some_stream;
    check_told("CUDA version of this torch is unknown");
    torch_abi.cuda_major = 13;
    check_told("built without its CUDA kernels for CUDA 13");
    put_library();
    check_told("_cuda13.so: "); /* the loader's own words */
    torch_abi.cuda_major = 12;
    check_told("built without its CUDA kernels for CUDA 12"); /* those of another CUDA are left alone */
    CHECK(setenv("FSDP_C_CUDA_KERNELS", "/nowhere/else.so", 1) == 0);
    check_told("built without its CUDA kernels");
    CHECK(unsetenv("FSDP_C_CUDA_KERNELS") == 0);
}

TEST(test_the_environment_may_ask_for_torchs) {
    const char *why = NULL;
    CHECK(kernels_of(DEVICE_CPU, 0, &why) == &cpu_kernels && !why);
    CHECK(setenv("FSDP_C_KERNELS", "torch", 1) == 0);
    CHECK(kernels_of(DEVICE_CPU, 0, &why) == &operator_kernels && why);
    CHECK(unsetenv("FSDP_C_KERNELS") == 0);
    CHECK(kernels_of(DEVICE_PRIVATE, 0, &why) == &operator_kernels && why);
}

int main(void) {
    return run_tests();
}
