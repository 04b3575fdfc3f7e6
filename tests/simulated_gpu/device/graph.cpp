#include "graph.h"

#include <map>
#include <stdexcept>

namespace simulated_gpu {

static std::map<uint64_t, graph *> &captures = *new std::map<uint64_t, graph *>; /* running captures */

graph *graph_of(uint64_t capture) {
    auto found = captures.find(capture);
    return found == captures.end() ? nullptr : found->second;
}

void run_or_hold(const stream *on, const work &run) {
    if (!on->capture) {
        run();
        return;
    }
    holding lock(device_lock);
    graph_of(on->capture)->hold(run);
}

bool any_capture() {
    return !captures.empty();
}

void refuse_while_capturing() {
    throw std::runtime_error("CUDA error: operation not permitted when stream is capturing");
}

graph::~graph() {
    reset();
}

void graph::begin(stream *on, pool_id given) {
    holding lock(device_lock);
    static uint64_t last;
    if (id || has_ended) {
        throw std::runtime_error(
            "This CUDAGraph instance already owns a captured graph. To capture a new graph, create a new "
            "instance.");
    }
    if (on->id == 0) {
        throw std::runtime_error("CUDA graphs must be captured on a non-default stream.");
    }
    memory = given == pool_id{0, 0} ? new_pool() : given;
    keep_pool(memory);
    id = ++last;
    captures[id] = this;
    join(on);
}

void graph::join(stream *which) {
    which->capture = id;
    members.push_back({which, known(which->now, which->agent)});
}

void graph::at_end(work undo) {
    undos.push_back(std::move(undo));
}

void graph::leave() {
    for (auto undo = undos.rbegin(); undo != undos.rend(); ++undo) {
        (*undo)();
    }
    undos.clear();
    for (const member &each : members) {
        each.which->capture = 0;
    }
    captures.erase(id);
    id = 0;
}

void graph::end() {
    holding lock(device_lock);
    if (!id) {
        throw std::runtime_error("capture_end() was called without capture_begin()");
    }
    bool is_joined = true;
    const clock &at_end_of_first = members[0].which->now;
    for (const member &each : members) {
        uint64_t last = known(each.which->now, each.which->agent);
        is_joined =
            is_joined && (last == each.joined_at || last <= known(at_end_of_first, each.which->agent));
    }
    leave();
    cells.clear();
    if (!is_joined) {
        throw std::runtime_error("CUDA error: capturing stream has unjoined work");
    }
    has_ended = true;
}

void graph::hold(work run) {
    works.push_back(std::move(run));
}

void graph::replay(stream *on) {
    if (!has_ended) {
        throw std::runtime_error("Called CUDAGraph::replay without a preceding successful capture.");
    }
    launch now(on, "graph");
    for (const recorded_access &each : accesses) {
        now.access(each.memory, each.nbytes, each.how, each.label);
    }
    for (const work &each : works) {
        run_or_hold(on, each);
    }
}

void graph::reset() {
    holding lock(device_lock);
    if (id) {
        leave();
    }
    if (!(memory == pool_id{0, 0})) {
        release_pool(memory);
        memory = {0, 0};
    }
    works.clear();
    accesses.clear();
    members.clear();
    has_ended = false;
}

} // namespace simulated_gpu
