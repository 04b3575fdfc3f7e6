/* The calls that stand in for those of layers whose parameters are sharded. */
#include "handle/call_guards.h"

#include "base/check.h"
#include "torch/names.h"

enum { TRAINED_ENOUGH = 3 };

/* ---- life ---- */

static int call_guard_init(struct call_guard *layer, PyObject *entry) {
    PyObject *attributes, *call;
    if (!PyArg_ParseTuple(entry, "O!O", &PyDict_Type, &attributes, &call))
        return -1;
    layer->attributes = Py_NewRef(attributes);
    layer->call = Py_NewRef(call);
    return 0;
}

int call_guards_init(struct call_guards *layers, PyObject *calls) {
    Py_ssize_t count = PyList_Size(calls);
    layers->all = PyMem_Calloc((size_t)count + 1, sizeof *layers->all);
    if (!layers->all) {
        PyErr_NoMemory();
        return -1;
    }
    for (; layers->count < count; layers->count++)
        if (call_guard_init(&layers->all[layers->count], PyList_GetItem(calls, layers->count)) < 0)
            return -1;
    return 0;
}

void call_guards_fini(struct call_guards *layers) {
    for (int64_t i = 0; i < layers->count; i++) {
        Py_CLEAR(layers->all[i].attributes);
        Py_CLEAR(layers->all[i].call);
    }
    PyMem_Free(layers->all);
    layers->all = NULL;
    layers->count = 0;
    layers->placed = false;
}

int call_guards_visit(const struct call_guards *layers, visitproc visit, void *arg) {
    for (int64_t i = 0; i < layers->count; i++) {
        Py_VISIT(layers->all[i].attributes);
        Py_VISIT(layers->all[i].call);
    }
    return 0;
}

/* ---- in the layers' __dict__ ---- */

/* The user may have compiled the layer since `expected` was put there. Else it is replaced. 0 or -1. */
static int replace(struct call_guard *layer, PyObject *expected, PyObject *call) {
    PyObject *found = PyDict_GetItemWithError(layer->attributes, torch_names._compiled_call_impl);
    if (!found && PyErr_Occurred())
        return -1;
    layer->compiled = found && found != expected;
    return layer->compiled ? 0 : PyDict_SetItem(layer->attributes, torch_names._compiled_call_impl, call);
}

int call_guards_place(struct call_guards *layers, bool training) {
    if (!layers->count || layers->placed || (training && layers->trained == TRAINED_ENOUGH))
        return 0;
    for (int64_t i = 0; i < layers->count; i++)
        if (replace(&layers->all[i], Py_None, layers->all[i].call) < 0)
            return -1;
    layers->trained += training;
    layers->placed = true;
    CHECKED(call_guards_check(layers));
    return 0;
}

int call_guards_remove(struct call_guards *layers) {
    for (int64_t i = 0; layers->placed && i < layers->count; i++)
        if (!layers->all[i].compiled && replace(&layers->all[i], layers->all[i].call, Py_None) < 0)
            return -1;
    layers->placed = false;
    return 0;
}
