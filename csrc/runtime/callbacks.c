#include "runtime/callbacks.h"

#include "torch/ref.h"

struct callbacks callbacks;

static PyObject **const functions[] = {
    &callbacks.lazy_init,
    &callbacks.convert_inputs,
    &callbacks.hook_inputs,
    &callbacks.tensors_of,
    &callbacks.cast_buffers_for_mode,
    &callbacks.step_in_backward,
    &callbacks.is_in_reentrant_checkpoint,
    &callbacks.log_post_backward,
    &callbacks.warn_of_units_cut_off,
    &callbacks.warn_of_units_left_out,
    &callbacks.explain_error,
    &callbacks.explain_failed_collective,
};

enum { NUM_FUNCTIONS = sizeof functions / sizeof *functions };

int callbacks_bind(PyObject *args, PyObject *kwargs) {
    static char *names[NUM_FUNCTIONS + 1] = {
        "lazy_init",
        "convert_inputs",
        "hook_inputs",
        "tensors_of",
        "cast_buffers_for_mode",
        "step_in_backward",
        "is_in_reentrant_checkpoint",
        "log_post_backward",
        "warn_of_units_cut_off",
        "warn_of_units_left_out",
        "explain_error",
        "explain_failed_collective",
        NULL,
    };
    PyObject *new[NUM_FUNCTIONS];
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "$OOOOOOOOOOOO", names, &new[0], &new[1], &new[2], &new[3], &new[4],
                                     &new[5], &new[6], &new[7], &new[8], &new[9], &new[10], &new[11]))
        return -1;
    for (int i = 0; i < NUM_FUNCTIONS; i++)
        ref_set(functions[i], Py_NewRef(new[i]));
    return 0;
}

int callbacks_tell(PyObject *function, PyObject *a, PyObject *b) {
    PyObject *done = PyObject_CallFunctionObjArgs(function, a, b, NULL);
    Py_XDECREF(done);
    return done ? 0 : -1;
}
