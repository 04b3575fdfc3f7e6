#include "driver.h"

#include <stdexcept>
#include <unordered_map>
#include <unordered_set>

namespace simulated_gpu {

static int64_t dropped = -1, waits;

struct wait_made {
    int waiting, awaited; /* agents */
    bool orders; /* true if neither the waiting agent nor the host knew the awaited work as finished */
};
static std::vector<wait_made> &history = *new std::vector<wait_made>; /* all waits so far */
static std::unordered_map<const void *, int> &recorders = *new std::unordered_map<const void *, int>;

/* Destroyed streams of scripts. Every later use of one is an error. */
static std::unordered_set<const stream *> &destroyed = *new std::unordered_set<const stream *>;

static bool is_destroyed(const stream *which) {
    return destroyed.count(which) != 0;
}

void drop_wait(int64_t nth) {
    holding lock(device_lock);
    dropped = nth < 0 ? -1 : waits + nth;
}

int64_t waits_so_far() {
    return waits;
}

/* A stream or the host is about to wait. False: this wait is left out. */
static bool begin_wait(int waiting, const clock &known_to_it, const void *until) {
    clock before = known_to_it;
    merge(before, host_clock());
    history.push_back({waiting, recorders[until], !knows(before, ((const event *)until)->at)});
    return waits++ != dropped;
}

/* The thread's stack of contexts below the current one. A context is its device's index plus 1. */
static thread_local std::vector<void *> pushed;

static void *context_of(int device) {
    return (void *)(uintptr_t)(device + 1);
}

} // namespace simulated_gpu

using namespace simulated_gpu;

enum { SUCCESS = 0, INVALID_CONTEXT = 201, INVALID_HANDLE = 400, NOT_READY = 600, NOT_WHILE_CAPTURING = 900 };

/* Run the body; turn the exception of a call that is illegal during capture into the driver's error code. */
template <typename Body> static int result_of(Body body) {
    try {
        return body();
    } catch (const std::runtime_error &) {
        return NOT_WHILE_CAPTURING;
    }
}

extern "C" {

DEVICE_API int cuEventCreate(void **made, unsigned) {
    if (!has_context()) {
        return INVALID_CONTEXT;
    }
    *made = event_new();
    return SUCCESS;
}

DEVICE_API int cuEventDestroy_v2(void *which) {
    {
        holding lock(device_lock);
        recorders.erase(which);
    }
    event_free((event *)which);
    return SUCCESS;
}

DEVICE_API int cuEventRecord(void *which, void *on) {
    if (!has_context()) {
        return INVALID_CONTEXT;
    }
    holding lock(device_lock);
    stream *recorded = stream_of_handle(on, current_device());
    if (is_destroyed(recorded)) {
        return INVALID_HANDLE;
    }
    event_record((event *)which, recorded);
    recorders[which] = recorded->agent;
    return SUCCESS;
}

DEVICE_API int cuEventSynchronize(void *which) {
    holding lock(device_lock);
    bool waits_for_it = begin_wait(HOST, host_clock(), which);
    return result_of([&] {
        if (waits_for_it) {
            host_wait((event *)which);
        }
        return SUCCESS;
    });
}

DEVICE_API int cuEventQuery(void *which) {
    return result_of([&] { return event_query((event *)which) ? SUCCESS : NOT_READY; });
}

DEVICE_API int cuStreamWaitEvent(void *handle, void *until, unsigned) {
    if (!has_context()) {
        return INVALID_CONTEXT;
    }
    holding lock(device_lock);
    stream *waiting = stream_of_handle(handle, current_device());
    if (is_destroyed(waiting)) {
        return INVALID_HANDLE;
    }
    bool waits_for_it = begin_wait(waiting->agent, waiting->now, until);
    return result_of([&] {
        if (waits_for_it) {
            stream_wait(waiting, (event *)until);
        }
        return SUCCESS;
    });
}

DEVICE_API int cuStreamCreate(void **made, unsigned) {
    if (!has_context()) {
        return INVALID_CONTEXT;
    }
    *made = stream_of_the_script(current_device());
    return SUCCESS;
}

/* Work in the stream still runs to its end. */
DEVICE_API int cuStreamDestroy_v2(void *handle) {
    holding lock(device_lock);
    return handle && destroyed.insert((stream *)handle).second ? SUCCESS : INVALID_HANDLE;
}

DEVICE_API int cuStreamSynchronize(void *handle) {
    return result_of([&] {
        host_wait_stream(stream_of_handle(handle, current_device()));
        return SUCCESS;
    });
}

DEVICE_API int cuStreamIsCapturing(void *handle, int *status) {
    const stream *asked = stream_of_handle(handle, current_device());
    *status = asked->capture != 0;
    return is_destroyed(asked) ? INVALID_HANDLE : SUCCESS;
}

DEVICE_API int cuStreamGetCtx(void *handle, void **context) {
    if (!handle && !has_context()) {
        return INVALID_CONTEXT;
    }
    *context = context_of(stream_of_handle(handle, current_device())->device);
    return SUCCESS;
}

DEVICE_API int cuCtxGetCurrent(void **context) {
    *context = has_context() ? context_of(current_device()) : nullptr;
    return SUCCESS;
}

DEVICE_API int cuCtxSetCurrent(void *context) {
    if (context) {
        set_device((int)(uintptr_t)context - 1);
    } else {
        leave_device();
    }
    return SUCCESS;
}

DEVICE_API int cuCtxPushCurrent_v2(void *context) {
    void *before = nullptr;
    cuCtxGetCurrent(&before);
    pushed.push_back(before);
    return cuCtxSetCurrent(context);
}

DEVICE_API int cuCtxPopCurrent_v2(void **context) {
    if (pushed.empty()) {
        return INVALID_CONTEXT;
    }
    cuCtxGetCurrent(context);
    cuCtxSetCurrent(pushed.back());
    pushed.pop_back();
    return SUCCESS;
}

DEVICE_API int cuCtxGetDevice(int *device) {
    if (!has_context()) {
        return INVALID_CONTEXT;
    }
    *device = current_device();
    return SUCCESS;
}

/* Return true if the nth wait since the start ordered anything, and set the agents of both sides. */
DEVICE_API bool simulated_gpu_wait(int64_t nth, int *waiting, int *awaited) {
    holding lock(device_lock);
    const wait_made &made = history.at((size_t)nth);
    *waiting = made.waiting;
    *awaited = made.awaited;
    return made.orders;
}
}
