/* libcuda.so.1: the driver functions that c10, ATen and fsdp_c look up by name. */
#include <dlfcn.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>

#include "graph.h"

using namespace fake;

/* ---- initialisation and devices ---- */

EXPORT CUresult CUDAAPI cuInit(unsigned) {
    return CUDA_SUCCESS;
}

EXPORT CUresult CUDAAPI cuGetErrorString(CUresult error, const char **text) {
    static thread_local char said[64];
    snprintf(said, sizeof said, "driver error %d of the fake GPU", (int)error);
    *text = error == CUDA_SUCCESS ? "no error" : said;
    return CUDA_SUCCESS;
}

EXPORT CUresult CUDAAPI cuGetErrorName(CUresult error, const char **text) {
    return cuGetErrorString(error, text);
}

EXPORT CUresult CUDAAPI cuDeviceGetCount(int *count) {
    *count = num_devices();
    return CUDA_SUCCESS;
}

EXPORT CUresult CUDAAPI cuDeviceGet(CUdevice *device, int ordinal) {
    *device = ordinal;
    return ordinal >= 0 && ordinal < num_devices() ? CUDA_SUCCESS : CUDA_ERROR_INVALID_DEVICE;
}

EXPORT CUresult CUDAAPI cuDeviceGetUuid_v2(CUuuid *uuid, CUdevice device) {
    memset(uuid, 0, sizeof *uuid);
    uuid->bytes[15] = (char)(device + 1);
    return CUDA_SUCCESS;
}

EXPORT CUresult CUDAAPI cuDeviceGetAttribute(int *value, CUdevice_attribute which, CUdevice) {
    static const std::map<int, int> values = {
        {CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT, 132},
        {CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR, 9},
        {CU_DEVICE_ATTRIBUTE_WARP_SIZE, 32},
        {CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_BLOCK, 1024},
        {CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_MULTIPROCESSOR, 2048},
        {CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK, 49152},
        {CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN, 232448},
        {CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_MULTIPROCESSOR, 233472},
        {CU_DEVICE_ATTRIBUTE_CLOCK_RATE, 1980000},
        {CU_DEVICE_ATTRIBUTE_UNIFIED_ADDRESSING, 1},
        {CU_DEVICE_ATTRIBUTE_MEMORY_POOLS_SUPPORTED, 1},
        {CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED, 1},
        {CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED, 1},
    };
    auto found = values.find(which);
    *value = found == values.end() ? 0 : found->second;
    return CUDA_SUCCESS;
}

/* ---- contexts ---- */

EXPORT CUresult CUDAAPI cuDevicePrimaryCtxGetState(CUdevice device, unsigned *flags, int *active) {
    *flags = 0;
    *active = primary(device)->is_active;
    return CUDA_SUCCESS;
}

EXPORT CUresult CUDAAPI cuDevicePrimaryCtxRetain(CUcontext *made, CUdevice device) {
    push(primary(device)); /* makes it */
    pop();
    *made = primary(device);
    return CUDA_SUCCESS;
}

EXPORT CUresult CUDAAPI cuCtxGetCurrent(CUcontext *which) {
    *which = current();
    return CUDA_SUCCESS;
}

EXPORT CUresult CUDAAPI cuCtxSetCurrent(CUcontext which) {
    make_current(which);
    return CUDA_SUCCESS;
}

EXPORT CUresult CUDAAPI cuCtxPushCurrent_v2(CUcontext which) {
    push(which);
    return CUDA_SUCCESS;
}

EXPORT CUresult CUDAAPI cuCtxPopCurrent_v2(CUcontext *which) {
    *which = pop();
    return CUDA_SUCCESS;
}

EXPORT CUresult CUDAAPI cuCtxGetDevice(CUdevice *device) {
    *device = current_device();
    return current() ? CUDA_SUCCESS : CUDA_ERROR_INVALID_CONTEXT;
}

EXPORT CUresult CUDAAPI cuCtxSynchronize() {
    if (CUresult refused = refused_while_capturing()) {
        return refused;
    }
    host_waits_for_all(current_device());
    return CUDA_SUCCESS;
}

/* ---- streams and events ---- */

