/* CUDA graphs: work launched on a capturing stream is held, and runs at each launch of the graph.
 *
 * A stream joins a capture by waiting for an event of a stream that is in it, and the first stream must wait
 * for it before the end.
 *
 * Invariant: after the capture, none of its work has run. During the capture it may have, because operators
 * need sizes and indices that it computes; the written memory is restored at the end. */
#pragma once

#include "device.h"

#pragma GCC visibility push(default)
struct __attribute__((visibility("default"))) CUgraph_st {
    void begin(CUstream_st *on, CUstreamCaptureMode mode);
    CUresult end(); /* CUDA_SUCCESS, or the error that invalidated the capture */
    void join(CUstream_st *which);

    void hold(fake::work body);
    void save(fake::bytes what);

    unsigned long long id = 0;
    CUstreamCaptureMode mode = CU_STREAM_CAPTURE_MODE_GLOBAL;
    CUresult error = CUDA_SUCCESS;
    std::vector<fake::work> works;
    CUstream_st *first = nullptr; /* stream that began the capture; null outside it */

  private:
    struct member {
        CUstream_st *which;
        uint64_t joined_at; /* number of the stream's launches when it joined */
    };
    struct saved {
        void *at;
        std::vector<char> were;
    };
    std::vector<member> members;
    std::vector<saved> undo;
};

struct CUgraphExec_st {
    std::vector<fake::work> works;
};

namespace fake {

CUgraph_st *capture_of(unsigned long long id); /* a running capture, or null */

CUstreamCaptureMode exchange_mode(CUstreamCaptureMode mode); /* this thread's mode */
/* Return the error of a call that is illegal during capture, or CUDA_SUCCESS if no capture forbids it. */
CUresult refused_while_capturing();

} // namespace fake
#pragma GCC visibility pop
