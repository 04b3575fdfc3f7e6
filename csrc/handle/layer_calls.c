/* The calls that stand in for those of layers whose parameters are sharded. */
#include "handle/layer_calls.h"

#include "base/check.h"
#include "torch/names.h"

enum { TRAINED_ENOUGH = 3 };

/* ---- life ---- */

static int layer_call_init(struct layer_call *layer, PyObject *entry) {
    PyObject *attributes, *call;
    if (!PyArg_ParseTuple(entry, "O!O", &PyDict_Type, &attributes, &call))
        return -1;
    layer->attributes = Py_NewRef(attributes);
    layer->call = Py_NewRef(call);
    return 0;
}

int layer_calls_init(struct layer_calls *layers, PyObject *calls) {
    Py_ssize_t count = PyList_Size(calls);
    layers->all = PyMem_Calloc((size_t)count + 1, sizeof *layers->all);
    if (!layers->all) {
        PyErr_NoMemory();
        return -1;
    }
    for (; layers->count < count; layers->count++)
        if (layer_call_init(&layers->all[layers->count], PyList_GetItem(calls, layers->count)) < 0)
            return -1;
    return 0;
}

void layer_calls_fini(struct layer_calls *layers) {
    for (int64_t i = 0; i < layers->count; i++) {
        Py_CLEAR(layers->all[i].attributes);
        Py_CLEAR(layers->all[i].call);
    }
    PyMem_Free(layers->all);
    layers->all = NULL;
    layers->count = 0;
    layers->placed = false;
}

int layer_calls_visit(const struct layer_calls *layers, visitproc visit, void *arg) {
    for (int64_t i = 0; i < layers->count; i++) {
        Py_VISIT(layers->all[i].attributes);
        Py_VISIT(layers->all[i].call);
    }
    return 0;
}

/* ---- in the layers' __dict__ ---- */

/* The user may have compiled the layer since `expected` was put there. Else it is replaced. 0 or -1. */
static int replace(struct layer_call *layer, PyObject *expected, PyObject *call) {
    PyObject *found = PyDict_GetItemWithError(layer->attributes, torch_names._compiled_call_impl);
    if (!found && PyErr_Occurred())
        return -1;
    layer->compiled = found && found != expected;
    return layer->compiled ? 0 : PyDict_SetItem(layer->attributes, torch_names._compiled_call_impl, call);
}

int layer_calls_place(struct layer_calls *layers, bool training) {
    if (!layers->count || layers->placed || (training && layers->trained == TRAINED_ENOUGH))
        return 0;
    for (int64_t i = 0; i < layers->count; i++)
        if (replace(&layers->all[i], Py_None, layers->all[i].call) < 0)
            return -1;
    layers->trained += training;
    layers->placed = true;
    CHECKED(layer_calls_check(layers));
    return 0;
}

int layer_calls_remove(struct layer_calls *layers) {
    for (int64_t i = 0; layers->placed && i < layers->count; i++)
        if (!layers->all[i].compiled && replace(&layers->all[i], layers->all[i].call, Py_None) < 0)
            return -1;
    layers->placed = false;
    return 0;
}
