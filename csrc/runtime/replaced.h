/* Functions that outside code has put in place of the runtime's own, which are called instead (H-016, H-025). In the usual
 * step nothing is replaced, and each costs the test of a pointer. They are called where upstream calls them, with upstream's
 * arguments; what they wrap are fsdp_c's functions of the same names. */
#ifndef FSDP_RUNTIME_REPLACED_H
#define FSDP_RUNTIME_REPLACED_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stdbool.h>

enum replaceable {
    REPLACED_UNSHARD,                     /* FlatParamHandle.unshard(handle) */
    REPLACED_RESHARD,                     /* _runtime_utils._reshard(state, handle, free_unsharded_flat_param) */
    REPLACED_POST_BACKWARD_RESHARD,       /* _runtime_utils._post_backward_reshard(state, handle) */
    REPLACED_GET_HANDLE_TO_PREFETCH,      /* _runtime_utils._get_handle_to_prefetch(state, handle): a handle or None */
    REPLACED_REGISTER_PRE_BACKWARD_HOOKS, /* ..._register_pre_backward_hooks(state, module, outputs, handle): outputs */
    REPLACED_REGISTER_POST_BACKWARD_HOOK, /* ..._register_post_backward_hook(state, handle) */
    REPLACEABLES
};

extern PyObject *replaced[REPLACEABLES]; /* owned; NULL where nothing was replaced */

/* `function` takes the place of what is called `name`; Py_None gives it back. 0, or -1 with ValueError for another name. */
int replaced_set(const char *name, PyObject *function);

struct unit;

/* Call what was replaced, on the unit's objects. 0 or -1. */
int replaced_unshard(struct unit *unit);
int replaced_reshard(struct unit *unit, bool free_storage);
int replaced_post_backward_reshard(struct unit *unit);
int replaced_register_post_backward_hook(struct unit *unit);
int replaced_register_pre_backward_hooks(struct unit *unit, PyObject **outputs); /* *outputs become those returned */
int replaced_get_handle_to_prefetch(struct unit *unit, struct unit **chosen);    /* NULL for None */

#endif
