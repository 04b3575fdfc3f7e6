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
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "$OOOOOOOOOOO", names, &new[0], &new[1], &new[2], &new[3],
                                     &new[4], &new[5], &new[6], &new[7], &new[8], &new[9], &new[10]))
        return -1;
    for (int i = 0; i < NUM_FUNCTIONS; i++)
        ref_set(functions[i], Py_NewRef(new[i]));
    return 0;
}

int callbacks_tell(PyObject *function, PyObject *a, PyObject *b) {
    return ref_done(PyObject_CallFunctionObjArgs(function, a, b, NULL));
}
