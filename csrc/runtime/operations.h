/* Operations of a step that other libraries may replace (composer, torch's own tests). A step calls each
 * through this table, at the same points and with the same arguments as torch's FSDP1. The replacement may
 * wrap fsdp_c's function of that name.
 *
 * Invariant: an entry is the runtime's default unless the operation is replaced, in which case the entry
 * calls the replacement. */
#ifndef FSDP_RUNTIME_OPERATIONS_H
#define FSDP_RUNTIME_OPERATIONS_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stdbool.h>

#include "handle/flat_param.h"

struct unit;

/* Replaceable operations, in the order of the names in operations_replace(). */
enum replaceable {
    REPLACEABLE_UNSHARD,
    REPLACEABLE_RESHARD,
    REPLACEABLE_POST_BACKWARD_RESHARD,
    REPLACEABLE_GET_HANDLE_TO_PREFETCH,
    REPLACEABLE_REGISTER_PRE_BACKWARD_HOOKS,
    REPLACEABLE_REGISTER_POST_BACKWARD_HOOK,
    REPLACEABLES
};

/* Entries return 0, or -1 with an exception. */
struct operations {
    /* FlatParamHandle.unshard(handle), including writeback and allocation */
    int (*unshard)(struct unit *unit);
    /* _runtime_utils._reshard(state, handle, free_unsharded_flat_param), called before the runtime's own; or
     * NULL */
    int (*reshard)(struct unit *unit, bool free_storage);
    /* _runtime_utils._post_backward_reshard(state, handle) */
    int (*post_backward_reshard)(struct unit *unit);
    /* _runtime_utils._get_handle_to_prefetch(state, handle): returns the handle to prefetch, or None */
    int (*prefetch)(struct unit *unit, enum training_state state);
    /* ..._register_pre_backward_hooks(state, module, outputs, handle): the result replaces *outputs */
    int (*register_pre_backward_hooks)(struct unit *unit, PyObject **outputs);
    /* ..._register_post_backward_hook(state, handle) */
    int (*register_post_backward_hook)(struct unit *unit);

    PyObject *replaced[REPLACEABLES]; /* owned; NULL unless replaced */
};

extern struct operations operations;

extern const struct operations operations_default; /* the runtime's functions */

void operations_init(struct operations *table); /* fill in all entries after a change of `replaced` */
/* Replace operation `name` by `function`; Py_None restores the default. Return 0, or -1 with ValueError for
 * an unknown name. */
int operations_replace(struct operations *table, const char *name, PyObject *function);
/* Call replaced[which](module, a, b, c); the first NULL ends the arguments. New reference, or NULL. */
PyObject *operations_call(struct unit *unit, enum replaceable which, PyObject *a, PyObject *b, PyObject *c);
void operations_check(const struct operations *table); /* assert the invariant under FSDP_C_CHECK */

#endif
