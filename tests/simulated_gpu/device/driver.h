/* libcuda.so.1: the driver's functions that fsdp_c calls, over the streams and events of streams.h. A library
 * loaded before is found by its name, so nothing looks for another. */
#pragma once

#include "streams.h"

namespace simulated_gpu {

/* The nth cuStreamWaitEvent or cuEventSynchronize from now does nothing, -1 for none: to try whether anybody
 * sees it. */
DEVICE_API void drop_wait(int64_t nth);
DEVICE_API int64_t waits_so_far();

/* Calls for events since the start, of the driver's functions and of torch's device guard. */
struct driver_calls {
    int64_t events_created, records, stream_waits, host_waits;
};
DEVICE_API driver_calls calls_so_far();

} // namespace simulated_gpu

extern "C" DEVICE_API int cuCtxGetDevice(int *device);
