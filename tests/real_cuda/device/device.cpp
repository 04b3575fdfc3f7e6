#include "device.h"

#include <sys/mman.h>
#include <unistd.h>

#include <condition_variable>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <ctime>
#include <deque>
#include <thread>

#include "graph.h"

double fake_ms() {
    timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec * 1e3 + (double)now.tv_nsec / 1e6;
}

namespace fake {

std::recursive_mutex lock;

long setting(const char *name, long otherwise) {
    const char *text = getenv(name);
    return text && *text ? atol(text) : otherwise;
}

int num_devices() {
    static int count = (int)setting("FAKE_CUDA_DEVICES", 8);
    return count;
}

size_t device_nbytes() {
    return 80UL << 30;
}

bool is_late() {
    static bool late = setting("FAKE_CUDA_LATE", 0) != 0;
    return late;
}

/* ---- contexts ---- */

/* This thread's stack of contexts. Never freed, because destructors at process exit use it, too. */
static std::vector<CUctx_st *> &contexts() {
    static thread_local auto *mine = new std::vector<CUctx_st *>;
    return *mine;
}

CUctx_st *primary(int device) {
    static std::vector<CUctx_st> *all = [] {
        auto *made = new std::vector<CUctx_st>((size_t)num_devices());
        for (int i = 0; i < num_devices(); i++) {
            (*made)[(size_t)i].device = i;
        }
        return made;
    }();
    return &(*all)[(size_t)device];
}

static void activate(CUctx_st *which) {
    holding held(lock);
    if (which && !which->is_active) {
        which->is_active = true;
        which->default_stream = new_stream(which, 0, 0);
    }
}

CUctx_st *current() {
    return contexts().empty() ? nullptr : contexts().back();
}

int current_device() {
    CUctx_st *top = current();
    return top ? top->device : 0;
}

void make_current(CUctx_st *which) {
    activate(which);
    if (contexts().empty()) {
        contexts().push_back(which);
    } else {
        contexts().back() = which;
    }
}

CUctx_st *needed() {
    if (!current()) {
        make_current(primary(0));
    }
    return current();
}

void push(CUctx_st *which) {
    activate(which);
    contexts().push_back(which);
}

CUctx_st *pop() {
    CUctx_st *top = current();
    if (!contexts().empty()) {
        contexts().pop_back();
    }
    return top;
}

/* ---- order ---- */

static moment &host = *new moment; /* work that the host has waited for */
static std::vector<CUstream_st *> &streams = *new std::vector<CUstream_st *>;

static uint64_t known(const moment &to, size_t stream) {
    return stream < to.size() ? to[stream] : 0;
}

static void merge(moment &into, const moment &from) {
    if (into.size() < from.size()) {
        into.resize(from.size());
    }
    for (size_t i = 0; i < from.size(); i++) {
        into[i] = into[i] < from[i] ? from[i] : into[i];
    }
}

static bool covers(const moment &who, const moment &what) {
    for (size_t i = 0; i < what.size(); i++) {
        if (what[i] > known(who, i)) {
            return false;
        }
    }
    return true;
}

/* Number of finished launches by stream. Never destroyed, because threads may outlive static objects. */
static moment &done = *new moment;
static std::mutex &done_lock = *new std::mutex;
static std::condition_variable &done_more = *new std::condition_variable;

static void wait_until_done(const moment &what) {
    std::unique_lock<std::mutex> held(done_lock);
    done_more.wait(held, [&] { return covers(done, what); });
}

static bool is_done(const moment &what) {
    std::lock_guard<std::mutex> held(done_lock);
    return covers(done, what);
}

static void finish(const CUstream_st *on, uint64_t number) {
    {
        std::lock_guard<std::mutex> held(done_lock);
        if (done.size() <= on->index) {
            done.resize(on->index + 1);
        }
        done[on->index] = number;
    }
    done_more.notify_all();
}

CUstream_st *new_stream(CUctx_st *context, unsigned flags, int priority) {
    holding held(lock);
    streams.push_back(new CUstream_st{context, streams.size(), priority, flags, {}, nullptr});
    return streams.back(); /* never freed: clocks use its index */
}

CUstream_st *stream_of(CUstream handle) {
    return (uintptr_t)handle <= 2 ? needed()->default_stream : handle;
}

moment now_of(const CUstream_st *on) {
    holding held(lock);
    return on->now;
}

/* Count a launch on the stream and return the work before it. */
static moment begin(CUstream_st *on, uint64_t *number) {
    holding held(lock);
    moment before = on->now;
    if (on->now.size() <= on->index) {
        on->now.resize(on->index + 1);
    }
    *number = ++on->now[on->index];
    return before;
}

turn::turn(CUstream_st *which) : on(which) {
    wait_until_done(begin(on, &number));
}

turn::~turn() {
    finish(on, number);
}

void run(CUstream_st *on, const work &body) {
    turn mine(on);
    if (on->capture) {
        on->capture->hold(body);
    } else {
        body();
    }
}

void run(CUstream_st *on, const work &body, const std::vector<bytes> &writes) {
    turn mine(on);
    if (on->capture) {
        for (const bytes &each : writes) {
            on->capture->save(each);
        }
        on->capture->hold(body);
    }
    body();
}

/* Queue of a stream's thread. */
struct aside {
    struct item {
        moment before;
        uint64_t number;
        work body;
    };
    std::mutex lock;
    std::condition_variable more;
    std::deque<item> items;
};

static void serve(CUstream_st *on, aside *of) {
    make_current(on->context);
    for (;;) {
        std::unique_lock<std::mutex> held(of->lock);
        of->more.wait(held, [&] { return !of->items.empty(); });
        aside::item next = std::move(of->items.front());
        of->items.pop_front();
        held.unlock();
        wait_until_done(next.before);
        next.body();
        finish(on, next.number);
    }
}

static aside *aside_of(CUstream_st *on) {
    static auto &all = *new std::map<CUstream_st *, aside *>;
    holding held(lock);
    aside *&found = all[on];
    if (!found) {
        found = new aside;
        std::thread(serve, on, found).detach();
    }
    return found;
}

void run_aside(CUstream_st *on, work body) {
    if (on->capture) {
        run(on, body);
        return;
    }
    aside *of = aside_of(on);
    holding both(lock); /* keeps the items in the order of their numbers */
    std::lock_guard<std::mutex> held(of->lock);
    uint64_t number;
    moment before = begin(on, &number);
    of->items.push_back({std::move(before), number, std::move(body)});
    of->more.notify_one();
}

void stream_waits(CUstream_st *on, const moment &until) {
    holding held(lock);
    merge(on->now, until);
}

void host_waits(const moment &until) {
    wait_until_done(until);
    holding held(lock);
    merge(host, until);
}

bool host_knows(const moment &what) {
    if (!is_done(what)) {
        return false;
    }
    holding held(lock);
    return !is_late() || covers(host, what);
}

void host_waits_for_all(int device) {
    moment all;
    {
        holding held(lock);
        for (const CUstream_st *each : streams) {
            if (each->context->device == device) {
                merge(all, each->now);
            }
        }
    }
    host_waits(all);
}

/* ---- memory ---- */

/* allocations of device memory since fake_cuda_refuse(), and the number of the failing one */
static long num_taken, refused = -1;
static std::map<uintptr_t, block> &blocks = *new std::map<uintptr_t, block>;
static const size_t HUGE = 2 << 20;

static size_t rounded(size_t nbytes, size_t to) {
    return (nbytes + to - 1) / to * to;
}

static void *mapped(size_t nbytes) {
    char *begin = (char *)mmap(nullptr, nbytes + HUGE, PROT_READ | PROT_WRITE,
                               MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (begin == MAP_FAILED) {
        return nullptr;
    }
    char *aligned = (char *)rounded((size_t)begin, HUGE);
    if (aligned != begin) {
        munmap(begin, (size_t)(aligned - begin));
    }
    munmap(aligned + nbytes, (size_t)(begin + HUGE - aligned));
    return aligned;
}

void *take(size_t nbytes, enum kind kind, int device) {
    holding held(lock);
    size_t size = rounded(nbytes ? nbytes : 1, 4096);
    bool is_device = kind == DEVICE_MEMORY;
    bool is_refused = is_device && num_taken++ == refused;
    if (is_refused || (is_device && primary(device)->used + size > device_nbytes())) {
        return nullptr;
    }
    void *data = mapped(size);
    if (!data) {
        return nullptr;
    }
    blocks[(uintptr_t)data] = {nbytes, size, kind, device};
    add_used(device, is_device ? (ptrdiff_t)size : 0);
    return data;
}

bool give_back(void *data) {
    holding held(lock);
    auto found = blocks.find((uintptr_t)data);
    if (found == blocks.end()) {
        return false;
    }
    block known = found->second;
    blocks.erase(found);
    munmap(data, known.mapped);
    add_used(known.device, known.kind == DEVICE_MEMORY ? -(ptrdiff_t)known.mapped : 0);
    return true;
}

bool find(const void *data, block *found, void **begin) {
    holding held(lock);
    auto after = blocks.upper_bound((uintptr_t)data);
    if (after == blocks.begin()) {
        return false;
    }
    --after;
    if ((uintptr_t)data - after->first >= after->second.nbytes) {
        return false;
    }
    *found = after->second;
    *begin = (void *)after->first;
    return true;
}

void note(void *data, const block &known) {
    holding held(lock);
    blocks[(uintptr_t)data] = known;
}

void forget(void *data) {
    holding held(lock);
    blocks.erase((uintptr_t)data);
}

size_t used_nbytes(int device) {
    holding held(lock);
    return primary(device)->used;
}

void add_used(int device, ptrdiff_t nbytes) {
    holding held(lock);
    CUctx_st *of = primary(device);
    of->used += (size_t)nbytes;
}

} // namespace fake

/* Fail one allocation of device memory after `after` more (-1: none). Return their number since the last
 * call. */
EXPORT long fake_cuda_refuse(long after) {
    fake::holding held(fake::lock);
    long count = fake::num_taken;
    fake::num_taken = 0;
    fake::refused = after;
    return count;
}
