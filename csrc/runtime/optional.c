/* Optional units: see [Note: optional units] in optional.h. */
#include "runtime/optional.h"

#include "runtime/runtime.h"

/* ---- life ---- */

void optional_add(struct unit *unit, struct unit *enclosing) {
    unit->optional.enclosing = enclosing;
    if (!unit->handle || unit->leader)
        return;
    unit->optional.next = enclosing->optional.first;
    enclosing->optional.first = unit;
}

/* ---- what an optional unit may do ---- */

static int refuse(const struct unit *unit, const char *what) {
    return unit_error(
        PyExc_RuntimeError, unit_rank(unit), unit->name,
        "%s. An optional unit is gathered and reduced with %S, the unit around it, on every "
        "rank: call it inside of that unit's forward, without changing between train() and eval() there, and "
        "have what it returns reach the loss through that unit's outputs.",
        what, unit->optional.enclosing->name);
}

/* A change of precision gives back what was gathered in another. */
int optional_check_forward(const struct unit *unit) {
    if (unit->optional.enclosing->optional.open && unit->handle->storage.param_state != PARAM_SHARDED)
        return 0;
    return refuse(unit, "its forward is called where its parameters are not gathered");
}

int optional_check_backward(const struct unit *unit) {
    if (unit->optional.enclosing->optional.reached && unit->handle->storage.param_state != PARAM_SHARDED)
        return 0;
    return refuse(unit, "a gradient comes to it where its parameters are not gathered");
}

void optional_set_owes(struct unit *part, bool owes) {
    part->optional.owes = owes;
}

/* ---- gathered with the unit around them ---- */

static int gather(struct unit *unit, enum traced part) {
    TRACE(part, unit->name_index);
    return unit_unshard(unit);
}

int optional_begin_forward(struct unit *enclosing) {
    enclosing->optional.open = enclosing->optional.first != NULL;
    for (struct unit *unit = enclosing->optional.first; unit; unit = unit->optional.next) {
        if (unit_precision_for_forward(unit) < 0 || unit_reshard_stale(unit) < 0 ||
            gather(unit, TRACED_FORWARD_GATHER) < 0)
            return -1;
        unit_note_used(unit); /* run or not */
    }
    return 0;
}

int optional_begin_backward(struct unit *enclosing) {
    enclosing->optional.open = enclosing->optional.reached = enclosing->optional.first != NULL;
    for (struct unit *unit = enclosing->optional.first; unit; unit = unit->optional.next)
        if (unit_precision_for_backward(unit) < 0 || gather(unit, TRACED_BACKWARD_GATHER) < 0)
            return -1;
    return 0;
}

/* ---- after a forward ---- */

static int reshard_parts(struct unit *unit, bool free_storage) {
    FOR_PARTS(part, unit)
        if (unit_reshard(part, free_storage) < 0 || handle_show_sharded(part->handle) < 0)
            return -1;
    return 0;
}

int optional_hold(struct unit *unit) {
    return reshard_parts(unit, false);
}

/* Whether this unit ran is not asked: a rank on which it did may need it in a backward. */
static int note_forward(struct unit *unit) {
    unit_note_precision(unit);
    FOR_PARTS(part, unit) {
        int trains = flat_param_is_trainable(&part->handle->param);
        part->optional.trains = trains > 0;
        if (trains < 0)
            return -1;
    }
    return 0;
}

int optional_end_forward(struct unit *enclosing) {
    bool expected = enclosing->needs_pre_backward_unshard;
    enclosing->optional.open = false;
    for (struct unit *unit = enclosing->optional.first; unit; unit = unit->optional.next) {
        bool keeps = flat_param_stays_unsharded(&unit->handle->param); /* of one strategy with the segments */
        if (torch_grad_enabled() && note_forward(unit) < 0)
            return -1;
        if (reshard_parts(unit, !(keeps && expected) && !unit->graph_reads) < 0)
            return -1;
    }
    return 0;
}

/* ---- after an exception ---- */

void optional_reset(struct unit *enclosing) {
    enclosing->optional.open = enclosing->optional.reached = false;
}

void optional_abandon(struct unit *enclosing) {
    enclosing->optional.open = false;
    for (struct unit *unit = enclosing->optional.first; unit; unit = unit->optional.next) {
        reshard_parts(unit, true);
        PyErr_Clear();
    }
}
