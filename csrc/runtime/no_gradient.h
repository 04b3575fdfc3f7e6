/* Units with trainable parameters to which no backward brings a gradient: one warning for each root.
 *
 * A unit is named when it has run in training mode, a backward has ended, and the root begins its next forward without
 * a gradient for the unit. Until then another backward may reach it, as in a GAN. A unit that has had a gradient before
 * is assumed to be skipped on purpose, as alternating heads are. */
#ifndef FSDP_RUNTIME_NO_GRADIENT_H
#define FSDP_RUNTIME_NO_GRADIENT_H

#include <stdbool.h>

struct runtime;
struct unit;

/* Of a unit. */
struct no_gradient {
    bool had_gradient; /* a backward has reached the outputs or parameters */
    bool expected;     /* true if the unit ran in training mode since the root's forward began */
};

/* Of all units of a root. */
struct no_gradient_warning {
    bool ended_backward; /* true if a backward has ended since the root's forward began */
    bool warned;
};

void no_gradient_mark_reached(struct unit *unit); /* by a backward */
int no_gradient_expect(struct unit *unit);        /* a forward with gradients enabled has ended. 0 or -1 */
void no_gradient_mark_backward_end(struct runtime *runtime);
int no_gradient_warn(struct runtime *runtime); /* the root begins a forward. 0 or -1 */

#endif
