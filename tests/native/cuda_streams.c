/* csrc/torch/stream.c and pool.c as a library for ctypes, without torch: its current stream is what make_current says. */
#include "torch/pool.h"
#include "torch/stream.h"
#include "torch/torch_abi.h"

enum { EVENTS = 4 };

struct torch_abi torch_abi;
static struct streams streams;
static struct pool pool;
static stream_event events[EVENTS];
static void *current;

static AOTITorchError current_stream(int32_t device_index, void **stream) {
    (void)device_index;
    *stream = current;
    return 0;
}

void make_current(void *stream) {
    current = stream;
}

int start(PyObject *device) {
    torch_abi.aoti_torch_get_current_cuda_stream = current_stream;
    return streams_init(&streams, device) < 0 ? -1 : pool_init(&pool, device);
}

void finish(void) {
    for (int i = 0; i < EVENTS; i++)
        stream_event_destroy(&streams, &events[i]);
    streams_fini(&streams);
    pool_fini(&pool);
}

int follow(void) {
    return stream_follow(&streams);
}

int give_back(void) {
    return stream_give_back(&streams);
}

int enter(int role) {
    return stream_enter(&streams, (enum stream_role)role);
}

int leave(void) {
    return stream_leave(&streams);
}

int fail_on(int role) {
    if (stream_enter(&streams, (enum stream_role)role) == 0) {
        PyErr_SetString(PyExc_TimeoutError, "the collective");
        stream_leave(&streams);
    }
    return -1;
}

int record(int role, int event) {
    return stream_record(&streams, (enum stream_role)role, &events[event]);
}

int wait_for(int role, int event) {
    return stream_wait(&streams, (enum stream_role)role, events[event]);
}

int synchronize(int event) {
    return stream_synchronize(&streams, events[event]);
}

int use_pool(void) {
    return pool_enter(&pool);
}

int stop_using_pool(void) {
    return pool_leave(&pool);
}
