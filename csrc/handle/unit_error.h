/* Errors name the rank and the unit in which they happened, and end in what to do instead. */
#ifndef FSDP_HANDLE_UNIT_ERROR_H
#define FSDP_HANDLE_UNIT_ERROR_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stdint.h>

/* -1 with an exception of this type, "rank R, unit U: ...". `format` and what follows are as for
 * PyErr_Format. */
int unit_error(PyObject *type, int64_t rank, PyObject *unit, const char *format, ...);

#endif
