/* Streams and events of the simulated device, and the known order between them. This file does not use torch.
 *
 *   host ----- launch --- launch ------ wait(event)
 *                |          |              ^
 *   stream 1     X ---------|-- record ----'
 *   stream 2                X --- wait(event) --- X
 *
 * Invariant: work runs when it is launched, on the calling thread, which is a legal order of any program of
 * streams. Vector clocks track the order that the program promises. Each stream is an agent, and the host is one more (all its threads together). An agent's clock holds, for
 * each agent, the last launch that is known to be finished. */
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <mutex>
#include <string>
#include <vector>

#define DEVICE_API __attribute__((visibility("default")))

namespace simulated_gpu {

enum { MOST_DEVICES = 8, HOST = 0 /* the host's agent; a stream's is from 1 */ };

using clock = std::vector<uint64_t>; /* by agent; missing entries are 0 */

/* The last work that must be finished, by the stream's id. */
using work_before = std::map<int64_t, int64_t>;

/* Times by the model of timeline.h, in us. */
struct stream_time {
    double ready = 0;              /* earliest begin of the next work */
    double busy_until = 0;         /* end of the last work */
    int64_t last = -1, cause = -1; /* serial of the last work; of the work that delays the next beyond it */
    work_before after{};           /* work of other streams before the next work */
};
struct event_time {
    double over = 0;
    int64_t last = -1; /* serial of the stream's last work before the record */
    work_before after{};
};

struct stream { /* lives as long as the process: its address is the driver's handle */
    int device;
    int agent;
    int64_t id; /* torch's; 0 for the default stream */
    int priority;
    clock now;
    uint64_t capture; /* graph in capture, 0 for none: graph.h */
    stream_time time{};
};

struct event {
    bool recorded;
    bool asked; /* queried before it was known to be complete */
    clock at;
    std::chrono::steady_clock::time_point host_time; /* time of the record */
    uint64_t capture;                                /* capture that contains the record */
    event_time time{};
};

/* Return a number from the environment. */
int64_t setting(const char *name, int64_t otherwise);

/* The lock of the whole device. Recursive: its holder may call any function here. */
extern std::recursive_mutex device_lock;
using holding = std::lock_guard<std::recursive_mutex>;

/* ---- devices: SIMULATED_GPU_DEVICES of them; set_device() chooses the thread's current one ---- */
DEVICE_API int device_count();
DEVICE_API int current_device(); /* 0 before set_device() */
DEVICE_API bool has_context();   /* true after set_device() */
DEVICE_API void set_device(int device);
DEVICE_API void leave_device();

/* ---- streams ---- */
DEVICE_API stream *stream_from_pool(int device, int priority); /* 32 in turn, as in torch */
DEVICE_API stream *stream_of_the_script(int device);           /* torch's id is its handle */
DEVICE_API stream *stream_of_id(int device, int64_t id);
DEVICE_API stream *stream_of_handle(void *handle, int device); /* NULL for the default stream */
DEVICE_API stream *stream_of_agent(int agent);
DEVICE_API void *handle_of(stream *which);
DEVICE_API stream *current_stream(int device); /* the thread's */
DEVICE_API void set_current_stream(stream *which);
DEVICE_API std::string name_of_agent(int agent);

/* Run work at once, or leave it to the graph that the stream captures. */
using work = std::function<void()>;
DEVICE_API void run_or_hold(const stream *on, const work &run);

/* ---- order ---- */
DEVICE_API event *event_new();
DEVICE_API void event_free(event *which);
DEVICE_API void event_record(event *which, stream *on);
/* no effect for an event that was not recorded */
DEVICE_API void stream_wait(stream *which, const event *until);
DEVICE_API void host_wait(const event *until);
DEVICE_API void host_wait_stream(stream *which);
DEVICE_API void host_wait_device(int device);
/* Return false once for work that the host does not know to be finished, as a slow device would; a second
 * query returns true. On the timeline, return false until the work is finished there: each query costs the
 * host time, so that repeated queries succeed too. */
DEVICE_API bool event_query(event *which);
DEVICE_API bool stream_query(stream *which);
DEVICE_API double host_ms_between(const event *from,
                                  const event *to); /* between the records; not device time */

/* For the files of this folder. */
uint64_t known(const clock &to, int agent);
clock &host_clock();
void merge(clock &into, const clock &from);
bool knows(const clock &who, const clock &what);
uint64_t tick(clock &of, int agent);

} // namespace simulated_gpu
