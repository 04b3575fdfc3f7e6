/* What the writers of states (*_state.c) say of a transition that their table does not allow. */
#ifndef FSDP_HANDLE_TRANSITION_H
#define FSDP_HANDLE_TRANSITION_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stdint.h>

/* -1 with RuntimeError, which names the unit and both states, and ends in `remedy`. */
int transition_refuse(int64_t rank, PyObject *unit, const char *from, const char *to, const char *remedy);

#endif
