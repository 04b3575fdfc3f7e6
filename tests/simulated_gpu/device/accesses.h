/* The race detector: who touched which bytes last, and whether anything orders the next one behind.
 *
 * Invariant: cells hold the memory that was touched, as ranges that do not overlap, each with its last write
 * and the last read of each agent since. Two accesses of different agents conflict if one writes; a conflict
 * that nothing orders is reported, once for each pair of names and streams. The host's accesses come before
 * all that it launches later.
 *
 * SIMULATED_GPU_RACES=0 looks for nothing; SIMULATED_GPU_LOUD=1 says what was found on stderr;
 * SIMULATED_GPU_REPORTS=folder appends it to a file per process. */
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

struct cell { /* bytes that were all touched alike, from their key in the map */
    uintptr_t end;
    moment write;              /* of NOBODY: none */
    std::vector<moment> reads; /* since the write, the last of each agent */
};
using cell_map = std::map<uintptr_t, cell>;

struct recorded_access {
    const void *memory;
    size_t nbytes;
    enum access how;
    int label;
};

/* What runs on the stream, or on the host for nullptr, from here to the end of the object; other threads
 * wait. */
class DEVICE_API launch {
  public:
    launch(stream *on, const char *what);
    ~launch();
    launch(const launch &) = delete;
    launch &operator=(const launch &) = delete;

    void access(const void *memory, size_t nbytes, enum access how);
    void access(const void *memory, size_t nbytes, enum access how, int of_label); /* of another name */

  private:
    stream *on;
    int agent;
    uint64_t time;
    int label;
};

/* What was found since the last call: the two accesses, and where Python stood at the second. */
DEVICE_API std::vector<std::string> take_reports();
/* How often each operation ran on each stream. */
DEVICE_API std::vector<std::pair<std::string, int64_t>> launch_counts();
/* Who says where the program stands; kept for the process. */
DEVICE_API void set_place(std::string (*place)());

/* ---- the order of a program: what ran and took memory where, after how much of the other streams' work ----
 */
struct ordered {
    std::string what;
    int agent;
    /* by agent, its own included: launches since the log began */
    std::vector<std::pair<int, uint64_t>> after;
};
DEVICE_API void log_order(bool on); /* it begins empty, as the host knows the device to be through */
DEVICE_API std::vector<ordered> order_so_far();

/* ---- for memory.cpp ---- */

/* Memory of a stream is given back, while nothing but `known_then` is known to be over: what else still
 * touches it must be over for the stream when it takes memory again, which may be the same. Whether all is
 * over. */
bool note_free(uintptr_t first, uintptr_t end, const clock &known_then, int owner);
/* The stream takes memory, or may do so at once: what still touches what it gave back before is reported,
 * unless SIMULATED_GPU_FREES=0. */
void check_frees(const clock &known_now, int owner);
void log_alloc(const clock &known_now, int owner);
void forget(uintptr_t first, uintptr_t end); /* the memory is another now */

} // namespace simulated_gpu
