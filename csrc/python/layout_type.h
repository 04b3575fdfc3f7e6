/* The Python type FlatLayout: an immutable object that owns one flat_layout. */
#ifndef FSDP_PYTHON_LAYOUT_TYPE_H
#define FSDP_PYTHON_LAYOUT_TYPE_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include "layout/layout.h"

/* A new heap type for `module`. New reference, or NULL with an exception. */
PyObject *layout_type_create(PyObject *module);

/* The layout inside a FlatLayout, borrowed while `object` lives. NULL with TypeError for anything else. */
const struct flat_layout *layout_of(PyObject *object);

#endif
