/* libnccl.so.2 between processes of one machine: each communicator is shared memory with a slot per rank.
 *
 * A collective runs on a thread of its stream, which waits there for the other ranks. Collectives of one
 * communicator run in the order of their launches. Ranks that call different collectives print this to stderr
 * and return an error. Reductions add the ranks' parts in rank order.
 *
 * fake_nccl_disturb() makes a call of this process slow, fail (as with a lost link) or hang. */
#include <cuda_runtime_api.h>
#include <fcntl.h>
#include <linux/futex.h>
#include <nccl.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <random>
#include <string>
#include <type_traits>
#include <vector>

#include "device.h"
#include "numbers.h"

#define NCCL EXPORT ncclResult_t

namespace {

const size_t SLOT = 4 << 20, LETTER = 64 << 10;
const int MOST_RANKS = 64;

struct call {
    int kind, type, op, root;
    uint64_t count;
    bool operator==(const call &other) const {
        return kind == other.kind && type == other.type && op == other.op && root == other.root &&
               count == other.count;
    }
};

struct letter { /* bytes from one rank to another */
    std::atomic<uint32_t> is_full;
    uint32_t nbytes;
    uint64_t total;
    char bytes[LETTER];
};

struct meeting { /* barrier of all ranks */
    std::atomic<uint32_t> arrived, round;
};

struct shared {
    meeting of_streams, of_hosts; /* for collectives; for creating and splitting communicators */
    std::atomic<uint32_t> is_aborted;
    call calls[MOST_RANKS];
    int splits[MOST_RANKS][2]; /* color and key */
};

} // namespace

struct ncclComm {
    int rank, num_ranks, device;
    std::string name;
    struct shared *shared;
    char *slots;
    letter *letters; /* [from * num_ranks + to] */
    size_t nbytes;
    std::atomic<bool> is_aborted{false};
    std::atomic<int> error{ncclSuccess};
    int num_splits = 0;
    std::vector<std::pair<int, double>> ops; /* type and factor of each ncclRedOpCreatePreMulSum */
    fake::moment last_call;                  /* stream clock after the last call */
};

