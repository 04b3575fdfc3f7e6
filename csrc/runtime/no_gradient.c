/* Units with trainable parameters to which a backward brings no gradient, which is told once. */
#include "runtime/no_gradient.h"

#include "runtime/callbacks.h"
#include "runtime/runtime.h"

/* [Note: units without a gradient]
 * A unit that trains has run its forward, a backward has ended, and no gradient has come to the unit. It is
 * said once, of a root:
 *
 *   cut off   No gradient can come: none of the unit's outputs requires one, as inside a reentrant checkpoint
 *             where no input requires a gradient, behind frozen embeddings for instance. Or such a checkpoint
 *             ran the unit itself, without gradients, and has not run it again. This is said at the end of
 *             the first backward that left the unit out.
 *   left out  An output requires a gradient, and the backward did not pass through it. Another backward may
 *             yet do so, as in a GAN: this is said when the root begins its next forward and none has.
 *
 * A unit to which one has come before is on purpose without one now, as a head is that takes turns with
 * others. */
static bool is_told(const struct unit *unit) {
    return unit->runtime->no_gradient.told || !unit->handle || !unit->node.views_attached ||
           unit->optional.enclosing || unit->no_gradient.had_gradient;
}

static int note_unreachable(struct unit *unit) {
    int training = unit_is_training(unit);
    if (training < 0)
        return -1;
    unit->no_gradient.unreachable = training;
    unit->runtime->no_gradient.any_unreachable = unit->runtime->no_gradient.any_unreachable || training;
    return 0;
}

int no_gradient_note_unreachable(struct unit *unit) {
    return is_told(unit) ? 0 : note_unreachable(unit);
}

/* Asked before the first backward alone: it looks at the frames on Python's stack. */
int no_gradient_note_checkpointed(struct unit *unit) {
    if (unit->runtime->order.iteration > 0 || !unit->runtime->trains || unit->is_root || is_told(unit))
        return 0;
    OWNED *answer = PyObject_CallNoArgs(callbacks.is_in_reentrant_checkpoint);
    int checkpointed = answer ? PyObject_IsTrue(answer) : -1;
    return checkpointed > 0 ? note_unreachable(unit) : checkpointed;
}

PyObject *no_gradient_take_unreachable(struct runtime *runtime) {
    PyObject *names = runtime->no_gradient.any_unreachable ? PyList_New(0) : Py_NewRef(Py_None);
    for (int64_t i = 0; names && i < runtime->num_units; i++) {
        struct unit *unit = runtime->units[i];
        unit->no_gradient.skipped = unit->needs_pre_backward_unshard && !is_told(unit);
        runtime->no_gradient.any_skipped = runtime->no_gradient.any_skipped || unit->no_gradient.skipped;
        /* a module may hand its results out by another way than its outputs, and be reached after all */
        bool was_cut_off = unit->no_gradient.unreachable && unit->handle->training_state == USE_IDLE;
        if (was_cut_off && PyList_Append(names, unit->handle->param.name) < 0)
            Py_CLEAR(names);
    }
    runtime->no_gradient.any_unreachable = false;
    return names;
}

/* Warns, once. */
static int tell(struct runtime *runtime, PyObject *function, PyObject *names) {
    PyObject *module = PyWeakref_GetObject(runtime->units[0]->module_ref);
    if (!PyList_Size(names) || !module || module == Py_None)
        return 0;
    runtime->no_gradient.told = true;
    return callbacks_tell(function, module, names);
}

int no_gradient_warn_unreachable(struct runtime *runtime, PyObject *names) {
    return tell(runtime, callbacks.warn_of_units_cut_off, names);
}

int no_gradient_warn_skipped(struct runtime *runtime) {
    if (!runtime->no_gradient.any_skipped)
        return 0;
    runtime->no_gradient.any_skipped = false;
    OWNED *names = PyList_New(0);
    for (int64_t i = 0; names && i < runtime->num_units; i++) {
        struct unit *unit = runtime->units[i];
        /* whether it trains is asked now: most are never left out */
        int trains = unit->no_gradient.skipped ? unit_is_training(unit) : 0;
        unit->no_gradient.skipped = false;
        if (trains < 0 || (trains && PyList_Append(names, unit->handle->param.name) < 0))
            Py_CLEAR(names);
    }
    return names ? tell(runtime, callbacks.warn_of_units_left_out, names) : -1;
}

void no_gradient_note_reached(struct unit *unit) {
    unit->no_gradient.had_gradient = true;
    unit->no_gradient.skipped = false;
}

void no_gradient_forget(struct unit *unit) {
    unit->no_gradient.unreachable = false;
}
