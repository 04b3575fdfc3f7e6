/* Python functions of fsdp_c that C calls, bound once at import. C calls no other function of fsdp_c.
 * bind_callbacks() in _C.pyi has their types.
 *
 * Invariant: all functions are set after callbacks_bind. None is called in a usual step. */
#ifndef FSDP_RUNTIME_CALLBACKS_H
#define FSDP_RUNTIME_CALLBACKS_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>

/* `module` is a FullyShardedDataParallel, `handle` a FlatParamHandle. */
#define CALLBACKS(X)                                                                                         \
    X(lazy_init)                      /* (module): bind the unit to a runtime */                             \
    X(convert_inputs)                 /* (args, kwargs, device or None, dtype or None) -> (args, kwargs) */  \
    X(hook_inputs)                    /* (args, kwargs, hook, keeps_graph) -> its removal, or None */        \
    X(tensors_of)                     /* (output) -> list of its tensors that require a gradient */          \
    X(check_ddp)                      /* (module, ddp) */                                                    \
    X(cast_buffers_for_mode)          /* (module) */                                                         \
    X(step_in_backward)               /* (handle): run the unit's optimizers */                              \
    X(log_post_backward)              /* (module) */                                                         \
    X(warn_of_units_without_gradient) /* (module, names) */                                                  \
    X(check_backward)                 /* (module) */                                                         \
    X(explain_error)                  /* (error, module): add an explanation to the exception */             \
    X(explain_failed_collective)      /* (error, phase, iteration, handle, enqueued): add an explanation */

struct callbacks { /* owned, immortal */
#define DECLARE(name) PyObject *name;
    CALLBACKS(DECLARE)
#undef DECLARE
};

extern struct callbacks callbacks;

/* Bind all functions of a dict by name. Return 0, or -1 with TypeError if a name is missing or unknown;
 * nothing is bound then. */
int callbacks_bind(PyObject *functions);

/* Call function(a, b) and drop the result; the first NULL ends the arguments. Return 0 or -1. */
int callbacks_call(PyObject *function, PyObject *a, PyObject *b);

#endif
