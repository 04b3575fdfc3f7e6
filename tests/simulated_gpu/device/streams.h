/* The simulated device: its streams and events, and what is known about the order between them. No torch
 * here.
 *
 *   host --- launch --- launch ------- wait(event)        a clock each: how far it knows of each of the
 * others |           |             ^ stream 1   X ----------|-- record ---' stream 2               X ---
 * wait(event) --- X
 *
 * Invariant: work runs when it is launched, on the calling thread, which is a legal order of any program of
 * streams, or later in another legal one: later.h. What the program promises about order is followed beside
 * it by vector clocks: each stream is an agent, and the host is one more (all its threads together). An
 * agent's clock holds, for each agent, the last launch that is known to be over. */
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <map>
#include <mutex>
#include <string>
#include <vector>

#define DEVICE_API __attribute__((visibility("default")))

namespace simulated_gpu {

enum { MOST_DEVICES = 8, HOST = 0 /* the host's agent; a stream's is from 1 */ };

using clock = std::vector<uint64_t>; /* by agent; missing entries are 0 */

/* The last work that must be over, by the stream's id. */
using work_before = std::map<int64_t, int64_t>;

/* By the model of timeline.h, in us. */
struct stream_time {
    double ready = 0;              /* from when it may begin what comes next */
    double busy_until = 0;         /* the end of what it did last */
    int64_t last = -1, cause = -1; /* what it did last; what made it ready later than that */
    work_before after{};           /* on other streams, of what comes next */
};
struct event_time {
    double over = 0;
    int64_t last = -1; /* what its stream did last before */
    work_before after{};
};

struct stream { /* lives as long as the process: its address is the driver's handle */
    int device;
    int agent;
    int64_t id; /* torch's; 0 for the default stream */
    int priority;
    clock now;
    uint64_t capture; /* of the graph that it is part of: graph.h; 0: none */
    stream_time time{};
};

/* In all that a stream ever held: later.h. */
struct position {
    stream *of;
    uint64_t at;
};

struct event {
    bool recorded;
    bool asked; /* queried before it was known to be over */
    clock at;
    std::chrono::steady_clock::time_point host_time; /* when it was recorded */
    position end;                                    /* of what its stream then held */
    uint64_t capture;                                /* in which it was recorded */
    event_time time{};
};

/* A number from the environment. */
int64_t setting(const char *name, int64_t otherwise);

/* One lock for all of the device; whoever holds it may call anything here. */
extern std::recursive_mutex device_lock;
using holding = std::lock_guard<std::recursive_mutex>;

/* ---- devices: SIMULATED_GPU_DEVICES of them; each thread has a current one once it has chosen ---- */
DEVICE_API int device_count();
DEVICE_API int current_device(); /* 0 before this thread has chosen */
DEVICE_API bool has_context();   /* whether it has */
DEVICE_API void set_device(int device);
DEVICE_API void leave_device();

/* ---- streams ---- */
DEVICE_API stream *stream_from_pool(int device, int priority); /* of 32 in turn, as torch's */
DEVICE_API stream *stream_of_the_script(int device);           /* which torch numbers by its handle */
DEVICE_API stream *stream_of_id(int device, int64_t id);
DEVICE_API stream *stream_of_handle(void *handle, int device); /* NULL: the default stream of the device */
DEVICE_API stream *stream_of_agent(int agent);
DEVICE_API void *handle_of(stream *which);
DEVICE_API stream *current_stream(int device); /* of this thread */
DEVICE_API void set_current_stream(stream *which);
DEVICE_API std::string name_of_agent(int agent);

/* ---- order ---- */
DEVICE_API event *event_new();
DEVICE_API void event_free(event *which);
DEVICE_API void event_record(event *which, stream *on);
/* nothing for an event that was not recorded */
DEVICE_API void stream_wait(stream *which, const event *until);
DEVICE_API void host_wait(const event *until);
DEVICE_API void host_wait_stream(stream *which);
DEVICE_API void host_wait_device(int device);
/* False once for what the host does not know to be over: as late as a device may be, and who asks again gets
 * there. On the timeline, false until it is over there: asking costs the host time, so who asks again gets
 * there too. */
DEVICE_API bool event_query(event *which);
DEVICE_API bool stream_query(stream *which);
DEVICE_API double host_ms_between(const event *from,
                                  const event *to); /* of the records: a device's own time is not simulated */

/* For the files of this folder. */
uint64_t known(const clock &to, int agent);
clock &host_clock();
void merge(clock &into, const clock &from);
bool knows(const clock &who, const clock &what);
uint64_t tick(clock &of, int agent);

} // namespace simulated_gpu
