/* Python callables over C functions, for torch's hook registrations. */
#ifndef FSDP_RUNTIME_HOOK_H
#define FSDP_RUNTIME_HOOK_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>

/* 0 or -1 with an exception. A hook answers Python with None: it changes no gradient. */
typedef int (*hook_function)(void *target);

int hook_init(void);

/* A hook on `target`. `owner`, when not NULL, is kept alive by the hook; without one the target must call
 * hook_disarm before it goes. New reference or NULL. */
PyObject *hook_new(hook_function function, void *target, PyObject *owner);
/* `function` is called when the hook goes without ever having been called, with the hook to know it by. */
typedef int (*hook_drop_function)(void *target, const void *hook);
void hook_on_drop(PyObject *hook, hook_drop_function function);

void hook_disarm(PyObject *hook);
void *hook_target(PyObject *hook); /* NULL once disarmed */

#endif
