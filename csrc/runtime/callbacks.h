/* All that C asks of fsdp_c's Python: functions that are bound once, when fsdp_c is imported. C looks up no
 * other name of it. Their types are those of bind_callbacks() in _C.pyi.
 *
 * Invariant: from callbacks_bind on every one is there. All are off the path of the usual step. */
#ifndef FSDP_RUNTIME_CALLBACKS_H
#define FSDP_RUNTIME_CALLBACKS_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>

/* `module` is the FullyShardedDataParallel, `handle` the FlatParamHandle. */
#define CALLBACKS(X)                                                                                         \
    X(lazy_init)                      /* (module): the unit is bound to a runtime */                         \
    X(convert_inputs)                 /* (args, kwargs, device or None, dtype or None) -> (args, kwargs) */  \
    X(hook_inputs)                    /* (args, kwargs, hook) -> what removes it, or None */                 \
    X(tensors_of)                     /* (output) -> list of the tensors in it that require a gradient */    \
    X(check_ddp)                      /* (module, ddp) */                                                    \
    X(cast_buffers_for_mode)          /* (module) */                                                         \
    X(step_in_backward)               /* (handle): its optimizers step */                                    \
    X(log_post_backward)              /* (module) */                                                         \
    X(warn_of_units_without_gradient) /* (module, names) */                                                  \
    X(check_backward)                 /* (module) */                                                         \
    X(explain_error)                  /* (error, module): said in the exception itself */                    \
    X(explain_failed_collective)      /* (error, phase, iteration, handle, enqueued): the same */

struct callbacks { /* owned for ever, all of them */
#define DECLARE(name) PyObject *name;
    CALLBACKS(DECLARE)
#undef DECLARE
};

extern struct callbacks callbacks;

/* Bind all functions of a dict by name. 0, or -1 with TypeError where one is missing or unknown: nothing is
 * bound then. */
int callbacks_bind(PyObject *functions);

/* function(a, b), of which the first NULL ends the arguments, and no result. 0 or -1. */
int callbacks_call(PyObject *function, PyObject *a, PyObject *b);

#endif
