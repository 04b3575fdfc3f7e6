#ifndef _GNU_SOURCE
#define _GNU_SOURCE /* dladdr */
#endif
#include "torch/kernel_library.h"

#include <dlfcn.h>
#include <limits.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "torch/torch_abi.h"

static const struct kernel_table *cuda_kernels;
static const char *cuda_unavailable_reason;

/* Write the path of the CUDA library: the value of FSDP_C_CUDA_KERNELS, by which tests load kernels of a
 * simulated device, or a file in the folder of this module. */
static bool find_library(char *path, size_t size) {
    const char *override = getenv("FSDP_C_CUDA_KERNELS");
    if (override && *override)
        return snprintf(path, size, "%s", override) < (int)size;
    Dl_info module;
    *path = '\0';
    if (!torch_abi.cuda_major || !dladdr((const void *)&cpu_kernels, &module) || !module.dli_fname)
        return false;
    const char *slash = strrchr(module.dli_fname, '/');
    int folder = slash ? (int)(slash - module.dli_fname) + 1 : 0;
    return snprintf(path, size, "%.*s_cuda%d.so", folder, module.dli_fname, torch_abi.cuda_major) < (int)size;
}

/* Return the reason why the library at `path` was not loaded; the loader's message when the file exists. */
static const char *why_not_loaded(const char *path) {
    static char text[512];
    const char *loader_message = dlerror();
    if (!*path)
        return "the CUDA version of this torch is unknown";
    if (access(path, F_OK) != 0)
        snprintf(
            text, sizeof text,
            "fsdp_c was built without its CUDA kernels for CUDA %d, which this torch has: rebuild it with "
            "nvcc of that version",
            torch_abi.cuda_major);
    else
        snprintf(text, sizeof text, "fsdp_c's CUDA kernels cannot be loaded: %s",
                 loader_message ? loader_message : "the loader gave no reason");
    return text;
}

static void load_cuda(void) {
    char path[PATH_MAX] = "";
    cuda_kernels_function kernels = NULL;
    if (!torch_abi.aoti_torch_get_current_cuda_stream) {
        cuda_unavailable_reason = "this torch has no CUDA";
        return;
    }
    void *library = find_library(path, sizeof path) ? dlopen(path, RTLD_NOW | RTLD_LOCAL) : NULL;
    if (!library) {
        cuda_unavailable_reason = why_not_loaded(path);
        return;
    }
    void *symbol = dlsym(library, CUDA_KERNELS_SYMBOL);
    memcpy(&kernels, &symbol, sizeof symbol);
    const struct kernel_table *table = kernels ? kernels(&cuda_unavailable_reason) : NULL;
    if (table && table->version == KERNEL_TABLE_VERSION)
        cuda_kernels = table;
    else if (!cuda_unavailable_reason)
        cuda_unavailable_reason = "fsdp_c's CUDA kernels are from a different version: rebuild fsdp_c";
}

static const char *torch_operators_reason(enum device_kind device, int32_t device_index) {
    static pthread_once_t once = PTHREAD_ONCE_INIT;
    if (kernels_use_torch_operators())
        return "FSDP_C_KERNELS=torch is in the environment";
    if (device == DEVICE_CPU)
        return NULL;
    if (device != DEVICE_CUDA)
        return "fsdp_c has its own kernels only for the CPU and CUDA";
    pthread_once(&once, load_cuda);
    return cuda_kernels ? cuda_kernels->unsupported_reason(device_index) : cuda_unavailable_reason;
}

const struct kernel_table *kernels_of(enum device_kind device, int32_t device_index, const char **reason) {
    *reason = torch_operators_reason(device, device_index);
    if (*reason)
        return &operator_kernels;
    return device == DEVICE_CPU ? &cpu_kernels : cuda_kernels;
}

bool kernels_use_torch_operators(void) {
    const char *setting = getenv("FSDP_C_KERNELS");
    return setting && !strcmp(setting, "torch");
}
