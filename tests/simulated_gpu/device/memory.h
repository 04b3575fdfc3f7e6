/* The device's memory by the rules of torch's caching allocator, and pinned memory.
 *
 *   segment (from the driver)  | block used | block free | block waiting |     blocks lie one behind the
 * other, neighbours that are both free are one
 *
 * Invariant: a block belongs to the stream on which it was allocated, is used, free or waiting (freed, while
 * streams that it was recorded on may not be through), and goes to nobody but its stream and its pool. What
 * is fresh or freed is full of NaN. SIMULATED_GPU_MEMORY is a device's size in bytes, 8 GiB unless told. */
#pragma once

#include "streams.h"

namespace simulated_gpu {

struct memory_stats { /* as torch.cuda.memory_stats names them */
    int64_t allocated, allocated_peak, requested, requested_peak, reserved, reserved_peak, active,
        active_peak;
    int64_t num_device_alloc, num_device_free, num_alloc_retries, num_ooms, num_allocs;
};

struct pool_id {
    uint64_t first, second;
    bool operator==(const pool_id &) const = default;
};

struct memory_change {
    uintptr_t at;
    int64_t nbytes; /* negative: it is given back */
    int stream;     /* to which it belongs; 0: the default stream */
    bool in_pool;   /* that somebody has begun */
};

struct memory_segment {
    uintptr_t at;
    size_t nbytes;
    int stream;
    bool in_pool;
};

DEVICE_API void *device_alloc(size_t nbytes, int device, stream *on); /* nullptr: out of memory */
DEVICE_API void device_free(void *memory);
DEVICE_API void record_stream(void *memory, stream *user);
DEVICE_API int device_of_memory(const void *memory); /* -1: of none */
DEVICE_API void empty_cache();
DEVICE_API memory_stats stats_of(int device);
DEVICE_API void reset_peaks(int device);
DEVICE_API void log_memory(); /* from now on: what is in use, and then each change of that */
DEVICE_API std::vector<memory_change> take_memory_log();
DEVICE_API std::vector<memory_segment> reserved_segments(); /* of all devices */
DEVICE_API size_t total_memory();
DEVICE_API void set_fraction(double fraction, int device); /* of it that may be reserved */

/* ---- pools, of this thread: allocations go to the last one that was begun ---- */
DEVICE_API pool_id new_pool();
DEVICE_API void begin_pool(int device, pool_id pool);
DEVICE_API void end_pool(int device, pool_id pool);
/* Ends the process if one is, by any thread, or a graph is captured: as torch's allocator, where a pool ends. */
DEVICE_API void no_pool_may_be_entered();
DEVICE_API void keep_pool(pool_id pool); /* emptying the cache leaves it, until it is released as often */
DEVICE_API void release_pool(pool_id pool);

/* ---- memory of the host that the device reads and writes by itself ---- */
DEVICE_API void *pinned_alloc(size_t nbytes);
DEVICE_API void pinned_free(void *memory);
DEVICE_API bool is_pinned(const void *memory);
DEVICE_API bool any_pinned();

} // namespace simulated_gpu
