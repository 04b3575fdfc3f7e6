#include "memory.h"

#include <sys/mman.h>

#include <algorithm>
#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>
#include <set>
#include <stdexcept>

#include "accesses.h"
#include "graph.h"
#include "timeline.h"

namespace simulated_gpu {

/* sizes of torch's allocator: c10/core/AllocatorConfig.h */
enum : size_t {
    UNIT = 512,
    SMALL = 1 << 20,
    SMALL_SEGMENT = 2 << 20,
    LARGE = 10 << 20,
    LARGE_SEGMENT = 20 << 20,
    LARGE_UNIT = 2 << 20
};
enum : size_t { PAGE = 4096 };

struct block {
    uintptr_t at;
    size_t nbytes, requested;
    stream *owner;
    bool used, waiting, small;
    pool_id pool;
    uintptr_t segment;
    std::set<stream *> users; /* other streams passed to record_stream() */
};

struct waiting_block {
    uintptr_t at;
    std::vector<event> until;
};

struct segment {
    size_t nbytes;
    int device;
};

using block_map = std::map<uintptr_t, block>;
static block_map &blocks = *new block_map;
static std::map<uintptr_t, segment> &segments = *new std::map<uintptr_t, segment>;
static std::map<uint64_t, int> kept_pools; /* reference count by the id's second number */
static std::vector<waiting_block> &waiting = *new std::vector<waiting_block>;
static memory_stats stats[MOST_DEVICES];
static double fractions[MOST_DEVICES] = {1, 1, 1, 1, 1, 1, 1, 1};
static std::vector<memory_change> &changes = *new std::vector<memory_change>;
static bool is_logging;
static thread_local std::vector<pool_id> pools_of_thread[MOST_DEVICES];
static std::atomic<int> num_begun_pools; /* sum over all threads */

static size_t rounded(size_t nbytes, size_t unit) {
    return (nbytes + unit - 1) / unit * unit;
}

static void add(int64_t &current, int64_t &peak, size_t nbytes) {
    current += (int64_t)nbytes;
    peak = std::max(peak, current);
}

static void poison(uintptr_t at, size_t nbytes) {
    if (!has_only_shapes()) {
        memset((void *)at, 0xff, nbytes); /* NaN of every floating-point type */
    }
}

/* Return address space only if operators run on shapes. */
static void *take_memory(size_t nbytes) {
    if (!has_only_shapes()) {
        return aligned_alloc(PAGE, nbytes);
    }
    void *taken =
        mmap(nullptr, nbytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    return taken == MAP_FAILED ? nullptr : taken;
}

static void return_memory(uintptr_t at, size_t nbytes) {
    if (has_only_shapes()) {
        munmap((void *)at, nbytes);
    } else {
        free((void *)at);
    }
}

/* ---- blocks ---- */

static bool can_join(const block &one, const block &other) {
    return one.segment == other.segment && !one.used && !other.used && !one.waiting && !other.waiting;
}

static void note_change(const block &changed, bool is_given_back) {
    if (is_logging) {
        int64_t nbytes = (int64_t)changed.nbytes;
        changes.push_back(
            {changed.at, is_given_back ? -nbytes : nbytes, (int)changed.owner->id, changed.pool.second != 0});
    }
}

void log_memory() {
    holding lock(device_lock);
    is_logging = true;
    changes.clear();
    for (const auto &[at, each] : blocks) {
        if (each.used) {
            note_change(each, false);
        }
    }
}

std::vector<memory_change> take_memory_log() {
    holding lock(device_lock);
    is_logging = false;
    return std::move(changes);
}

/* All blocks of a segment have the stream and the pool of its first block. */
std::vector<memory_segment> reserved_segments() {
    holding lock(device_lock);
    std::vector<memory_segment> all;
    for (const auto &[at, each] : segments) {
        const block &first = blocks.at(at);
        all.push_back({at, each.nbytes, (int)first.owner->id, first.pool.second != 0});
    }
    return all;
}

/* Mark the block as free and merge it with free neighbours. */
static void give_back(uintptr_t at) {
    auto it = blocks.find(at);
    if (it->second.waiting) {
        poison(at, it->second.nbytes);
    }
    it->second.waiting = false;
    stats[it->second.owner->device].active -= (int64_t)it->second.nbytes;
    auto next = std::next(it);
    if (next != blocks.end() && can_join(it->second, next->second)) {
        it->second.nbytes += next->second.nbytes;
        blocks.erase(next);
    }
    if (it != blocks.begin() && can_join(std::prev(it)->second, it->second)) {
        std::prev(it)->second.nbytes += it->second.nbytes;
        blocks.erase(it);
    }
}

/* Free the waiting blocks whose users are known to be finished. With `all` the host waits for the users. */
static void look_at_waiting(bool all) {
    std::vector<waiting_block> still;
    for (waiting_block &each : waiting) {
        bool is_over = true;
        for (event &until : each.until) {
            if (all) {
                host_wait(&until);
            } else if (is_over_in_time(&until)) {
                merge(host_clock(), until.at); /* like a successful query */
            }
            is_over = is_over && knows(host_clock(), until.at);
        }
        if (is_over) {
            give_back(each.at);
        } else {
            still.push_back(each);
        }
    }
    waiting.swap(still);
}

static size_t segment_nbytes(size_t nbytes) {
    return nbytes <= SMALL ? SMALL_SEGMENT : nbytes < LARGE ? LARGE_SEGMENT : rounded(nbytes, LARGE_UNIT);
}

/* max_split_size_mb of PYTORCH_CUDA_ALLOC_CONF: larger blocks are not split, and serve only requests of that
 * size. */
static size_t largest_split() {
    static const size_t nbytes = [] {
        const char *conf = getenv("PYTORCH_CUDA_ALLOC_CONF");
        const char *value = conf ? strstr(conf, "max_split_size_mb:") : nullptr;
        return value ? (size_t)atoll(strchr(value, ':') + 1) << 20 : SIZE_MAX;
    }();
    return nbytes;
}

static bool should_split(const block &found, size_t nbytes) {
    size_t rest = found.nbytes - nbytes;
    return found.small ? rest >= UNIT : rest > SMALL && nbytes < largest_split();
}

static bool is_kept_whole(const block &found, size_t nbytes) {
    if (nbytes < largest_split()) {
        return found.nbytes >= largest_split();
    }
    return found.nbytes >= nbytes + LARGE_SEGMENT;
}

static block_map::iterator best_fit(size_t nbytes, stream *on, pool_id pool) {
    auto best = blocks.end();
    for (auto it = blocks.begin(); it != blocks.end(); ++it) {
        const block &each = it->second;
        if (!each.used && !each.waiting && each.owner == on && each.small == (nbytes <= SMALL) &&
            each.pool == pool && each.nbytes >= nbytes && !is_kept_whole(each, nbytes) &&
            (best == blocks.end() || each.nbytes < best->second.nbytes)) {
            best = it;
        }
    }
    return best;
}

static block_map::iterator new_segment(size_t nbytes, stream *on, pool_id pool) {
    size_t size = segment_nbytes(nbytes);
    memory_stats &of_device = stats[on->device];
    if ((double)of_device.reserved + (double)size > fractions[on->device] * (double)total_memory()) {
        return blocks.end();
    }
    void *fresh = take_memory(size);
    host_spends(costs().segment);
    if (!fresh) {
        return blocks.end();
    }
    uintptr_t at = (uintptr_t)fresh;
    poison(at, size);
    segments[at] = {size, on->device};
    of_device.num_device_alloc++;
    add(of_device.reserved, of_device.reserved_peak, size);
    return blocks.insert({at, {at, size, 0, on, false, false, nbytes <= SMALL, pool, at, {}}}).first;
}

/* Split off the rest of a block that is larger than the request. */
static void cut(block &given, size_t nbytes) {
    if (should_split(given, nbytes)) {
        block rest = given;
        rest.at += nbytes;
        rest.nbytes -= nbytes;
        given.nbytes = nbytes;
        blocks.insert({rest.at, rest});
    }
}

void empty_cache() {
    holding lock(device_lock);
    look_at_waiting(true);
    for (auto it = blocks.begin(); it != blocks.end();) {
        const block &each = it->second;
        bool is_kept = kept_pools.count(each.pool.second) != 0;
        if (each.used || each.waiting || is_kept || segments[each.segment].nbytes != each.nbytes) {
            ++it;
            continue;
        }
        int device = each.owner->device;
        host_wait_device(device); /* like cudaFree */
        stats[device].reserved -= (int64_t)each.nbytes;
        stats[device].num_device_free++;
        forget(each.at, each.at + each.nbytes);
        segments.erase(each.segment);
        return_memory(each.at, each.nbytes);
        it = blocks.erase(it);
    }
}

/* Return the clock of the next launch on the stream. */
static clock known_to(const stream *on) {
    clock both = on->now;
    merge(both, host_clock());
    return both;
}

void *device_alloc(size_t requested, int device, stream *on) {
    holding lock(device_lock);
    if (requested == 0) {
        return nullptr;
    }
    size_t nbytes = rounded(requested, UNIT);
    memory_stats &of_device = stats[device];
    clock known_now = known_to(on);
    check_frees(known_now, on->agent);
    log_alloc(known_now, on->agent);
    pool_id pool = pools_of_thread[device].empty() ? pool_id{0, 0} : pools_of_thread[device].back();
    if (const graph *capturing = graph_of(on->capture)) {
        pool = capturing->pool();
    }
    look_at_waiting(false);
    auto find = [&] {
        auto found = best_fit(nbytes, on, pool);
        return found == blocks.end() ? new_segment(nbytes, on, pool) : found;
    };
    auto found = find();
    bool is_in_pool =
        /* torch before 2.13 treats an entered pool like a capture and frees no cached memory */
        !pools_of_thread[device].empty();
    if (found == blocks.end() && !is_in_pool) {
        of_device.num_alloc_retries++;
        empty_cache();
        found = find();
    }
    if (found == blocks.end()) {
        of_device.num_ooms++;
        return nullptr;
    }
    block &given = found->second;
    cut(given, nbytes);
    given.used = true;
    given.requested = requested;
    given.users.clear();
    note_change(given, false);
    of_device.num_allocs++;
    add(of_device.allocated, of_device.allocated_peak, given.nbytes);
    add(of_device.active, of_device.active_peak, given.nbytes);
    add(of_device.requested, of_device.requested_peak, requested);
    return (void *)given.at;
}

/* The allocator waits for those recorded as users. Whoever gives back under the owner may take memory there
 * next. */
static void check_users(const block &freed) {
    clock known_then = known_to(freed.owner);
    for (const stream *user : freed.users) {
        merge(known_then, user->now);
    }
    note_free(freed.at, freed.at + freed.nbytes, known_then, freed.owner->agent);
    if (current_stream(freed.owner->device) == freed.owner) {
        clock known_now = known_to(freed.owner);
        check_frees(known_now, freed.owner->agent);
        log_alloc(known_now, freed.owner->agent);
    }
}

void device_free(void *given) {
    holding lock(device_lock);
    if (!given) {
        return;
    }
    block &freed = blocks.at((uintptr_t)given);
    memory_stats &of_device = stats[freed.owner->device];
    of_device.allocated -= (int64_t)freed.nbytes;
    of_device.requested -= (int64_t)freed.requested;
    note_change(freed, true);
    check_users(freed);
    poison(freed.at, freed.nbytes);
    freed.used = false;
    freed.users.erase(freed.owner);
    if (freed.users.empty()) {
        give_back(freed.at);
        return;
    }
    freed.waiting = true;
    waiting.push_back({freed.at, {}});
    for (stream *user : freed.users) {
        event_record(&waiting.back().until.emplace_back(), user);
    }
}

void record_stream(void *memory, stream *user) {
    holding lock(device_lock);
    auto found = blocks.find((uintptr_t)memory);
    if (found != blocks.end()) {
        found->second.users.insert(user);
    }
}

int device_of_memory(const void *memory) {
    holding lock(device_lock);
    auto after = segments.upper_bound((uintptr_t)memory);
    if (after == segments.begin()) {
        return -1;
    }
    --after;
    return (uintptr_t)memory < after->first + after->second.nbytes ? after->second.device : -1;
}

memory_stats stats_of(int device) {
    holding lock(device_lock);
    return stats[device];
}

void reset_peaks(int device) {
    holding lock(device_lock);
    memory_stats &of_device = stats[device];
    of_device.allocated_peak = of_device.allocated;
    of_device.requested_peak = of_device.requested;
    of_device.reserved_peak = of_device.reserved;
    of_device.active_peak = of_device.active;
}

size_t total_memory() {
    return (size_t)setting("SIMULATED_GPU_MEMORY", (int64_t)8 << 30);
}

void set_fraction(double fraction, int device) {
    fractions[device] = fraction;
}

/* ---- pools: a released pool keeps its memory until empty_cache() ---- */

pool_id new_pool() {
    holding lock(device_lock);
    static uint64_t last;
    return {0, ++last};
}

void keep_pool(pool_id pool) {
    holding lock(device_lock);
    kept_pools[pool.second]++;
}

void release_pool(pool_id pool) {
    holding lock(device_lock);
    if (--kept_pools[pool.second] == 0) {
        kept_pools.erase(pool.second);
    }
}

void begin_pool(int device, pool_id pool) {
    std::vector<pool_id> &begun = pools_of_thread[device];
    if (std::find(begun.begin(), begun.end(), pool) != begun.end()) {
        throw std::runtime_error("beginAllocateToPool: this pool is in use already");
    }
    begun.push_back(pool);
    num_begun_pools++;
}

void end_pool(int device, pool_id pool) {
    std::vector<pool_id> &begun = pools_of_thread[device];
    auto found = std::find(begun.rbegin(), begun.rend(), pool);
    if (found != begun.rend()) {
        begun.erase(std::next(found).base());
        num_begun_pools--;
    }
}

void no_pool_may_be_entered() {
    if (any_capture() || num_begun_pools > 0) {
        fputs(
            "a pool ends while another is entered, or a graph captured: torch's allocator ends the process\n",
            stderr);
        abort();
    }
}

/* ---- pinned memory ---- */

static std::map<uintptr_t, size_t> &pinned = *new std::map<uintptr_t, size_t>;
/* Guards the map. Not device_lock: threads of gloo query the map while the lock's holder waits for them. */
static std::mutex pinned_lock;
static std::atomic<int64_t> num_pinned;

void *pinned_alloc(size_t nbytes) {
    void *fresh = nbytes ? aligned_alloc(PAGE, rounded(nbytes, PAGE)) : nullptr;
    if (fresh) {
        poison((uintptr_t)fresh, nbytes);
        std::lock_guard<std::mutex> lock(pinned_lock);
        pinned[(uintptr_t)fresh] = nbytes;
        num_pinned++;
    }
    return fresh;
}

/* Remove the entry and return its size; 0 if the memory is not pinned. */
static size_t take_pinned(uintptr_t at) {
    std::lock_guard<std::mutex> lock(pinned_lock);
    auto found = pinned.find(at);
    if (found == pinned.end()) {
        return 0;
    }
    size_t nbytes = found->second;
    pinned.erase(found);
    num_pinned--;
    return nbytes;
}

/* Run all held work first: torch's allocator reuses the memory only after the streams that copied. */
void pinned_free(void *memory) {
    size_t nbytes = take_pinned((uintptr_t)memory);
    if (!nbytes) {
        return;
    }
    holding lock(device_lock);
    forget((uintptr_t)memory, (uintptr_t)memory + nbytes);
    poison((uintptr_t)memory, nbytes);
    free(memory);
}

bool is_pinned(const void *memory) {
    if (!any_pinned()) {
        return false;
    }
    std::lock_guard<std::mutex> lock(pinned_lock);
    auto after = pinned.upper_bound((uintptr_t)memory);
    if (after == pinned.begin()) {
        return false;
    }
    --after;
    return (uintptr_t)memory < after->first + after->second;
}

bool any_pinned() {
    return num_pinned > 0;
}

} // namespace simulated_gpu
