#include "runtime/callbacks.h"

#include "runtime/runtime.h"
#include "torch/ref.h"

struct callbacks callbacks;

static const struct {
    const char *name;
    PyObject **function;
} table[] = {
#define ENTRY(name) {#name, &callbacks.name},
    CALLBACKS(ENTRY)
#undef ENTRY
};

enum { NUM_FUNCTIONS = sizeof table / sizeof *table };

int callbacks_bind(PyObject *functions) {
    for (int i = 0; i < NUM_FUNCTIONS; i++)
        if (!functions || !PyDict_GetItemString(functions, table[i].name))
            return RAISED(PyExc_TypeError, "bind_callbacks() needs the function %s", table[i].name);
    if (PyDict_Size(functions) > NUM_FUNCTIONS)
        return RAISED(PyExc_TypeError, "bind_callbacks() takes %d functions, got %zd", NUM_FUNCTIONS,
                      PyDict_Size(functions));
    for (int i = 0; i < NUM_FUNCTIONS; i++)
        ref_set(table[i].function, Py_NewRef(PyDict_GetItemString(functions, table[i].name)));
    return 0;
}

int callbacks_call(PyObject *function, PyObject *a, PyObject *b) {
    return ref_done(PyObject_CallFunctionObjArgs(function, a, b, NULL));
}
