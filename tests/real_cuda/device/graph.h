/* CUDA graphs: what is launched on a capturing stream is held, and runs each time that the graph is launched.
 *
 * A stream joins a capture by waiting for an event of one that is in it, and must be waited for by the first
 * one before the end.
 *
 * Invariant: what was captured has not run once the capture is over. Meanwhile it may have, as those who
 * compute on the host's memory need sizes and indices that come out of it; what is known to be written is put
 * back at the end. */
#pragma once

#include "device.h"

#pragma GCC visibility push(default)
struct __attribute__((visibility("default"))) CUgraph_st {
    void begin(CUstream_st *on, CUstreamCaptureMode mode);
    CUresult end(); /* CUDA_SUCCESS, or how the capture was invalidated */
    void join(CUstream_st *which);

    void hold(fake::work body);
    void save(fake::bytes what);

    unsigned long long id = 0;
    CUstreamCaptureMode mode = CU_STREAM_CAPTURE_MODE_GLOBAL;
    CUresult error = CUDA_SUCCESS;
    std::vector<fake::work> works;
    CUstream_st *first = nullptr; /* while it captures */

  private:
    struct member {
        CUstream_st *which;
        uint64_t joined_at; /* of its own launches */
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

CUgraph_st *capture_of(unsigned long long id); /* that goes on, or null */

CUstreamCaptureMode exchange_mode(CUstreamCaptureMode mode); /* of this thread */
/* What a call that may not be made inside a capture answers: CUDA_SUCCESS where there is none that minds. */
CUresult refused_while_capturing();

} // namespace fake
#pragma GCC visibility pop
