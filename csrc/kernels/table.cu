/* The exported symbol of the CUDA library, and the helpers that its launchers share. */
#include "kernels/cuda_launch.h"

#include <stdio.h>

/* ---- errors and devices ---- */

static thread_local cudaError_t last_error = cudaSuccess;

extern "C" const char *cuda_error_text(void) {
    return cudaGetErrorString(last_error);
}

enum status cuda_status(cudaError_t error) {
    if (error == cudaSuccess)
        return STATUS_OK;
    last_error = error;
    cudaGetLastError(); /* clear the runtime's copy: the next launch would report it */
    return STATUS_DEVICE;
}

/* The driver's functions for contexts. The current context, unlike the current device, distinguishes a thread
 * that uses no device from one that uses device 0. Restoring the device by cudaSetDevice would create a
 * context there: hundreds of megabytes of the first GPU for each rank. */
struct contexts {
    int (*get_current)(void **context);
    int (*set_current)(void *context);
    int (*get_device)(int *device);
    cudaError_t error;

    contexts() : error(cudaSuccess) {
        find("cuCtxGetCurrent", (void **)&get_current);
        find("cuCtxSetCurrent", (void **)&set_current);
        find("cuCtxGetDevice", (void **)&get_device);
    }
    void find(const char *name, void **function) {
        cudaDriverEntryPointQueryResult query = cudaDriverEntryPointSuccess;
#if CUDART_VERSION >= 12050
        cudaError_t result =
            cudaGetDriverEntryPointByVersion(name, function, 12000, cudaEnableDefault, &query);
#else
        cudaError_t result = cudaGetDriverEntryPoint(name, function, cudaEnableDefault, &query);
#endif
        if (result != cudaSuccess || query != cudaDriverEntryPointSuccess)
            error = result != cudaSuccess ? result : cudaErrorNotSupported;
    }
};

static const contexts &driver_contexts() {
    static const contexts instance;
    return instance;
}

device_guard::device_guard(const struct kernel_stream *stream) : previous(nullptr), changed(false) {
    const contexts &driver = driver_contexts();
    int device = -1;
    status = cuda_status(driver.error);
    if (status != STATUS_OK)
        return;
    if (driver.get_current(&previous) == 0 && previous)
        driver.get_device(&device);
    if (device != stream->device_index) {
        status = cuda_status(cudaSetDevice(stream->device_index));
        changed = status == STATUS_OK;
    }
}

device_guard::~device_guard() {
    if (changed)
        driver_contexts().set_current(previous);
}

int64_t cuda_blocks(int64_t num_chunks) {
    static thread_local int known_device = -1;
    static thread_local int processors = 1;
    int device = 0;
    if (cudaGetDevice(&device) == cudaSuccess && device != known_device &&
        cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, device) == cudaSuccess) {
        known_device = device;
    }
    int64_t max_blocks = (int64_t)processors * BLOCKS_PER_PROCESSOR;
    return num_chunks < max_blocks ? num_chunks : max_blocks;
}

/* ---- devices that the library has code for ---- */

static __global__ void empty_kernel() {
}

/* Look for code for the current device. CUDA loads a library without any, and then refuses its launches. */
static cudaError_t query_code() {
    cudaFuncAttributes attributes;
    cudaError_t error = cudaFuncGetAttributes(&attributes, empty_kernel);
    cuda_status(error);
    return error;
}

static const char *cuda_why_not_on(int32_t device_index) {
    static thread_local int32_t known_supported_device = -1;
    static thread_local char text[256];
    const struct kernel_stream stream = {nullptr, nullptr, device_index, DEVICE_CUDA};
    int major = 0, minor = 0;
    if (device_index == known_supported_device)
        return nullptr;
    device_guard guard(&stream);
    cudaError_t error = guard.status == STATUS_OK ? query_code() : last_error;
    if (error == cudaSuccess) {
        known_supported_device = device_index;
        return nullptr;
    }
    cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device_index);
    cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device_index);
    snprintf(text, sizeof text,
             "fsdp_c's CUDA kernels have no code for this GPU, whose compute capability is %d.%d (%s). Build "
             "them with FSDP_C_CUDA_ARCHS=\"%d%d\" in the environment",
             major, minor, cudaGetErrorString(error), major, minor);
    return text;
}

/* ---- the table ---- */

static const struct kernel_table cuda_kernels = {
    KERNEL_TABLE_VERSION, cuda_pack,       cuda_pack_add,   cuda_cast_divide,
    cuda_accumulate,      cuda_error_text, cuda_why_not_on,
};

/* Return the table, or NULL with the reason: a toolkit newer than the driver loads, but cannot launch. */
extern "C" __attribute__((visibility("default"))) const struct kernel_table *
fsdp_c_cuda_kernels(const char **reason) {
    int driver = 0;
    int toolkit = 0;
    cudaError_t error = cudaDriverGetVersion(&driver);
    if (error == cudaSuccess)
        error = cudaRuntimeGetVersion(&toolkit);
    if (error != cudaSuccess) {
        *reason = cudaGetErrorString(error);
        return nullptr;
    }
    if (driver == 0) {
        *reason = "there is no NVIDIA driver";
        return nullptr;
    }
    if (driver / 1000 < toolkit / 1000) {
        *reason = "the NVIDIA driver is older than the CUDA toolkit of the kernels: update the driver";
        return nullptr;
    }
    return &cuda_kernels;
}
