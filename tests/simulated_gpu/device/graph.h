/* CUDA graphs: what is launched on a capturing stream is held, and runs at each replay as one launch.
 *
 * A stream joins the capture by waiting for an event of one that is in it, and must be waited for by the
 * first one before the end. While it captures, nothing may wait for it on the host, and it waits for nothing
 * from outside.
 *
 * Invariant: what was captured has not run. Races inside a graph are found at its capture, in cells of its
 * own; at a replay all that it touches counts as touched by the stream of the replay. */
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

    void begin(stream *on, pool_id memory); /* {0, 0}: a pool of its own */
    void end();
    void replay(stream *on);
    void reset();
    pool_id pool() const {
        return memory;
    }

    /* For the files of this folder. */
    void hold(work run);
    void join(stream *which);
    void at_end(work undo); /* of the capture, the last one first */
    cell_map cells;
    std::vector<recorded_access> accesses;

  private:
    void leave(); /* all of its streams */

    uint64_t id = 0; /* of the capture, while it goes on */
    pool_id memory{0, 0};
    struct member {
        stream *which;
        uint64_t joined_at; /* of its own time */
    };
    std::vector<member> members; /* the first one began it */
    std::vector<work> works, undos;
    bool has_ended = false;
};

/* The graph of a capture that goes on, or nullptr. */
DEVICE_API graph *graph_of(uint64_t capture);
bool any_capture(); /* for the files of this folder, and what follows */
/* As CUDA does where the host would wait inside a capture; std::runtime_error. */
[[noreturn]] void refuse_while_capturing();

} // namespace simulated_gpu
