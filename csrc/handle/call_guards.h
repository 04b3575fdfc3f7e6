/* Layers that say what to do when they are called past their unit, while it keeps their parameters sharded.
 *
 * nn.Module.__call__ prefers what stands in `_compiled_call_impl`. There each layer has a call of ours, which
 * explains the error that comes of the sharded parameters; a forward of the unit takes the calls away, so
 * that its layers run as they would without. They come back after it: in a training loop the first few times,
 * as a call that its steps make is found by then, and the steps after cost nothing.
 *
 * Invariant: while `placed`, each layer has its call in its __dict__, unless the user has compiled the
 * layer. */
#ifndef FSDP_HANDLE_CALL_GUARDS_H
#define FSDP_HANDLE_CALL_GUARDS_H

#include <Python.h>
#include <stdbool.h>
#include <stdint.h>

struct call_guard {
    PyObject *attributes; /* owned; the layer's __dict__ */
    PyObject *call;       /* owned */
    bool compiled;        /* the user's own call is there, and stays */
};

struct call_guards {
    struct call_guard *all; /* owned */
    int64_t count;
    bool placed;
    int trained; /* how often they were placed in a training step */
};

/* `calls`: a list of pairs (__dict__, call), one per layer; once. 0 or -1. */
int call_guards_init(struct call_guards *layers, PyObject *calls);
void call_guards_fini(struct call_guards *layers);
int call_guards_visit(const struct call_guards *layers, visitproc visit, void *arg);
int call_guards_place(struct call_guards *layers, bool training); /* 0 or -1 */
int call_guards_remove(struct call_guards *layers);               /* 0 or -1 */
/* the invariant, where FSDP_C_CHECK is defined */
void call_guards_check(const struct call_guards *layers);

#endif
