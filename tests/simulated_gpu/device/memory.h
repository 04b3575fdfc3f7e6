/* The device's memory by the rules of torch's caching allocator, and pinned memory.
 *
 *   segment (from the driver)   | block used | block free | block waiting |
 *
 * Invariant: a block belongs to the stream and the pool of its first allocation, and is reused only there. It
 * is used, free, or waiting (freed while recorded streams may still use it). Adjacent free blocks of a
 * segment are merged. Fresh and freed memory is filled with NaN. SIMULATED_GPU_MEMORY is the size of a device
 * in bytes, by default 8 GiB. */
#pragma once

#include "streams.h"

namespace simulated_gpu {

struct memory_stats { /* names as in torch.cuda.memory_stats */
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
    int64_t nbytes; /* negative for a free */
    int stream;     /* the block's; 0: the default stream */
    bool in_pool;   /* true for a block of a memory pool or graph */
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
DEVICE_API int device_of_memory(const void *memory); /* -1: not device memory */
DEVICE_API void empty_cache();
DEVICE_API memory_stats stats_of(int device);
DEVICE_API void reset_peaks(int device);
DEVICE_API void log_memory(); /* start a log with the used blocks, then log each change */
DEVICE_API std::vector<memory_change> take_memory_log();
DEVICE_API std::vector<memory_segment> reserved_segments(); /* of all devices */
DEVICE_API size_t total_memory();
DEVICE_API void set_fraction(double fraction, int device); /* limit the reserved share of total_memory() */

/* ---- pools of this thread: allocations use the last begun pool ---- */
DEVICE_API pool_id new_pool();
DEVICE_API void begin_pool(int device, pool_id pool);
DEVICE_API void end_pool(int device, pool_id pool);
/* Abort if any thread has begun a pool or captures a graph, like torch when a pool is destroyed. */
DEVICE_API void no_pool_may_be_entered();
DEVICE_API void keep_pool(pool_id pool); /* exempt from empty_cache() until released as many times */
DEVICE_API void release_pool(pool_id pool);

/* ---- pinned host memory ---- */
DEVICE_API void *pinned_alloc(size_t nbytes);
DEVICE_API void pinned_free(void *memory);
DEVICE_API bool is_pinned(const void *memory);
DEVICE_API bool any_pinned();

} // namespace simulated_gpu
