/* What a step asks of streams and memory, told to a Python callable while one is set: the order of a step is checked without a
 * GPU by replaying it (tests/streams).
 *
 * The recorder is called as recorder("enter", role), ("leave",), ("record", role, event), ("wait", role, event),
 * ("synchronize", event), ("destroy", event), and with a tensor: ("new", tensor), ("alloc", tensor) from the pool, ("alloc_shard",
 * tensor) and ("free", tensor) for memory, ("host", tensor) for the host's own, ("read", tensor), ("write", tensor) for what is enqueued on the stream entered last. */
#ifndef FSDP_TORCH_TRACE_H
#define FSDP_TORCH_TRACE_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>

extern PyObject *trace_recorder; /* owned; NULL: nothing is recorded */

void trace_set(PyObject *recorder);                          /* Py_None: none */
void trace_stream(const char *what, int role, size_t event); /* a negative role, or an event of 0: is left out */
void trace_tensor_now(const char *what, PyObject *tensor);   /* an exception of the recorder is printed, not raised */

static inline void trace_tensor(const char *what, PyObject *tensor) {
    if (trace_recorder)
        trace_tensor_now(what, tensor);
}

static inline void trace_read(PyObject *tensor) {
    trace_tensor("read", tensor);
}

static inline void trace_write(PyObject *tensor) {
    trace_tensor("write", tensor);
}

#endif
