/* Units that a rank need not run in a step, as experts and the encoders of modalities.
 *
 * [Note: optional units] Collectives must come in one order on all ranks, and no rank knows which optional
 * units the others are about to run. So theirs hang on those of the enclosing unit, which every rank runs:
 *
 *   its pre-forward     all of its optional units are gathered, in the order of modules            opens
 *   its post-forward    they are given back, run or not                                           closes
 *   its pre-backward    they are gathered again; on a tensor of both it comes before theirs       opens
 *   its post-backward   their gradients are reduced before its own, zeros where there are none;   closes
 *                       at the end of the backward where it has no gradients itself
 *
 * Between these an optional unit runs as often as it likes and in any order; it sends nothing, and stays
 * gathered. What it does is this rank's own business, so nothing above may depend on it: not on what ran, nor
 * on what requires a gradient. The units inside an optional one are optional too. None is in the order of
 * units (order.h): they are neither prefetched nor validated.
 *
 * Invariants: an optional unit is in the list of its enclosing unit, which is not optional itself. Outside of
 * a step nothing is open and nothing reached. */
#ifndef FSDP_RUNTIME_OPTIONAL_H
#define FSDP_RUNTIME_OPTIONAL_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stdbool.h>

#include "handle/flat_param.h"

struct runtime;
struct unit;

/* Of each unit; zeros where nothing is optional. Segments (see [Note: segments] in unit.h) go with their
 * unit. */
struct optional {
    struct unit *enclosing; /* borrowed, from the same runtime; of an optional unit, else NULL */
    struct unit *next;      /* borrowed; the next optional unit with parameters of the same enclosing unit */
    /* of each part: a parameter required a gradient in the last forward of the enclosing unit that a backward
     * can follow */
    bool trainable;
    bool unreduced; /* of each part: a backward under no_sync has passed it since its last reduction */

    struct unit *first; /* borrowed; of an enclosing unit: the first in it */
    bool open;          /* they are gathered, and may run */
    bool reached;       /* by a backward, which has not reduced their gradients yet */
};

/* `unit` comes before those that are in the list of `enclosing` already. */
void optional_add(struct unit *unit, struct unit *enclosing);

/* The enclosing unit begins or ends its forward or its backward. reshard.c frees them. 0 or -1. */
int optional_begin_forward(struct unit *enclosing);
int optional_end_forward(struct unit *enclosing);
int optional_begin_backward(struct unit *enclosing);
int optional_end_backward(struct unit *enclosing);
/* reduce.c: then their gradients, zeros where nothing came, also where the unit around them has none. 0 or -1 */
int optional_reduce(struct unit *enclosing);
int optional_reduce_all(struct runtime *runtime);
void optional_abandon(struct unit *enclosing); /* its forward has raised; clears exceptions */
void optional_reset(struct unit *enclosing);   /* after an exception in a step: nothing is open */

/* An optional unit. 0, or -1 with RuntimeError where it may not run, or where its gradient comes too late. */
int optional_check_forward(const struct unit *unit);
int optional_check_backward(const struct unit *unit);
int optional_keep_unsharded(
    struct unit *unit); /* it has run: it shows its shard, and stays gathered. 0 or -1 */

#endif
