/* CUDA graphs: work launched on a capturing stream is held, and runs at each replay as one launch.
 *
 * A stream joins the capture by waiting for an event of a stream that is in it, and the first stream must
 * wait for it before the end. During the capture the host may not wait for these streams, and they may not
 * wait for work outside.
 *
 * Invariant: captured work has not run. Races inside a graph are found at its capture, in cells of its own.
 * At a replay all its accesses count as accesses of the replaying stream. */
#pragma once

#include "accesses.h"
#include "memory.h"

namespace simulated_gpu {

class DEVICE_API graph {
  public:
    graph() = default;
    ~graph();
    graph(const graph &) = delete;
    graph &operator=(const graph &) = delete;

    void begin(stream *on, pool_id memory); /* {0, 0}: make a pool */
    void end();
    void replay(stream *on);
    void reset();
    pool_id pool() const {
        return memory;
    }

    /* For the files of this folder. */
    void hold(work run);
    void join(stream *which);
    void at_end(work undo); /* run `undo` at the end of the capture, the last one first */
    cell_map cells;
    std::vector<recorded_access> accesses;

  private:
    void leave(); /* end the capture of all streams */

    uint64_t id = 0; /* nonzero during a capture */
    pool_id memory{0, 0};
    struct member {
        stream *which;
        uint64_t joined_at; /* the stream's own time when it joined */
    };
    std::vector<member> members; /* the first one began the capture */
    std::vector<work> works, undos;
    bool has_ended = false;
};

/* Return the graph of a running capture, or nullptr. */
DEVICE_API graph *graph_of(uint64_t capture);
/* For the files of this folder. */
bool any_capture();
/* Throw std::runtime_error with CUDA's message for a wait of the host during a capture. */
[[noreturn]] void refuse_while_capturing();

} // namespace simulated_gpu
