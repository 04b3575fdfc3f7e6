#include "streams.h"

#include <algorithm>
#include <cstdlib>
#include <deque>
#include <stdexcept>

#include "driver.h"
#include "graph.h"
#include "timeline.h"

namespace simulated_gpu {

std::recursive_mutex device_lock;

int64_t setting(const char *name, int64_t otherwise) {
    const char *value = getenv(name);
    return value && *value ? atoll(value) : otherwise;
}

/* ---- devices ---- */

static thread_local int device_of_thread = -1;

int device_count() {
    static int count = (int)std::min<int64_t>(setting("SIMULATED_GPU_DEVICES", 2), MOST_DEVICES);
    return count;
}

int current_device() {
    return device_of_thread < 0 ? 0 : device_of_thread;
}

bool has_context() {
    return device_of_thread >= 0;
}

void set_device(int device) {
    device_of_thread = device;
}

void leave_device() {
    device_of_thread = -1;
}

/* ---- streams ---- */

enum { STREAMS_PER_POOL = 32 };

struct all_streams {
    std::deque<stream> list; /* the stream of agent i is list[i - 1] */
    stream *default_of[MOST_DEVICES];
    std::vector<stream *> pools[MOST_DEVICES][2]; /* by priority: default, high */
    size_t next[MOST_DEVICES][2];
};

/* Created at first use and never destroyed: threads of the process may outlive its static objects. */
static all_streams &streams() {
    static all_streams *made = new all_streams{};
    return *made;
}

static thread_local stream *streams_of_thread[MOST_DEVICES];

static stream *new_stream(int device, int priority) {
    std::deque<stream> &list = streams().list;
    int agent = (int)list.size() + 1;
    list.push_back({device, agent, agent, priority, {}, 0});
    return &list.back();
}

static stream *default_stream(int device) {
    holding lock(device_lock);
    stream *&found = streams().default_of[device];
    if (!found) {
        found = new_stream(device, 0);
        found->id = 0;
    }
    return found;
}

stream *stream_from_pool(int device, int priority) {
    holding lock(device_lock);
    int kind = priority < 0;
    std::vector<stream *> &pool = streams().pools[device][kind];
    size_t at = streams().next[device][kind]++ % STREAMS_PER_POOL;
    if (at == pool.size()) {
        pool.push_back(new_stream(device, kind ? -1 : 0));
    }
    return pool[at];
}

stream *stream_of_agent(int agent) {
    holding lock(device_lock);
    return &streams().list.at((size_t)agent - 1);
}

stream *stream_of_the_script(int device) {
    holding lock(device_lock);
    stream *made = new_stream(device, 0);
    made->id = (int64_t)made;
    return made;
}

stream *stream_of_id(int device, int64_t id) {
    if (id == 0) {
        return default_stream(device);
    }
    return id <= (int64_t)streams().list.size() ? stream_of_agent((int)id) : (stream *)id;
}

stream *stream_of_handle(void *handle, int device) {
    return handle ? (stream *)handle : default_stream(device);
}

void *handle_of(stream *which) {
    return which->id == 0 ? nullptr : which;
}

stream *current_stream(int device) {
    stream *chosen = streams_of_thread[device];
    return chosen ? chosen : default_stream(device);
}

void set_current_stream(stream *which) {
    streams_of_thread[which->device] = which;
}

std::string name_of_agent(int agent) {
    if (agent == HOST) {
        return "the host";
    }
    const stream &which = *stream_of_agent(agent);
    return which.id == 0 ? "the default stream" : "stream " + std::to_string(which.id);
}

/* ---- order ---- */

clock &host_clock() {
    static clock *made = new clock(1);
    return *made;
}

uint64_t known(const clock &to, int agent) {
    return (size_t)agent < to.size() ? to[(size_t)agent] : 0;
}

void merge(clock &into, const clock &from) {
    if (into.size() < from.size()) {
        into.resize(from.size());
    }
    for (size_t i = 0; i < from.size(); i++) {
        into[i] = std::max(into[i], from[i]);
    }
}

bool knows(const clock &who, const clock &what) {
    for (size_t i = HOST + 1; i < what.size(); i++) {
        if (what[i] > known(who, (int)i)) {
            return false;
        }
    }
    return true;
}

uint64_t tick(clock &of, int agent) {
    if (of.size() <= (size_t)agent) {
        of.resize((size_t)agent + 1);
    }
    return ++of[(size_t)agent];
}

static driver_calls calls;

driver_calls calls_so_far() {
    holding lock(device_lock);
    return calls;
}

event *event_new() {
    holding lock(device_lock);
    calls.events_created++;
    return new event{};
}

void event_free(event *which) {
    delete which;
}

void event_record(event *which, stream *on) {
    holding lock(device_lock);
    calls.records++;
    merge(on->now, host_clock()); /* the host's own order reaches the stream with what it enqueues */
    *which = {true, false, on->now, std::chrono::steady_clock::now(), on->capture};
    time_record(which, on);
}

void stream_wait(stream *which, const event *until) {
    holding lock(device_lock);
    calls.stream_waits++;
    time_wait(which, until);
    if (!until->recorded) {
        return;
    }
    if (graph *of_event = graph_of(until->capture); of_event && !which->capture) {
        of_event->join(which);
    } else if (which->capture && which->capture != until->capture) {
        throw std::runtime_error("CUDA error: dependency created on uncaptured work in another stream");
    }
    merge(which->now, until->at);
}

void host_wait(const event *until) {
    holding lock(device_lock);
    calls.host_waits++;
    if (graph_of(until->capture)) {
        refuse_while_capturing();
    }
    time_host_wait(until->time, "waits for an event");
    merge(host_clock(), until->at);
}

void host_wait_stream(stream *which) {
    holding lock(device_lock);
    if (which->capture) {
        refuse_while_capturing();
    }
    time_host_wait(end_in_time(which), "waits for a stream");
    merge(host_clock(), which->now);
}

void host_wait_device(int device) {
    holding lock(device_lock);
    if (any_capture()) {
        refuse_while_capturing();
    }
    for (const stream &each : streams().list) {
        if (each.device == device) {
            time_host_wait(end_in_time(&each), "waits for the device");
            merge(host_clock(), each.now);
        }
    }
}

bool event_query(event *which) {
    holding lock(device_lock);
    if (graph_of(which->capture)) {
        refuse_while_capturing();
    }
    if (!which->recorded || knows(host_clock(), which->at)) {
        return true;
    }
    host_spends(costs().event);
    if (is_timed() ? !is_over_in_time(which) : !which->asked) {
        which->asked = true;
        return false;
    }
    host_wait(which);
    return true;
}

double host_ms_between(const event *from, const event *to) {
    if (is_timed()) {
        return (to->time.over - from->time.over) / 1e3;
    }
    return std::chrono::duration<double, std::milli>(to->host_time - from->host_time).count();
}

bool stream_query(stream *which) {
    holding lock(device_lock);
    host_spends(costs().event);
    if (is_timed() && !is_over_in_time(which)) {
        return false;
    }
    host_wait_stream(which);
    return true;
}

} // namespace simulated_gpu