namespace {

auto &last_error = *new std::string;

ncclResult_t fail(ncclResult_t result, const std::string &text) {
    fake::holding held(fake::lock);
    last_error = text;
    fprintf(stderr, "fake_nccl[%d]: %s\n", getpid(), text.c_str());
    return result;
}

void sleep_on(std::atomic<uint32_t> *word, uint32_t value) {
    timespec most{0, 50000000};
    syscall(SYS_futex, word, FUTEX_WAIT, value, &most, nullptr, 0);
}

void wake(std::atomic<uint32_t> *word) {
    syscall(SYS_futex, word, FUTEX_WAKE, 1 << 30, nullptr, nullptr, 0);
}

bool is_over(const ncclComm *comm) {
    return comm->is_aborted || comm->shared->is_aborted;
}

/* False: the communicator was aborted meanwhile. */
bool meet(const ncclComm *comm, meeting *at) {
    uint32_t round = at->round;
    if (at->arrived.fetch_add(1) + 1 == (uint32_t)comm->num_ranks) {
        at->arrived = 0;
        at->round++;
        wake(&at->round);
        return !is_over(comm);
    }
    for (int spins = 0; at->round == round && !is_over(comm); spins++) {
        if (spins > 50) {
            sleep_on(&at->round, round);
        } else {
            sched_yield();
        }
    }
    return !is_over(comm);
}

bool meet(const ncclComm *comm) {
    return meet(comm, &comm->shared->of_streams);
}

char *slot_of(const ncclComm *comm, int rank) {
    return comm->slots + (size_t)rank * SLOT;
}

/* ---- numbers ---- */

/* by ncclDataType_t */
const size_t sizes[ncclNumTypes] = {1, 1, 4, 4, 8, 8, 2, 4, 8, 2, 1, 1};

struct reduction {
    ncclRedOp_t op;
    double factor; /* multiplies each part, for ncclAvg and operators of ncclRedOpCreatePreMulSum */
    int num_ranks;
};

template <typename T>
using wide = std::conditional_t<std::is_same_v<T, half_float> || std::is_same_v<T, bfloat16>, float, T>;

/* Reduce parts[r][i] over r. Each partial result is rounded to the dtype, like NCCL's from rank to rank. */
template <typename T>
void reduce_as(void *out, const std::vector<const char *> &parts, size_t count, const reduction &how) {
    constexpr bool is_float = !std::is_integral_v<T>;
    T *to = (T *)out;
    for (size_t i = 0; i < count; i++) {
        T sum = T(0);
        for (size_t r = 0; r < parts.size(); r++) {
            T part = ((const T *)parts[r])[i];
            if (is_float && how.factor != 1.0) {
                part = T((wide<T>)part * (wide<T>)how.factor);
            }
            wide<T> a = (wide<T>)sum, b = (wide<T>)part;
            sum = r == 0 ? part
                         : T(how.op == ncclProd  ? a * b
                             : how.op == ncclMax ? (b > a || b != b ? b : a)
                             : how.op == ncclMin ? (b < a || b != b ? b : a)
                                                 : (wide<T>)(a + b));
        }
        if constexpr (!is_float) {
            sum = how.op == ncclAvg ? (T)(sum / how.num_ranks) : sum;
        }
        to[i] = sum;
    }
}

ncclResult_t reduce(void *out, const std::vector<const char *> &parts, size_t count, ncclDataType_t type,
                    const reduction &how) {
    static decltype(&reduce_as<float>) const by_type[] = {
        reduce_as<int8_t>,  reduce_as<uint8_t>,  reduce_as<int32_t>,    reduce_as<uint32_t>,
        reduce_as<int64_t>, reduce_as<uint64_t>, reduce_as<half_float>, reduce_as<float>,
        reduce_as<double>,  reduce_as<bfloat16>};
    if ((size_t)type >= std::size(by_type)) {
        return fail(ncclInvalidArgument, "no reductions of this type");
    }
    by_type[type](out, parts, count, how);
    return ncclSuccess;
}

reduction reduction_of(const ncclComm *comm, ncclRedOp_t op, ncclDataType_t type) {
    bool is_float = type == ncclFloat16 || type == ncclFloat32 || type == ncclFloat64 || type == ncclBfloat16;
    if (op >= ncclNumOps) {
        return {ncclSum, comm->ops[(size_t)op - ncclNumOps].second, comm->num_ranks};
    }
    return {op, op == ncclAvg && is_float ? 1.0 / comm->num_ranks : 1.0, comm->num_ranks};
}

/* ---- calls held until the end of a group ---- */

struct task {
    ncclComm *comm;
    CUstream_st *stream;
    std::function<ncclResult_t()> run; /* body of a collective */
    bool sends;                        /* a call between two ranks: to the peer, or from it */
    char *data;
    size_t nbytes, done;
    int peer;
};

thread_local int depth;
thread_local auto &tasks = *new std::vector<task>;

/* Exchange the bytes of all pending sends and receives. */
ncclResult_t exchange(std::vector<task> &pending) {
    auto is_done = [](const task &each) { return each.done == each.nbytes && each.nbytes; };
    for (int idle = 0;;) {
        bool moved = false, left = false;
        std::vector<std::pair<letter *, bool>> seen; /* pairs with an earlier unfinished task */
        for (task &each : pending) {
            if (is_done(each)) {
                continue;
            }
            if (is_over(each.comm)) {
                return ncclRemoteError;
            }
            left = true;
            int me = each.comm->rank, n = each.comm->num_ranks;
            letter *box = &each.comm->letters[each.sends ? me * n + each.peer : each.peer * n + me];
            if (std::find(seen.begin(), seen.end(), std::pair(box, each.sends)) != seen.end()) {
                continue;
            }
            seen.push_back({box, each.sends});
            if (each.sends && !box->is_full) {
                box->nbytes = (uint32_t)std::min(LETTER, each.nbytes - each.done);
                box->total = each.nbytes;
                memcpy(box->bytes, each.data + each.done, box->nbytes);
                each.done += box->nbytes;
                box->is_full = 1;
                moved = true;
            } else if (!each.sends && box->is_full) {
                if (box->total != each.nbytes) {
                    return fail(ncclInvalidUsage, "a rank sends " + std::to_string(box->total) +
                                                      " bytes to one that takes "
                                                      "" +
                                                      std::to_string(each.nbytes));
                }
                memcpy(each.data + each.done, box->bytes, box->nbytes);
                each.done += box->nbytes;
                box->is_full = 0;
                moved = true;
            }
        }
        if (!left) {
            return ncclSuccess;
        }
        idle = moved ? 0 : idle + 1;
        if (idle > 100) {
            usleep(100);
        } else if (idle) {
            sched_yield();
        }
    }
}

/* ---- planted failures ---- */

enum disturbance { NONE, SLOW, FAILS, HANGS };
struct {
    enum disturbance what = NONE;
    int calls_until = 0, ms = 0;
} disturbance; /* guarded by fake::lock */

enum disturbance disturbance_now(int *ms) {
    fake::holding held(fake::lock);
    if (disturbance.what == NONE || disturbance.calls_until-- > 0) {
        return NONE;
    }
    enum disturbance now = disturbance.what;
    disturbance.what = now == SLOW ? now : NONE;
    *ms = disturbance.ms;
    return now;
}

/* Return true if the call may proceed. A failing or hanging call blocks until its communicator is aborted,
 * like a kernel of NCCL. */
bool is_undisturbed(ncclComm *comm) {
    int ms = 0;
    enum disturbance now = disturbance_now(&ms);
    if (now == SLOW) {
        usleep((useconds_t)ms * 1000);
    }
    if (now == FAILS) {
        comm->error = fail(ncclRemoteError,
                           "a call of rank " + std::to_string(comm->rank) + " fails, as was asked for");
    }
    while ((now == FAILS || now == HANGS) && !is_over(comm)) {
        usleep(1000);
    }
    return !is_over(comm);
}

/* Run the stream's tasks, on the stream's thread. */
void run_in_turn(std::vector<task> &of_stream) {
    std::vector<task> pairs;
    ncclResult_t result = ncclSuccess;
    for (task &each : of_stream) {
        if (result != ncclSuccess || !is_undisturbed(each.comm)) {
            return;
        }
        if (each.run) {
            result = each.run();
        } else if (each.nbytes) {
            pairs.push_back(each);
        }
        if (result != ncclSuccess && !each.comm->is_aborted) {
            each.comm->error = result;
        }
    }
    if (!pairs.empty()) {
        result = exchange(pairs);
        if (result != ncclSuccess && !pairs[0].comm->is_aborted) {
            pairs[0].comm->error = result;
        }
    }
}

/* Launch the held calls of a group, as one launch per stream. Calls of one communicator run one after
 * another. */
ncclResult_t run_all() {
    std::vector<task> now;
    now.swap(tasks);
    while (!now.empty()) {
        CUstream_st *stream = now.front().stream;
        std::vector<task> of_stream, others;
        for (task &each : now) {
            (each.stream == stream ? of_stream : others).push_back(std::move(each));
        }
        now.swap(others);
        std::vector<ncclComm *> comms;
        for (const task &each : of_stream) {
            fake::stream_waits(stream, each.comm->last_call);
            comms.push_back(each.comm);
        }
        fake::run_aside(stream, [of_stream = std::move(of_stream)]() mutable { run_in_turn(of_stream); });
        for (ncclComm *each : comms) {
            each->last_call = fake::now_of(stream);
        }
    }
    return ncclSuccess;
}

ncclResult_t enqueue(task made) {
    if (made.comm->is_aborted) {
        return fail(ncclInvalidUsage, "the communicator was aborted");
    }
    if (made.stream->context->device != made.comm->device) {
        return fail(ncclInvalidUsage, "the stream is of another device than the communicator");
    }
    tasks.push_back(std::move(made));
    return depth ? ncclSuccess : run_all();
}

enum kind { ALL_GATHER, REDUCE_SCATTER, ALL_REDUCE, REDUCE, BROADCAST, ALL_TO_ALL };
const char *const kind_names[] = {"AllGather", "ReduceScatter", "AllReduce",
                                  "Reduce",    "Broadcast",     "AlltoAll"};

std::string text_of(const call &said) {
    return std::string(kind_names[said.kind]) + "(count " + std::to_string(said.count) + ", type " +
           std::to_string(said.type) + ", op " + std::to_string(said.op) + ", root " +
           std::to_string(said.root) + ")";
}

/* Run a collective in rounds of at most `most` elements: each rank writes its slot, barrier, each rank reads
 * the slots, barrier. */
ncclResult_t rounds(ncclComm *comm, const call &mine, size_t count, size_t most,
                    const std::function<void(size_t at, size_t n)> &put,
                    const std::function<ncclResult_t(size_t at, size_t n)> &get) {
    comm->shared->calls[comm->rank] = mine;
    if (!meet(comm)) {
        return ncclRemoteError;
    }
    for (int r = 0; r < comm->num_ranks; r++) {
        if (!(comm->shared->calls[r] == mine)) {
            comm->shared->is_aborted = 1;
            return fail(ncclInvalidUsage, "rank " + std::to_string(comm->rank) + " calls " + text_of(mine) +
                                              ", rank " + std::to_string(r) + " " +
                                              text_of(comm->shared->calls[r]) + " of " + comm->name);
        }
    }
    for (size_t at = 0; at < count; at += most) {
        size_t n = std::min(most, count - at);
        put(at, n);
        if (!meet(comm)) {
            return ncclRemoteError;
        }
        ncclResult_t result = get(at, n);
        if (!meet(comm)) {
            return ncclRemoteError;
        }
        if (result != ncclSuccess) {
            return result;
        }
    }
    return ncclSuccess;
}

/* Enqueue a collective with `count` elements per part. */
ncclResult_t collective(enum kind kind, const void *from, void *to, size_t count, ncclDataType_t type,
                        ncclRedOp_t op, int root, ncclComm *comm, cudaStream_t stream) {
    if (!comm) {
        return fail(ncclInvalidArgument, "no communicator");
    }
    auto run = [=] {
        size_t size = sizes[type], n_ranks = (size_t)comm->num_ranks, me = (size_t)comm->rank;
        const char *in = (const char *)from;
        char *out = (char *)to, *mine = slot_of(comm, comm->rank);
        call said{kind, type, op, root, count};
        size_t whole = SLOT / size, shares = SLOT / size / n_ranks;
        reduction how = reduction_of(comm, op, type);
        auto put_whole = [&](size_t at, size_t n) { memcpy(mine, in + at * size, n * size); };
        auto put_shares = [&](size_t at, size_t n) {
            for (size_t r = 0; r < n_ranks; r++) {
                memcpy(mine + r * n * size, in + (r * count + at) * size, n * size);
            }
        };
        auto parts = [&](size_t offset) {
            std::vector<const char *> found;
            for (int r = 0; r < comm->num_ranks; r++) {
                found.push_back(slot_of(comm, r) + offset);
            }
            return found;
        };
        switch (kind) {
        case ALL_GATHER:
            return rounds(comm, said, count, whole, put_whole, [&](size_t at, size_t n) {
                for (size_t r = 0; r < n_ranks; r++) {
                    memcpy(out + (r * count + at) * size, slot_of(comm, (int)r), n * size);
                }
                return ncclSuccess;
            });
        case REDUCE_SCATTER:
            return rounds(comm, said, count, shares, put_shares, [&](size_t at, size_t n) {
                return reduce(out + at * size, parts(me * n * size), n, type, how);
            });
        case ALL_REDUCE:
        case REDUCE:
            return rounds(comm, said, count, whole, put_whole, [&](size_t at, size_t n) {
                bool gets = kind == ALL_REDUCE || (int)me == root;
                return gets ? reduce(out + at * size, parts(0), n, type, how) : ncclSuccess;
            });
        case BROADCAST:
            return rounds(
                comm, said, count, whole,
                [&](size_t at, size_t n) { (int)me == root ? put_whole(at, n) : (void)0; },
                [&](size_t at, size_t n) {
                    memcpy(out + at * size, slot_of(comm, root), n * size);
                    return ncclSuccess;
                });
        default:
            return rounds(comm, said, count, shares, put_shares, [&](size_t at, size_t n) {
                for (size_t r = 0; r < n_ranks; r++) {
                    memcpy(out + (r * count + at) * size, slot_of(comm, (int)r) + me * n * size, n * size);
                }
                return ncclSuccess;
            });
        }
    };
    return enqueue({comm, fake::stream_of(stream), run, false, nullptr, 0, 0, -1});
}

/* ---- communicators ---- */

std::string name_of(const ncclUniqueId &id) {
    char text[40];
    uint64_t words[2];
    memcpy(words, id.internal, sizeof words);
    snprintf(text, sizeof text, "/fake_nccl_%016llx", (unsigned long long)(words[0] ^ words[1]));
    return text;
}

ncclResult_t attach(ncclComm **made, int num_ranks, const std::string &name, int rank) {
    if (num_ranks > MOST_RANKS || rank < 0 || rank >= num_ranks) {
        return fail(ncclInvalidArgument, "a rank that there is not");
    }
    size_t head = (sizeof(struct shared) + 4095) / 4096 * 4096;
    size_t of_letters = (size_t)num_ranks * (size_t)num_ranks * sizeof(letter);
    size_t nbytes = head + (size_t)num_ranks * SLOT + of_letters;
    int file = shm_open(name.c_str(), O_CREAT | O_RDWR, 0600);
    if (file < 0 || ftruncate(file, (off_t)nbytes) != 0) {
        return fail(ncclSystemError, "no shared memory");
    }
    char *begin = (char *)mmap(nullptr, nbytes, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    close(file);
    if (begin == MAP_FAILED) {
        return fail(ncclSystemError, "no shared memory");
    }
    auto *comm = new ncclComm;
    comm->rank = rank;
    comm->num_ranks = num_ranks;
    comm->device = fake::current_device();
    comm->name = name;
    comm->shared = (struct shared *)begin;
    comm->slots = begin + head;
    comm->letters = (letter *)(begin + head + (size_t)num_ranks * SLOT);
    comm->nbytes = nbytes;
    *made = comm; /* set first, so that the caller can abort it */
    if (!meet(comm, &comm->shared->of_hosts)) {
        return ncclRemoteError;
    }
    if (rank == 0) {
        shm_unlink(name.c_str());
    }
    return ncclSuccess;
}

} // namespace

/* ---- the API ---- */

NCCL ncclGetVersion(int *version) {
    *version = NCCL_VERSION_CODE;
    return ncclSuccess;
}

NCCL ncclGetUniqueId(ncclUniqueId *id) {
    std::random_device random;
    for (size_t i = 0; i < sizeof id->internal; i++) {
        id->internal[i] = (char)random();
    }
    return ncclSuccess;
}

EXPORT const char *ncclGetErrorString(ncclResult_t result) {
    static const char *const texts[] = {"no error",
                                        "unhandled cuda error",
                                        "unhandled system error",
                                        "internal error",
                                        "invalid argument",
                                        "invalid usage",
                                        "remote process exited or there was a network error",
                                        "NCCL operation in progress"};
    return (unsigned)result < 8 ? texts[result] : "unknown result code";
}

EXPORT const char *ncclGetLastError(ncclComm_t) {
    fake::holding held(fake::lock);
    static thread_local std::string said;
    said = last_error;
    return said.c_str();
}

NCCL ncclCommInitRankConfig(ncclComm_t *comm, int num_ranks, ncclUniqueId id, int rank, ncclConfig_t *) {
    return attach(comm, num_ranks, name_of(id), rank);
}

NCCL ncclCommFinalize(ncclComm_t) {
    return ncclSuccess;
}

NCCL ncclCommDestroy(ncclComm_t) {
    return ncclSuccess; /* other ranks may still read the memory: the process's exit frees it */
}

NCCL ncclCommAbort(ncclComm_t comm) {
    comm->is_aborted = true;
    return ncclSuccess;
}

NCCL ncclCommGetAsyncError(ncclComm_t comm, ncclResult_t *error) {
    *error = (ncclResult_t)comm->error.load();
    return ncclSuccess;
}

NCCL ncclCommSplit(ncclComm_t comm, int color, int key, ncclComm_t *made, ncclConfig_t *) {
    auto &splits = comm->shared->splits;
    splits[comm->rank][0] = color;
    splits[comm->rank][1] = key;
    *made = nullptr;
    if (!meet(comm, &comm->shared->of_hosts)) {
        return ncclRemoteError;
    }
    std::vector<std::pair<int, int>> members; /* key, rank */
    for (int r = 0; r < comm->num_ranks; r++) {
        if (splits[r][0] == color) {
            members.push_back({splits[r][1], r});
        }
    }
    if (!meet(comm, &comm->shared->of_hosts)) {
        return ncclRemoteError;
    }
    int split = comm->num_splits++;
    if (color == NCCL_SPLIT_NOCOLOR) {
        return ncclSuccess;
    }
    std::stable_sort(members.begin(), members.end());
    int rank = 0;
    while (members[(size_t)rank].second != comm->rank) {
        rank++;
    }
    std::string name = comm->name + "_" + std::to_string(split) + "_" + std::to_string(members[0].second);
    return attach(made, (int)members.size(), name, rank);
}

NCCL ncclAllGather(const void *from, void *to, size_t count, ncclDataType_t type, ncclComm_t comm,
                   cudaStream_t stream) {
    return collective(ALL_GATHER, from, to, count, type, ncclSum, 0, comm, stream);
}

NCCL ncclReduceScatter(const void *from, void *to, size_t count, ncclDataType_t type, ncclRedOp_t op,
                       ncclComm_t comm, cudaStream_t stream) {
    return collective(REDUCE_SCATTER, from, to, count, type, op, 0, comm, stream);
}

NCCL ncclAllReduce(const void *from, void *to, size_t count, ncclDataType_t type, ncclRedOp_t op,
                   ncclComm_t comm, cudaStream_t stream) {
    return collective(ALL_REDUCE, from, to, count, type, op, 0, comm, stream);
}

NCCL ncclReduce(const void *from, void *to, size_t count, ncclDataType_t type, ncclRedOp_t op, int root,
                ncclComm_t comm, cudaStream_t stream) {
    return collective(REDUCE, from, to, count, type, op, root, comm, stream);
}

NCCL ncclBroadcast(const void *from, void *to, size_t count, ncclDataType_t type, int root, ncclComm_t comm,
                   cudaStream_t stream) {
    return collective(BROADCAST, from, to, count, type, ncclSum, root, comm, stream);
}

NCCL ncclAlltoAll(const void *from, void *to, size_t count, ncclDataType_t type, ncclComm_t comm,
                  cudaStream_t stream) {
    return collective(ALL_TO_ALL, from, to, count, type, ncclSum, 0, comm, stream);
}

NCCL ncclSend(const void *from, size_t count, ncclDataType_t type, int peer, ncclComm_t comm,
              cudaStream_t stream) {
    return enqueue(
        {comm, fake::stream_of(stream), nullptr, true, (char *)from, count * sizes[type], 0, peer});
}

NCCL ncclRecv(void *to, size_t count, ncclDataType_t type, int peer, ncclComm_t comm, cudaStream_t stream) {
    return enqueue({comm, fake::stream_of(stream), nullptr, false, (char *)to, count * sizes[type], 0, peer});
}

NCCL ncclGroupStart() {
    depth++;
    return ncclSuccess;
}

NCCL ncclGroupEnd() {
    return --depth == 0 ? run_all() : ncclSuccess;
}

NCCL ncclRedOpCreatePreMulSum(ncclRedOp_t *op, void *scalar, ncclDataType_t type, ncclScalarResidence_t,
                              ncclComm_t comm) {
    double factor = type == ncclFloat64    ? *(double *)scalar
                    : type == ncclFloat32  ? (double)*(float *)scalar
                    : type == ncclFloat16  ? (double)(float)*(half_float *)scalar
                    : type == ncclBfloat16 ? (double)(float)*(bfloat16 *)scalar
                                           : 1.0;
    comm->ops.push_back({type, factor});
    *op = (ncclRedOp_t)(ncclNumOps + (int)comm->ops.size() - 1);
    return ncclSuccess;
}

NCCL ncclRedOpDestroy(ncclRedOp_t, ncclComm_t) {
    return ncclSuccess;
}

/* Disturb this process: after `calls_until` calls one fails or hangs, or all are slow by `ms`; 0: none. */
EXPORT void fake_nccl_disturb(int what, int calls_until, int ms) {
    fake::holding held(fake::lock);
    disturbance = {(enum disturbance)what, calls_until, ms};
}
