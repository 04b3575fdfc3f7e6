/* The Python types over the structs of the layers below. Each `*_type_create` gives a new heap type, or NULL; each `*_of` the
 * struct inside an object, borrowed, or NULL with TypeError. */
#ifndef FSDP_PYTHON_TYPES_H
#define FSDP_PYTHON_TYPES_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include "runtime/runtime.h"

/* Python passes what a function does not ask for: itself, or no arguments. */
#pragma GCC diagnostic ignored "-Wunused-parameter"

PyObject *handle_type_create(PyObject *module);
PyObject *unit_type_create(PyObject *module);
PyObject *runtime_type_create(PyObject *module);

struct handle *handle_of(PyObject *object);
struct unit *unit_of(PyObject *object);

/* 0 -> None, -1 -> NULL: the end of a method that returns nothing. */
static inline PyObject *none_or_error(int result) {
    return result < 0 ? NULL : Py_NewRef(Py_None);
}

#endif
