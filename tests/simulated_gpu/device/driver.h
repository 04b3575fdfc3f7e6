/* libcuda.so.1: the driver functions that fsdp_c calls, on the streams and events of streams.h. It is loaded
 * before fsdp_c, so that dlopen() of this name returns it. */
#pragma once

#include "streams.h"

namespace simulated_gpu {

/* Drop the nth cuStreamWaitEvent or cuEventSynchronize from now (-1: none), to check that the race detector
 * reports the missing wait. */
DEVICE_API void drop_wait(int64_t nth);
DEVICE_API int64_t waits_so_far();

/* Numbers of event calls since the start, through the driver and through torch's device guard. */
struct driver_calls {
    int64_t events_created, records, stream_waits, host_waits;
};
DEVICE_API driver_calls calls_so_far();

} // namespace simulated_gpu

extern "C" DEVICE_API int cuCtxGetDevice(int *device);
