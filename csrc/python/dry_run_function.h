/* The function dry_run of the extension module. */
#ifndef FSDP_PYTHON_DRY_RUN_FUNCTION_H
#define FSDP_PYTHON_DRY_RUN_FUNCTION_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>

int dry_run_function_add(PyObject *module); /* 0 or -1 */

#endif
