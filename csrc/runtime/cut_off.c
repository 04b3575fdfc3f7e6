/* [Note: units that no gradient can reach]
 * A unit that trains computes with gradients enabled, and yet none of its outputs requires one: what is inside a reentrant
 * checkpoint is not trained where no input requires a gradient, frozen embeddings before it for instance. That is said once, at
 * the end of the first backward that did not pass through the unit. A backward of part of the outputs says nothing: outputs that
 * require a gradient may get theirs from another backward. */
#include "runtime/runtime.h"

int unit_note_cut_off(struct unit *unit) {
    struct runtime *runtime = unit->runtime;
    if (runtime->told_of_cut_off || !unit->handle || !unit->views_attached)
        return 0;
    int training = unit_is_training(unit);
    if (training < 0)
        return -1;
    unit->cut_off = training;
    runtime->any_cut_off = runtime->any_cut_off || training;
    return 0;
}

/* A module may hand its results out by another way than its outputs, and be reached after all. */
static bool was_left_out(const struct unit *unit) {
    return unit->cut_off && unit->handle->training_state == USE_IDLE;
}

PyObject *runtime_take_cut_off(struct runtime *runtime) {
    PyObject *names = PyList_New(0);
    runtime->any_cut_off = false;
    for (int64_t i = 0; names && i < runtime->num_units; i++)
        if (was_left_out(runtime->units[i]) && PyList_Append(names, runtime->units[i]->handle->name) < 0)
            Py_CLEAR(names);
    return names;
}

int runtime_tell_of_cut_off(struct runtime *runtime, PyObject *names) {
    PyObject *module = PyWeakref_GetObject(runtime->units[0]->module_ref);
    if (!PyList_Size(names) || !module || module == Py_None)
        return 0;
    runtime->told_of_cut_off = true;
    PyObject *done = PyObject_CallMethod(module, "_warn_of_units_without_gradient", "O", names);
    Py_XDECREF(done);
    return done ? 0 : -1;
}
