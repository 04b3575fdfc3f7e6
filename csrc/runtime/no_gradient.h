/* Units with trainable parameters to which a backward brings no gradient, which is told once: [Note: units without
 * a gradient] in no_gradient.c. */
#ifndef FSDP_RUNTIME_NO_GRADIENT_H
#define FSDP_RUNTIME_NO_GRADIENT_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stdbool.h>

struct runtime;
struct unit;

/* Of a unit. */
struct no_gradient {
    bool had_gradient; /* one has come to the outputs in some backward */
    bool unreachable;  /* no output of the last forward requires one */
    bool skipped;      /* the last backward did not pass through the unit */
};

/* Of all units of a root. */
struct no_gradient_told {
    bool any_unreachable, any_skipped; /* some unit is */
    bool told;                         /* a warning was given */
};

void no_gradient_note_reached(struct unit *unit); /* by a backward */
void no_gradient_forget(struct unit *unit);       /* its forward may have been unreachable */
/* No output of the unit's forward requires a gradient. 0 or -1 */
int no_gradient_note_unreachable(struct unit *unit);
/* A forward without gradients has ended; perhaps a checkpoint's. 0 or -1 */
int no_gradient_note_checkpointed(struct unit *unit);
/* New list of the names of the units that the backward could not reach, None where there is none, or NULL.
 * Those that it skipped are noted. */
PyObject *no_gradient_take_unreachable(struct runtime *runtime);
int no_gradient_warn_unreachable(struct runtime *runtime, PyObject *names); /* 0 or -1 */
int no_gradient_warn_skipped(struct runtime *runtime);                      /* 0 or -1 */

#endif
