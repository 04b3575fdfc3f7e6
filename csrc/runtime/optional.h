/* Optional units: units that a rank need not run in a step, such as experts and encoders of modalities.
 *
 * [Note: optional units] All ranks must issue collectives in the same order, and no rank knows which optional
 * units the others will run. The collectives of optional units are therefore tied to the enclosing unit,
 * which every rank runs:
 *
 *   its pre-forward     unshard all of its optional units, in the order of modules            opens
 *   its post-forward    reshard them, run or not                                              closes
 *   its pre-backward    unshard them again; on a shared tensor its hook runs before theirs    opens
 *   its post-backward   reduce their gradients before its own, zeros if there are none        closes
 *                       (at the end of the backward if it has no gradients itself)
 *
 * While open, an optional unit may run any number of times in any order; it issues no collective, and stays
 * unsharded. Nothing outside may depend on which of them ran or which parameters require a gradient on this
 * rank. Units inside an optional unit are optional too. Optional units have no place in the order of units
 * (order.h), and are neither prefetched nor validated.
 *
 * Invariants: an optional unit is in the list of its enclosing unit, which is not optional itself. Outside of
 * a step no unit is `open` or `reached`. */
#ifndef FSDP_RUNTIME_OPTIONAL_H
#define FSDP_RUNTIME_OPTIONAL_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stdbool.h>

#include "handle/flat_param.h"

struct runtime;
struct unit;

/* State of a unit; all zeros if nothing is optional. Segments ([Note: segments] in unit.h) share their
 * unit's. */
struct optional {
    struct unit *enclosing; /* borrowed, from the same runtime; NULL unless the unit is optional */
    struct unit *next;      /* borrowed; next optional unit with parameters inside the same enclosing unit */
    /* true if some parameter required a gradient in the last forward of the enclosing unit with gradients
     * enabled */
    bool trainable;
    /* true if a backward under no_sync has passed this flat parameter since its last reduction */
    bool unreduced;

    struct unit *first; /* borrowed; first optional unit inside this one */
    bool open;          /* true while the optional units inside are unsharded and may run */
    bool reached;       /* true from the pre-backward until the optional units inside are reduced */
};

/* Insert `unit` at the head of the list of `enclosing`. */
void optional_add(struct unit *unit, struct unit *enclosing);

/* Begin or end a forward or backward of the enclosing unit; reshard.c has the ends. Return 0 or -1. */
int optional_begin_forward(struct unit *enclosing);
int optional_end_forward(struct unit *enclosing);
int optional_begin_backward(struct unit *enclosing);
int optional_end_backward(struct unit *enclosing);
/* reduce.c: reduce the gradients of the optional units inside, zeros for missing ones. reduce_all also covers
 * enclosing units without gradients. Return 0 or -1. */
int optional_reduce(struct unit *enclosing);
int optional_reduce_all(struct runtime *runtime);
void optional_abandon(struct unit *enclosing); /* call after a failed forward; clears exceptions */
void optional_reset(struct unit *enclosing);   /* close after an exception in a step */

/* Check that an optional unit may run, or may receive a gradient. Return 0, or -1 with RuntimeError. */
int optional_check_forward(const struct unit *unit);
int optional_check_backward(const struct unit *unit);

#endif
