/* The operations of a step that outside code may put a function of its own in the place of (H-016, H-025). A
 * step calls each through this table alone. They are called where upstream calls them, with upstream's
 * arguments; what such a function wraps are fsdp_c's functions of the same names.
 *
 * Invariant: an entry is the runtime's own where nothing was put in its place, and else one that calls what
 * was. */
#ifndef FSDP_RUNTIME_OPERATIONS_H
#define FSDP_RUNTIME_OPERATIONS_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stdbool.h>

#include "handle/flat_param.h"

struct unit;

/* What can be replaced, in the order of the names in operations_replace(). */
enum replaceable {
    REPLACEABLE_UNSHARD,
    REPLACEABLE_RESHARD,
    REPLACEABLE_POST_BACKWARD_RESHARD,
    REPLACEABLE_GET_HANDLE_TO_PREFETCH,
    REPLACEABLE_REGISTER_PRE_BACKWARD_HOOKS,
    REPLACEABLE_REGISTER_POST_BACKWARD_HOOK,
    REPLACEABLES
};

/* 0 or -1, where nothing else is said. */
struct operations {
    /* FlatParamHandle.unshard(handle), which also does all that comes before an all-gather */
    int (*unshard)(struct unit *unit);
    /* _runtime_utils._reshard(state, handle, free_unsharded_flat_param), before the runtime's own; or NULL */
    int (*reshard)(struct unit *unit, bool free_storage);
    /* _runtime_utils._post_backward_reshard(state, handle) */
    int (*post_backward_reshard)(struct unit *unit);
    /* _runtime_utils._get_handle_to_prefetch(state, handle): prefetch what it returns, a handle or
     * None */
    int (*prefetch)(struct unit *unit, enum training_state state);
    /* ..._register_pre_backward_hooks(state, module, outputs, handle): *outputs become those returned */
    int (*register_pre_backward_hooks)(struct unit *unit, PyObject **outputs);
    /* ..._register_post_backward_hook(state, handle) */
    int (*register_post_backward_hook)(struct unit *unit);

    PyObject *replaced[REPLACEABLES]; /* owned; NULL where nothing was replaced */
};

extern struct operations operations;

extern const struct operations operations_default; /* the runtime's */

void operations_init(struct operations *table); /* the runtime's own, but for what is replaced */
/* `function` takes the place of what is called `name`; Py_None gives it back. 0, or -1 with ValueError for
 * another name. */
int operations_replace(struct operations *table, const char *name, PyObject *function);
/* replaced[which](the unit's module, a, b, c), of which the first NULL ends the arguments. New reference or
 * NULL. */
PyObject *operations_call(struct unit *unit, enum replaceable which, PyObject *a, PyObject *b, PyObject *c);
void operations_check(const struct operations *table); /* the invariant, where FSDP_C_CHECK is defined */

#endif
