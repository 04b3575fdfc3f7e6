/* The fake device: host memory that is called a GPU's, its streams, and its events.
 *
 *   most work      is done by the thread that launches it, once all that its stream comes after is over
 *   collectives    are done by a thread of their stream, as they wait for other ranks: run_aside
 *   while a stream captures, its work belongs to a graph: graph.h
 *
 * Invariant: a stream does its work in the order of its launches. Each stream has a clock: of each stream,
 * how many of its launches it comes after. An event is the clock of its stream when it was recorded, and over
 * once all that is done.
 *
 * With FAKE_CUDA_LATE=1 the host learns that an event is over only once it has waited for it, or for
 * something that comes after it. So the two extremes of a real GPU's pace can be had: for the allocator and
 * for whoever polls. */
#pragma once

#include <cuda.h>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <mutex>
#include <vector>

#define EXPORT extern "C" __attribute__((visibility("default")))

#pragma GCC visibility push(default)
namespace fake {

using moment = std::vector<uint64_t>; /* of each stream, how many of its launches */
using work = std::function<void()>;

struct bytes { /* that work writes */
    void *at;
    size_t nbytes;
};

enum kind { DEVICE_MEMORY, PINNED_MEMORY };

struct block {
    size_t nbytes, mapped;
    enum kind kind;
    int device;
};

extern std::recursive_mutex lock;
using holding = std::lock_guard<std::recursive_mutex>;

int num_devices();
size_t device_nbytes();
bool is_late();
long setting(const char *name, long otherwise);

CUctx_st *primary(int device);
CUctx_st *current();                /* of this thread, or null */
int current_device();               /* of this thread; 0 without a context */
void make_current(CUctx_st *which); /* the top of this thread's stack */
CUctx_st *needed();                 /* as the runtime does: the first device's, where there is none */
void push(CUctx_st *which);
CUctx_st *pop();

CUstream_st *new_stream(CUctx_st *context, unsigned flags, int priority);
CUstream_st *stream_of(CUstream handle); /* the default stream for NULL, 1 and 2 */

/* Work of this thread on a stream, while it lives: its constructor waits for what comes before. */
class turn {
  public:
    explicit turn(CUstream_st *on);
    ~turn();
    turn(const turn &) = delete;
    turn &operator=(const turn &) = delete;

  private:
    CUstream_st *on;
    uint64_t number;
};

/* By this thread, now. What a capture holds runs once for whoever computes with its values, if it is known
 * what it writes, and is undone at the capture's end; otherwise only as the graph is launched. */
void run(CUstream_st *on, const work &body);
void run(CUstream_st *on, const work &body, const std::vector<bytes> &writes);
void run_aside(CUstream_st *on, work body); /* by a thread of the stream */
void stream_waits(CUstream_st *on, const moment &until);
void host_waits(const moment &until);
bool host_knows(const moment &what);
void host_waits_for_all(int device);
moment now_of(const CUstream_st *on);

void *take(size_t nbytes, enum kind kind, int device); /* null: none is left */
bool give_back(void *data);
bool find(const void *data, block *found, void **begin); /* the block that holds it */
void note(void *data, const block &known);               /* memory that others have made */
void forget(void *data);
size_t used_nbytes(int device);
void add_used(int device, ptrdiff_t nbytes);

} // namespace fake
#pragma GCC visibility pop

struct CUctx_st {
    int device;
    bool is_active;
    CUstream_st *default_stream;
    size_t used;
};

struct CUstream_st {
    CUctx_st *context;
    size_t index;
    int priority;
    unsigned flags;
    fake::moment now;
    struct CUgraph_st *capture; /* that it is part of, or null */
};

struct CUevent_st {
    CUctx_st *context;
    unsigned flags;
    bool is_recorded;
    fake::moment at;
    double ms;
    unsigned long long capture; /* in which it was recorded, or 0 */
};

__attribute__((visibility("default"))) double fake_ms();
