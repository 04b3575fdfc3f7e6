/* Optional units: see [Note: optional units] in optional.h. */
#include "runtime/optional.h"

#include "runtime/runtime.h"

void optional_add(struct unit *unit, struct unit *enclosing) {
    unit->optional.enclosing = enclosing;
    if (!unit->handle || unit->leader)
        return;
    unit->optional.next = enclosing->optional.first;
    enclosing->optional.first = unit;
}

/* ---- checks of optional units ---- */

static int refuse(const struct unit *unit, const char *problem) {
    return unit_error(PyExc_RuntimeError, unit_rank(unit), unit->name,
                      "%s. An optional unit is unsharded and reduced with %S, the unit around it, on every "
                      "rank: call it inside that unit's forward, do not switch between train() and eval() "
                      "there, and let its output reach the loss through that unit's outputs.",
                      problem, unit->optional.enclosing->name);
}

/* The unit may have been resharded by a change of precision, in train() or eval(). */
int optional_check_forward(const struct unit *unit) {
    if (unit->optional.enclosing->optional.open && unit->handle->storage.param_state != PARAM_SHARDED)
        return 0;
    return refuse(unit, "its forward is called where its parameters are not gathered");
}

int optional_check_backward(const struct unit *unit) {
    if (unit->optional.enclosing->optional.reached && unit->handle->storage.param_state != PARAM_SHARDED)
        return 0;
    return refuse(unit, "a gradient reaches it where its parameters are not gathered");
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
        unit_mark_used(unit); /* also if the unit will not run */
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
