/* The fake device: host memory in the place of a GPU's, its streams and its events.
 *
 *   most work      runs on the launching thread, once all work that its stream waits for is finished
 *   collectives    run on a thread of their stream, because they wait for other ranks: run_aside()
 *   captured work  belongs to a graph: graph.h
 *
 * Invariant: a stream runs its work in the order of its launches. Each stream has a clock: for each stream,
 * the number of its launches that come before. An event is its stream's clock at the record, and is complete
 * once these launches are finished.
 *
 * FAKE_CUDA_LATE=1: an event is reported complete only after the host has waited for it or for later work.
 * Allocator and polling code thus see both extremes of a GPU's speed. */
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

using moment = std::vector<uint64_t>; /* number of launches by stream */
using work = std::function<void()>;

struct bytes { /* a range of memory that work writes */
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

/* A launch that runs on this thread while the object lives. The constructor waits for earlier work. */
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

/* Run the body on this thread now. During a capture, work with known `writes` runs once, so that later
 * operators have its values, and is undone at the capture's end; other captured work runs only when the graph
 * is launched. */
void run(CUstream_st *on, const work &body);
void run(CUstream_st *on, const work &body, const std::vector<bytes> &writes);
void run_aside(CUstream_st *on, work body); /* run on the stream's thread */
void stream_waits(CUstream_st *on, const moment &until);
void host_waits(const moment &until);
bool host_knows(const moment &what);
void host_waits_for_all(int device);
moment now_of(const CUstream_st *on);

void *take(size_t nbytes, enum kind kind, int device); /* null: out of memory */
bool give_back(void *data);
bool find(const void *data, block *found, void **begin); /* find the block that contains `data` */
void note(void *data, const block &known);               /* register memory allocated elsewhere */
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
    struct CUgraph_st *capture; /* running capture that includes the stream, or null */
};

struct CUevent_st {
    CUctx_st *context;
    unsigned flags;
    bool is_recorded;
    fake::moment at;
    double ms;
    unsigned long long capture; /* id of the capture that contains the record, or 0 */
};

__attribute__((visibility("default"))) double fake_ms();
