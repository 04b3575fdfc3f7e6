#include "torch/trace.h"

#include "torch/ref.h"

PyObject *trace_recorder;

void trace_set(PyObject *recorder) {
    ref_set(&trace_recorder, recorder == Py_None ? NULL : Py_NewRef(recorder));
}

/* The recorder may put itself away while it is called. */
static void tell(PyObject *args) {
    PyObject *recorder = Py_XNewRef(trace_recorder);
    PyObject *done = recorder && args ? PyObject_CallObject(recorder, args) : NULL;
    if (!done && PyErr_Occurred())
        PyErr_WriteUnraisable(recorder);
    Py_XDECREF(done);
    Py_XDECREF(args);
    Py_XDECREF(recorder);
}

void trace_stream(const char *what, int role, size_t event) {
    PyObject *type, *value, *traceback;
    PyErr_Fetch(&type, &value, &traceback);
    if (role < 0)
        tell(event ? Py_BuildValue("(sn)", what, (Py_ssize_t)event) : Py_BuildValue("(s)", what));
    else
        tell(event ? Py_BuildValue("(sin)", what, role, (Py_ssize_t)event) : Py_BuildValue("(si)", what, role));
    PyErr_Restore(type, value, traceback);
}

void trace_tensor_now(const char *what, PyObject *tensor) {
    PyObject *type, *value, *traceback;
    PyErr_Fetch(&type, &value, &traceback);
    tell(Py_BuildValue("(sO)", what, tensor));
    PyErr_Restore(type, value, traceback);
}
