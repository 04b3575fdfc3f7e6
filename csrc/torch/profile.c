#include "torch/profile.h"

#include <stdbool.h>

#include "torch/names.h"

static PyObject *profiler;        /* owned for ever; the dict of torch.autograd.profiler */
static PyObject *enabled_key;     /* owned for ever */
static PyObject *record_function; /* owned for ever */
static bool is_on;                /* when an outer range was last opened, or would have been */

int profile_init(void) {
    if (record_function)
        return 0;
    OWNED *module = PyImport_ImportModule("torch.autograd.profiler");
    if (!module)
        return -1;
    ref_set(&profiler, Py_NewRef(PyModule_GetDict(module)));
    ref_set(&enabled_key, PyUnicode_InternFromString("_is_profiler_enabled"));
    record_function = PyObject_GetAttrString(module, "record_function");
    return enabled_key && record_function ? 0 : -1;
}

PyObject *profile_begin(const char *name) {
    is_on = PyDict_GetItemWithError(profiler, enabled_key) == Py_True;
    return profile_begin_inner(name);
}

PyObject *profile_begin_inner(const char *name) {
    if (!is_on)
        return NULL;
    PyObject *range = context_enter(PyObject_CallFunction(record_function, "s", name));
    if (!range)
        PyErr_Clear();
    return range;
}

void profile_end(PyObject *range) {
    if (!range)
        return;
    bool is_failing = PyErr_Occurred();
    if (context_leave(range) < 0 && !is_failing)
        PyErr_Clear();
}
