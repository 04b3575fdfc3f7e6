/* Operations of a step that other libraries may replace (composer, torch's own tests). A step calls each
 * replacement at the same points and with the same arguments as torch's FSDP1. The replacement may wrap
 * fsdp_c's function of that name. */
#ifndef FSDP_RUNTIME_OPERATIONS_H
#define FSDP_RUNTIME_OPERATIONS_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stdbool.h>

struct unit;

/* Replaceable operations, in the order of the names in operations_replace(). */
enum replaceable {
    REPLACEABLE_UNSHARD, /* FlatParamHandle.unshard(handle), including writeback and allocation */
    /* _runtime_utils._reshard(state, handle, free_unsharded_flat_param), called before the runtime's own */
    REPLACEABLE_RESHARD,
    REPLACEABLE_POST_BACKWARD_RESHARD, /* _runtime_utils._post_backward_reshard(state, handle) */
    /* _runtime_utils._get_handle_to_prefetch(state, handle): returns the handle to prefetch, or None */
    REPLACEABLE_GET_HANDLE_TO_PREFETCH,
    /* ..._register_pre_backward_hooks(state, module, outputs, handle): returns the new outputs */
    REPLACEABLE_REGISTER_PRE_BACKWARD_HOOKS,
    REPLACEABLE_REGISTER_POST_BACKWARD_HOOK, /* ..._register_post_backward_hook(state, handle) */
    REPLACEABLES
};

extern PyObject *operations_replaced[REPLACEABLES]; /* owned; NULL unless replaced */

/* Replace operation `name` by `function`; Py_None restores the default. Return 0, or -1 with ValueError for
 * an unknown name. */
int operations_replace(const char *name, PyObject *function);
/* Call operations_replaced[which](module, a, b, c); the first NULL ends the arguments. New reference, or
 * NULL. */
PyObject *operations_call(struct unit *unit, enum replaceable which, PyObject *a, PyObject *b, PyObject *c);

/* Call the replacement, or else the runtime's own function. Return 0, or -1 with an exception. */
int operations_unshard(struct unit *part);
int operations_reshard(struct unit *part, bool free_storage); /* the caller reshards afterwards */
int operations_post_backward_reshard(struct unit *unit);
int operations_register_pre_backward_hooks(struct unit *unit, PyObject **outputs); /* may replace *outputs */
int operations_register_post_backward_hook(struct unit *unit);

#endif
