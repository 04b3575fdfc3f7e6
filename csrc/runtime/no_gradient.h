/* One warning per root for units whose trainable parameters never receive a gradient.
 *
 * A unit is reported when it has run in training mode, a backward has ended, and the root begins its next
 * forward without a gradient for the unit. Another backward may reach the unit before that, as in a GAN. A
 * unit that has had a gradient before is assumed to be skipped on purpose, as alternating heads are. */
#ifndef FSDP_RUNTIME_NO_GRADIENT_H
#define FSDP_RUNTIME_NO_GRADIENT_H

#include <stdbool.h>

struct runtime;
struct unit;

/* State of a unit. */
struct no_gradient {
    bool had_gradient; /* true if a backward has reached the unit's outputs or parameters */
    bool expected;     /* true if the unit ran in training mode since the root's forward began */
};

/* State of a root. */
struct no_gradient_warning {
    bool ended_backward; /* true if a backward has ended since the root's forward began */
    bool warned;
};

void no_gradient_mark_reached(struct unit *unit); /* call when a backward reaches the unit */
int no_gradient_expect(struct unit *unit);        /* call after a forward with gradients enabled. 0 or -1 */
void no_gradient_mark_backward_end(struct runtime *runtime);
int no_gradient_warn(struct runtime *runtime); /* call when the root begins a forward. 0 or -1 */

#endif
