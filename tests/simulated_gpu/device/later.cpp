#include "later.h"

#include <cstdlib>
#include <deque>
#include <unordered_map>

#include "graph.h"

namespace simulated_gpu {

/* What a stream holds, and how much it has run of all that it ever held. */
struct queue {
    std::deque<held_work> held;
    uint64_t num_run = 0;
};

/* Never unmade: threads of the process may outlive its static objects. */
static std::unordered_map<const stream *, queue> &queues = *new std::unordered_map<const stream *, queue>;

static enum late_streams from_environment() {
    const char *value = getenv("SIMULATED_GPU_LATE");
    std::string name = value ? value : "";
    return name == "side"      ? SIDE_LATE
           : name == "default" ? DEFAULT_LATE
           : name == "all"     ? ALL_LATE
                               : NONE_LATE;
}

static enum late_streams late = from_environment();

void set_late(enum late_streams which) {
    holding lock(device_lock);
    run_all_held(-1);
    late = which;
}

bool is_late(const stream *on) {
    return late == ALL_LATE || late == (on->id == 0 ? DEFAULT_LATE : SIDE_LATE);
}

bool is_anyone_late() {
    return late != NONE_LATE;
}

bool is_later(const stream *on) {
    return on->capture || is_late(on);
}

void hold(stream *on, work run) {
    holding lock(device_lock);
    if (graph *capturing = graph_of(on->capture)) {
        capturing->hold(std::move(run));
    } else {
        queues[on].held.push_back({std::move(run), {}});
    }
}

position hold_in_turn(stream *on, work run, position before) {
    holding lock(device_lock);
    if (!on->capture) {
        queues[on].held.push_back({{}, before});
    }
    hold(on, std::move(run));
    return on->capture ? before : end_of(on);
}

void run_or_hold(stream *on, const work &run) {
    if (is_later(on)) {
        hold(on, run);
    } else {
        run();
    }
}

position end_of(stream *on) {
    queue &of = queues[on];
    return {on, of.num_run + of.held.size()};
}

void run_until(position until) {
    while (until.of && queues[until.of].num_run < until.at) {
        queue &of = queues[until.of];
        held_work next = std::move(of.held.front());
        of.held.pop_front();
        of.num_run++;
        if (next.run) {
            next.run();
        } else {
            run_until(next.until);
        }
    }
}

void hold_wait(stream *on, position until) {
    if (on->capture) {
        return; /* the graph runs in the order of its launches */
    }
    if (is_late(on)) {
        queues[on].held.push_back({{}, until});
    } else {
        run_until(until);
    }
}

void run_held(stream *on) {
    holding lock(device_lock);
    run_until(end_of(on));
}

void run_all_held(int device) {
    for (auto &[of, _] : queues) {
        if (device < 0 || of->device == device) {
            run_until(end_of(const_cast<stream *>(of)));
        }
    }
}

} // namespace simulated_gpu