EXPORT CUresult CUDAAPI cuStreamCreate(CUstream *made, unsigned flags) {
    if (!current()) {
        return CUDA_ERROR_INVALID_CONTEXT;
    }
    *made = new_stream(current(), flags, 0);
    return CUDA_SUCCESS;
}

EXPORT CUresult CUDAAPI cuStreamDestroy_v2(CUstream) {
    return CUDA_SUCCESS;
}

EXPORT CUresult CUDAAPI cuStreamGetCtx(CUstream stream, CUcontext *which) {
    *which = stream_of(stream)->context;
    return CUDA_SUCCESS;
}

EXPORT CUresult CUDAAPI cuStreamIsCapturing(CUstream stream, CUstreamCaptureStatus *status) {
    holding held(lock);
    const CUgraph_st *capture = stream_of(stream)->capture;
    *status = !capture                         ? CU_STREAM_CAPTURE_STATUS_NONE
              : capture->error == CUDA_SUCCESS ? CU_STREAM_CAPTURE_STATUS_ACTIVE
                                               : CU_STREAM_CAPTURE_STATUS_INVALIDATED;
    return CUDA_SUCCESS;
}

/* Return the error of a wait of the host for work in a capture, which has not run. */
static CUresult refused(CUgraph_st *capture, CUresult error) {
    if (!capture) {
        return refused_while_capturing();
    }
    capture->error = CUDA_ERROR_STREAM_CAPTURE_INVALIDATED;
    return error;
}

EXPORT CUresult CUDAAPI cuStreamSynchronize(CUstream stream) {
    CUstream_st *which = stream_of(stream);
    if (CUresult error = refused(which->capture, CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED)) {
        return error;
    }
    host_waits(now_of(which));
    return CUDA_SUCCESS;
}

EXPORT CUresult CUDAAPI cuStreamQuery(CUstream stream) {
    CUstream_st *which = stream_of(stream);
    if (CUresult error = refused(which->capture, CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED)) {
        return error;
    }
    return host_knows(now_of(which)) ? CUDA_SUCCESS : CUDA_ERROR_NOT_READY;
}

/* A wait for an event of a capture makes the stream join it. A capturing stream may not wait for an event
 * outside its capture. */
EXPORT CUresult CUDAAPI cuStreamWaitEvent(CUstream stream, CUevent event, unsigned) {
    if (!current()) {
        return CUDA_ERROR_INVALID_CONTEXT;
    }
    holding held(lock);
    CUstream_st *which = stream_of(stream);
    CUgraph_st *of_event = capture_of(event->capture);
    if (of_event && !which->capture) {
        of_event->join(which);
    } else if (which->capture && event->is_recorded && which->capture != of_event) {
        return refused(which->capture,
                       of_event ? CUDA_ERROR_STREAM_CAPTURE_MERGE : CUDA_ERROR_STREAM_CAPTURE_ISOLATION);
    }
    stream_waits(which, event->at);
    return CUDA_SUCCESS;
}

EXPORT CUresult CUDAAPI cuEventCreate(CUevent *made, unsigned flags) {
    if (!current()) {
        return CUDA_ERROR_INVALID_CONTEXT;
    }
    *made = new CUevent_st{current(), flags, false, {}, 0, 0};
    return CUDA_SUCCESS;
}

EXPORT CUresult CUDAAPI cuEventDestroy_v2(CUevent event) {
    delete event;
    return CUDA_SUCCESS;
}

/* Fails for a stream and an event of different contexts, like the driver. */
EXPORT CUresult CUDAAPI cuEventRecord(CUevent event, CUstream stream) {
    if (!current()) {
        return CUDA_ERROR_INVALID_CONTEXT;
    }
    CUstream_st *on = stream_of(stream);
    if (on->context != event->context) {
        return CUDA_ERROR_INVALID_HANDLE;
    }
    holding held(lock);
    event->at = on->now;
    event->capture = on->capture ? on->capture->id : 0;
    event->is_recorded = true;
    event->ms = fake_ms();
    return CUDA_SUCCESS;
}

EXPORT CUresult CUDAAPI cuEventQuery(CUevent event) {
    if (CUresult error = refused(capture_of(event->capture), CUDA_ERROR_CAPTURED_EVENT)) {
        return error;
    }
    return host_knows(event->at) ? CUDA_SUCCESS : CUDA_ERROR_NOT_READY;
}

