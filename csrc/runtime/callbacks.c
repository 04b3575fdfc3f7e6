#include "runtime/callbacks.h"

#include "runtime/runtime.h"
#include "torch/ref.h"

struct callbacks callbacks;

static PyObject **const functions[] = {
#define ADDRESS(name) &callbacks.name,
    CALLBACKS(ADDRESS)
#undef ADDRESS
};

enum { NUM_FUNCTIONS = sizeof functions / sizeof *functions };

int callbacks_bind(PyObject *args, PyObject *kwargs) {
    static char *names[NUM_FUNCTIONS + 1] = {
#define QUOTE(name) #name,
        CALLBACKS(QUOTE)
#undef QUOTE
            NULL,
    };
    PyObject *new[NUM_FUNCTIONS];
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "$OOOOOOOOOOOOO", names, &new[0], &new[1], &new[2],
                                     &new[3], &new[4], &new[5], &new[6], &new[7], &new[8], &new[9], &new[10],
                                     &new[11], &new[12]))
        return -1;
    for (int i = 0; i < NUM_FUNCTIONS; i++)
        ref_set(functions[i], Py_NewRef(new[i]));
    return 0;
}

int callbacks_tell(PyObject *function, PyObject *a, PyObject *b) {
    return ref_done(PyObject_CallFunctionObjArgs(function, a, b, NULL));
}

/* ---- who looks at gradients ---- */

PyObject *callbacks_watcher;

void callbacks_set_watcher(PyObject *function) {
    ref_set(&callbacks_watcher, function == Py_None ? NULL : Py_NewRef(function));
}

int callbacks_call_watcher(const struct unit *unit, PyObject *gradients) {
    OWNED *function = Py_NewRef(callbacks_watcher); /* it may put itself away */
    return ref_done(PyObject_CallFunctionObjArgs(function, unit->handle_object, gradients, NULL));
}
