/* The race detector: the last accesses to each byte of memory, and the order between them and the next one.
 *
 * Invariant: cells hold the accessed memory as ranges that do not overlap, each with its last write and the
 * last read of each agent since. Two accesses of different agents conflict if one is a write. A conflict
 * without an order is reported, once for each pair of names and streams. The host's accesses come before all
 * of its later launches.
 *
 * SIMULATED_GPU_RACES=0 disables the detector; SIMULATED_GPU_LOUD=1 prints reports to stderr. */
#pragma once

#include <map>

#include "streams.h"

namespace simulated_gpu {

enum access { READ, WRITE };

struct moment {
    int agent;
    uint64_t time;
    int label;
};

struct cell { /* bytes with equal accesses; their begin is the key in the map */
    uintptr_t end;
    moment write;              /* its agent is NOBODY if there was none */
    std::vector<moment> reads; /* since the write, the last of each agent */
};
using cell_map = std::map<uintptr_t, cell>;

struct recorded_access {
    const void *memory;
    size_t nbytes;
    enum access how;
    int label;
};

/* A launch on a stream, or on the host for nullptr, as long as the object lives. Other threads wait. */
class DEVICE_API launch {
  public:
    launch(stream *on, const char *what);
    ~launch();
    launch(const launch &) = delete;
    launch &operator=(const launch &) = delete;

    void access(const void *memory, size_t nbytes, enum access how);
    void access(const void *memory, size_t nbytes, enum access how,
                int of_label); /* by a different operation */

  private:
    stream *on;
    int agent;
    uint64_t time;
    int label;
};

/* Return the races found since the last call: both accesses, and Python's position at the second. */
DEVICE_API std::vector<std::string> take_reports();
/* Return the number of launches of each operation on each stream. */
DEVICE_API std::vector<std::pair<std::string, int64_t>> launch_counts();
/* Set the function that returns the program's position, for the rest of the process. */
DEVICE_API void set_place(std::string (*place)());

/* ---- the order of a program: launches and allocations, and the launches before each ---- */
struct ordered {
    std::string what;
    int agent;
    /* (agent, number of its launches before this one since the log began), its own included */
    std::vector<std::pair<int, uint64_t>> after;
};
DEVICE_API void log_order(bool on); /* starts empty: the host knows that the device is idle */
DEVICE_API std::vector<ordered> order_so_far();

/* ---- for memory.cpp ---- */

/* Record a free of memory of the stream `owner`, with `known_then` as the work known to be finished. Other
 * accesses must be finished for that stream when it allocates again, as it may get the same memory. */
void note_free(uintptr_t first, uintptr_t end, const clock &known_then, int owner);
/* Report accesses to freed memory of the stream that are not finished when it allocates, or may allocate,
 * unless SIMULATED_GPU_FREES=0. */
void check_frees(const clock &known_now, int owner);
void log_alloc(const clock &known_now, int owner);
void forget(uintptr_t first, uintptr_t end); /* the addresses are new memory now */

} // namespace simulated_gpu