EXPORT CUresult CUDAAPI cuEventSynchronize(CUevent event) {
    if (CUresult error = refused(capture_of(event->capture), CUDA_ERROR_CAPTURED_EVENT)) {
        return error;
    }
    host_waits(event->at);
    return CUDA_SUCCESS;
}

EXPORT CUresult CUDAAPI cuEventElapsedTime_v2(float *ms, CUevent start, CUevent end) {
    if (!start->is_recorded || !end->is_recorded || ((start->flags | end->flags) & CU_EVENT_DISABLE_TIMING)) {
        return CUDA_ERROR_INVALID_HANDLE;
    }
    *ms = (float)(end->ms - start->ms);
    return CUDA_SUCCESS;
}

/* ---- virtual memory management, for expandable segments: a handle is a memory file ---- */

struct pages {
    int file, device, references;
    size_t nbytes;
};

EXPORT CUresult CUDAAPI cuMemGetAllocationGranularity(size_t *nbytes, const CUmemAllocationProp *,
                                                      CUmemAllocationGranularity_flags) {
    *nbytes = 2 << 20;
    return CUDA_SUCCESS;
}

EXPORT CUresult CUDAAPI cuMemAddressReserve(CUdeviceptr *made, size_t nbytes, size_t, CUdeviceptr,
                                            unsigned long long) {
    const size_t huge = 2 << 20;
    char *begin =
        (char *)mmap(nullptr, nbytes + huge, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (begin == MAP_FAILED) {
        return CUDA_ERROR_OUT_OF_MEMORY;
    }
    *made = ((CUdeviceptr)begin + huge - 1) / huge * huge; /* the unaligned rest stays mapped */
    return CUDA_SUCCESS;
}

EXPORT CUresult CUDAAPI cuMemAddressFree(CUdeviceptr begin, size_t nbytes) {
    munmap((void *)begin, nbytes);
    return CUDA_SUCCESS;
}

EXPORT CUresult CUDAAPI cuMemCreate(CUmemGenericAllocationHandle *made, size_t nbytes,
                                    const CUmemAllocationProp *what, unsigned long long) {
    int device = what->location.type == CU_MEM_LOCATION_TYPE_DEVICE ? what->location.id : current_device();
    holding held(lock);
    if (used_nbytes(device) + nbytes > device_nbytes()) {
        return CUDA_ERROR_OUT_OF_MEMORY;
    }
    int file = memfd_create("fake_cuda", MFD_CLOEXEC);
    if (file < 0 || ftruncate(file, (off_t)nbytes) != 0) {
        return CUDA_ERROR_OUT_OF_MEMORY;
    }
    add_used(device, (ptrdiff_t)nbytes);
    *made = (CUmemGenericAllocationHandle) new pages{file, device, 1, nbytes};
    return CUDA_SUCCESS;
}

static void let_go(pages *which) {
    if (--which->references == 0) {
        add_used(which->device, -(ptrdiff_t)which->nbytes);
        close(which->file);
        delete which;
    }
}

static std::map<CUdeviceptr, std::pair<pages *, size_t>> &mappings =
    *new std::map<CUdeviceptr, std::pair<pages *, size_t>>;

EXPORT CUresult CUDAAPI cuMemRelease(CUmemGenericAllocationHandle handle) {
    holding held(lock);
    let_go((pages *)handle);
    return CUDA_SUCCESS;
}

EXPORT CUresult CUDAAPI cuMemMap(CUdeviceptr at, size_t nbytes, size_t offset,
                                 CUmemGenericAllocationHandle handle, unsigned long long) {
    auto *which = (pages *)handle;
    holding held(lock);
    void *made = mmap((void *)at, nbytes, PROT_NONE, MAP_SHARED | MAP_FIXED, which->file, (off_t)offset);
    if (made == MAP_FAILED) {
        return CUDA_ERROR_INVALID_VALUE;
    }
    which->references++;
    mappings[at] = {which, nbytes};
    note(made, {nbytes, nbytes, DEVICE_MEMORY, which->device});
    return CUDA_SUCCESS;
}

EXPORT CUresult CUDAAPI cuMemSetAccess(CUdeviceptr at, size_t nbytes, const CUmemAccessDesc *, size_t) {
    return mprotect((void *)at, nbytes, PROT_READ | PROT_WRITE) == 0 ? CUDA_SUCCESS
                                                                     : CUDA_ERROR_INVALID_VALUE;
}

EXPORT CUresult CUDAAPI cuMemUnmap(CUdeviceptr at, size_t nbytes) {
    holding held(lock);
    mmap((void *)at, nbytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0);
    auto found = mappings.lower_bound(at);
    while (found != mappings.end() && found->first < at + nbytes) {
        forget((void *)found->first);
        let_go(found->second.first);
        found = mappings.erase(found);
    }
    return CUDA_SUCCESS;
}

EXPORT CUresult CUDAAPI cuMemRetainAllocationHandle(CUmemGenericAllocationHandle *handle, void *at) {
    holding held(lock);
    auto found = mappings.find((CUdeviceptr)at);
    if (found == mappings.end()) {
        return CUDA_ERROR_INVALID_VALUE;
    }
    found->second.first->references++;
    *handle = (CUmemGenericAllocationHandle)found->second.first;
    return CUDA_SUCCESS;
}

EXPORT CUresult CUDAAPI cuMemGetAllocationPropertiesFromHandle(CUmemAllocationProp *what,
                                                               CUmemGenericAllocationHandle handle) {
    memset(what, 0, sizeof *what);
    what->type = CU_MEM_ALLOCATION_TYPE_PINNED;
    what->location.type = CU_MEM_LOCATION_TYPE_DEVICE;
    what->location.id = ((pages *)handle)->device;
    return CUDA_SUCCESS;
}

EXPORT CUresult CUDAAPI cuMemGetAddressRange_v2(CUdeviceptr *begin, size_t *nbytes, CUdeviceptr at) {
    block found;
    void *data;
    if (!find((void *)at, &found, &data)) {
        return CUDA_ERROR_NOT_FOUND;
    }
    *begin = (CUdeviceptr)data;
    *nbytes = found.nbytes;
    return CUDA_SUCCESS;
}

EXPORT CUresult CUDAAPI cuPointerGetAttribute(void *value, CUpointer_attribute which, CUdeviceptr at) {
    block found;
    void *data;
    if (!find((void *)at, &found, &data)) {
        return CUDA_ERROR_INVALID_VALUE;
    }
    switch (which) {
    case CU_POINTER_ATTRIBUTE_CONTEXT:
        *(CUcontext *)value = primary(found.device);
        break;
    case CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL:
        *(int *)value = found.device;
        break;
    case CU_POINTER_ATTRIBUTE_MEMORY_TYPE:
        *(unsigned *)value = found.kind == DEVICE_MEMORY ? CU_MEMORYTYPE_DEVICE : CU_MEMORYTYPE_HOST;
        break;
    case CU_POINTER_ATTRIBUTE_RANGE_START_ADDR:
        *(CUdeviceptr *)value = (CUdeviceptr)data;
        break;
    case CU_POINTER_ATTRIBUTE_RANGE_SIZE:
        *(size_t *)value = found.nbytes;
        break;
    default:
        return CUDA_ERROR_NOT_SUPPORTED;
    }
    return CUDA_SUCCESS;
}

EXPORT CUresult CUDAAPI cuMemsetD32Async(CUdeviceptr at, unsigned value, size_t count, CUstream on) {
    auto *to = (unsigned *)at;
    run(stream_of(on), [=] { std::fill(to, to + count, value); }, {{to, count * sizeof value}});
    return CUDA_SUCCESS;
}

EXPORT CUresult CUDAAPI cuStreamWriteValue32_v2(CUstream on, CUdeviceptr at, cuuint32_t value, unsigned) {
    auto *to = (cuuint32_t *)at;
    run(stream_of(on), [=] { *to = value; }, {{to, sizeof value}});
    return CUDA_SUCCESS;
}

/* A function of this library by the name that the API has it under. */
EXPORT void *fake_cuda_driver_function(const char *name) {
    static void *self = [] {
        Dl_info info;
        dladdr((void *)&cuInit, &info);
        return dlopen(info.dli_fname, RTLD_NOW | RTLD_NOLOAD);
    }();
    void *found = dlsym(self, (std::string(name) + "_v2").c_str());
    return found ? found : dlsym(self, name);
}
