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
 * (order.c), and are neither prefetched nor validated.
 *
 * Invariants: an optional unit is in the list of its enclosing unit, which is not optional itself. Outside of
 * a step no unit is `open` or `reached`. */
#include "runtime/runtime.h"

void optional_add(struct unit *unit, struct unit *enclosing) {
    unit->optional.enclosing = enclosing;
    if (!unit->handle || unit->leader)
        return;
    unit->optional.next = enclosing->optional.first;
    enclosing->optional.first = unit;
}

/* ---- checks of optional units ---- */

/* The unit may have been resharded by a change of precision, in train() or eval(). */
int optional_check(const struct unit *unit, bool in_backward) {
    const struct optional *enclosing = &unit->optional.enclosing->optional;
    if ((in_backward ? enclosing->reached : enclosing->open) &&
        unit->handle->storage.param_state != PARAM_SHARDED)
        return 0;
    return unit_error(PyExc_RuntimeError, unit_rank(unit), unit->name,
                      "%s. An optional unit is unsharded and reduced "
                      "with %S, the unit around it, on every rank: call it inside that unit's forward, do "
                      "not switch between train() and eval() there, and let its output reach the loss "
                      "through that unit's outputs.",
                      in_backward ? "a gradient reaches it where its parameters are not gathered"
                                  : "its forward is called where its parameters are not gathered",
                      unit->optional.enclosing->name);
}

/* ---- unshard with the enclosing unit ---- */

static int unshard_optional(struct unit *unit, enum traced part) {
    TRACE(part, unit->name_index);
    return unit_unshard(unit);
}

int optional_begin_forward(struct unit *enclosing) {
    enclosing->optional.open = enclosing->optional.first != NULL;
    for (struct unit *unit = enclosing->optional.first; unit; unit = unit->optional.next) {
        if (unit_precision_for_forward(unit) < 0 || unit_reshard_stale(unit) < 0 ||
            unshard_optional(unit, TRACED_FORWARD_GATHER) < 0)
            return -1;
        unit->unsharded.for_forward = unit->runtime->num_forwards; /* also if the unit will not run */
    }
    return 0;
}

int optional_begin_backward(struct unit *enclosing) {
    enclosing->optional.open = enclosing->optional.reached = enclosing->optional.first != NULL;
    for (struct unit *unit = enclosing->optional.first; unit; unit = unit->optional.next)
        if (unit_precision_for_backward(unit) < 0 || unshard_optional(unit, TRACED_BACKWARD_GATHER) < 0)
            return -1;
    return 0;
}

/* ---- after an exception ---- */

void optional_reset(struct unit *enclosing) {
    enclosing->optional.open = enclosing->optional.reached = false;
}
