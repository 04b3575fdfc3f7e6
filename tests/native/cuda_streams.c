/* csrc/torch/stream*.c and pool.c as a library for ctypes, without torch: its current stream is what
 * make_current says. */
#include "torch/kernel_library.h"
#include "torch/names.h"
#include "torch/pool.h"
#include "torch/stream.h"
#include "torch/tensor.h"
#include "torch/torch_abi.h"

enum { EVENTS = 4 };

struct torch_abi torch_abi;
struct torch_names torch_names;
static struct streams streams;
static struct pool pool;
static stream_event events[EVENTS];
static void *current;

static AOTITorchError current_stream(int32_t device_index, void **stream) {
    (void)device_index;
    *stream = current;
    return 0;
}

PyObject *torch_empty(int64_t numel, PyObject *dtype, PyObject *device) {
    PyObject *module = PyImport_ImportModule("torch");
    (void)dtype;
    PyObject *tensor = module ? PyObject_CallMethod(module, "empty", "LO", (long long)numel, device) : NULL;
    Py_XDECREF(module);
    return tensor;
}

int tensor_view_of(PyObject *tensor, struct tensor_view *view) {
    PyObject *address = PyObject_CallMethod(tensor, "data_ptr", NULL);
    view->data = address ? PyLong_AsVoidPtr(address) : NULL;
    Py_XDECREF(address);
    return PyErr_Occurred() ? -1 : 0;
}

bool kernels_are_wanted_of_torch(void) {
    return false;
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

void note_end(void) {
    stream_note_end(&streams);
}

int end_backward(void) {
    return stream_end_backward(&streams);
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

int grow_pool(int64_t nbytes) {
    return pool_grow(&pool, nbytes);
}

int64_t nbytes_of_piece(int64_t nbytes) {
    return pool_nbytes_of_piece(nbytes);
}

int64_t piece_nbytes(int64_t nbytes_of_blocks) {
    return pool_piece_nbytes(nbytes_of_blocks);
}

bool pool_cuts(int64_t offset) {
    return pool_is_cut(&pool, (const char *)pool.begin + offset);
}

bool pool_has(int64_t nbytes) {
    return pool_has_room(&pool, nbytes);
}
