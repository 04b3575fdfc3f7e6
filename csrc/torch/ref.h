/* What the limited API leaves out of reference handling. */
#ifndef FSDP_TORCH_REF_H
#define FSDP_TORCH_REF_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>

/* *field = value; the old value is released last, when the field is good again. Steals `value`, which may be NULL. */
static inline void ref_set(PyObject **field, PyObject *value) {
    PyObject *old = *field;
    *field = value;
    Py_XDECREF(old);
}

#endif
