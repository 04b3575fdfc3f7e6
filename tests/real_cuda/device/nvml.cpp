/* libnvidia-ml.so.1: the functions that c10 calls. The machine has devices, without NVLink, fabric or other
 * processes. */
#include <cstdio>
#include <cstdlib>
#include <cstring>

enum { SUCCESS = 0, NOT_SUPPORTED = 3 };
#define NVML extern "C" __attribute__((visibility("default"))) int

NVML nvmlInit_v2() {
    return SUCCESS;
}

NVML nvmlShutdown() {
    return SUCCESS;
}

NVML nvmlDeviceGetCount_v2(unsigned *count) {
    const char *text = getenv("FAKE_CUDA_DEVICES");
    *count = text ? (unsigned)atoi(text) : 8;
    return SUCCESS;
}

/* A device's PCI bus is its index plus 1. */
NVML nvmlDeviceGetHandleByPciBusId_v2(const char *id, void **device) {
    unsigned bus = 1;
    sscanf(id, "%*x:%x", &bus);
    *device = (void *)(size_t)bus;
    return SUCCESS;
}

NVML nvmlDeviceGetHandleByIndex_v2(unsigned index, void **device) {
    *device = (void *)(size_t)(index + 1);
    return SUCCESS;
}

NVML nvmlDeviceGetNvLinkRemoteDeviceType(void *, unsigned, int *) {
    return NOT_SUPPORTED;
}

NVML nvmlDeviceGetNvLinkRemotePciInfo_v2(void *, unsigned, void *) {
    return NOT_SUPPORTED;
}

NVML nvmlDeviceGetComputeRunningProcesses(void *, unsigned *count, void *) {
    *count = 0;
    return SUCCESS;
}

NVML nvmlSystemGetCudaDriverVersion_v2(int *version) {
    *version = 13000;
    return SUCCESS;
}

/* The version is followed by uuid, status, clique and state; state 0 means "not supported". */
NVML nvmlDeviceGetGpuFabricInfoV(void *, void *info) {
    memset((char *)info + 4, 0, 16 + 4 + 4 + 1);
    return SUCCESS;
}

extern "C" __attribute__((visibility("default"))) const char *nvmlErrorString(int error) {
    return error ? "not supported" : "success";
}
