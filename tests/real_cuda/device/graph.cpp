#include "graph.h"

#include <cstring>
#include <set>

using namespace fake;

static std::set<CUgraph_st *> &captures = *new std::set<CUgraph_st *>; /* running captures */
static thread_local CUstreamCaptureMode mode_of_thread = CU_STREAM_CAPTURE_MODE_GLOBAL;
static thread_local std::set<CUgraph_st *> begun_here;

static uint64_t launches_of(const CUstream_st *which, const moment &to) {
    return which->index < to.size() ? to[which->index] : 0;
}

void CUgraph_st::begin(CUstream_st *on, CUstreamCaptureMode how) {
    holding held(lock);
    static unsigned long long last;
    id = ++last;
    mode = how;
    first = on;
    captures.insert(this);
    begun_here.insert(this);
    join(on);
}

void CUgraph_st::join(CUstream_st *which) {
    which->capture = this;
    members.push_back({which, launches_of(which, which->now)});
}

CUresult CUgraph_st::end() {
    holding held(lock);
    for (const member &each : members) {
        uint64_t last = launches_of(each.which, each.which->now);
        bool is_joined = last == each.joined_at || last <= launches_of(each.which, first->now);
        error = error == CUDA_SUCCESS && !is_joined ? CUDA_ERROR_STREAM_CAPTURE_UNJOINED : error;
        each.which->capture = nullptr;
    }
    for (auto each = undo.rbegin(); each != undo.rend(); ++each) {
        memcpy(each->at, each->were.data(), each->were.size());
    }
    undo.clear();
    members.clear();
    captures.erase(this);
    begun_here.erase(this);
    first = nullptr;
    return error;
}

void CUgraph_st::hold(work body) {
    works.push_back(std::move(body));
}

void CUgraph_st::save(bytes what) {
    if (what.nbytes) {
        undo.push_back({what.at, std::vector<char>((char *)what.at, (char *)what.at + what.nbytes)});
    }
}

namespace fake {

CUgraph_st *capture_of(unsigned long long id) {
    holding held(lock);
    for (CUgraph_st *each : captures) {
        if (each->id == id) {
            return each;
        }
    }
    return nullptr;
}

CUstreamCaptureMode exchange_mode(CUstreamCaptureMode mode) {
    CUstreamCaptureMode before = mode_of_thread;
    mode_of_thread = mode;
    return before;
}

/* A capture's mode forbids calls of all threads, of its own thread, or of none. A thread's mode can exempt its
 * calls. */
CUresult refused_while_capturing() {
    if (mode_of_thread == CU_STREAM_CAPTURE_MODE_RELAXED) {
        return CUDA_SUCCESS;
    }
    holding held(lock);
    for (CUgraph_st *each : captures) {
        bool everywhere =
            each->mode == CU_STREAM_CAPTURE_MODE_GLOBAL && mode_of_thread == CU_STREAM_CAPTURE_MODE_GLOBAL;
        bool here = each->mode != CU_STREAM_CAPTURE_MODE_RELAXED && begun_here.count(each);
        if (everywhere || here) {
            each->error = CUDA_ERROR_STREAM_CAPTURE_INVALIDATED;
            return CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
        }
    }
    return CUDA_SUCCESS;
}

} // namespace fake
