#include "runtime/replaced.h"

#include <string.h>

#include "runtime/runtime.h"
#include "torch/ref.h"

PyObject *replaced[REPLACEABLES];

static const char *const names[REPLACEABLES] = {
    "unshard",
    "_reshard",
    "_post_backward_reshard",
    "_get_handle_to_prefetch",
    "_register_pre_backward_hooks",
    "_register_post_backward_hook",
};

int replaced_set(const char *name, PyObject *function) {
    for (int i = 0; i < REPLACEABLES; i++) {
        if (strcmp(names[i], name) != 0)
            continue;
        ref_set(&replaced[i], function == Py_None ? NULL : Py_NewRef(function));
        return 0;
    }
    PyErr_Format(PyExc_ValueError, "%s is not called by this runtime, so that nothing can take its place", name);
    return -1;
}

static PyObject *handle_or_none(const struct unit *unit) {
    return unit->handle_object ? unit->handle_object : Py_None;
}

/* replaced[which](the unit's module, a, b, c), of which the first NULL ends the arguments. New reference or NULL. */
static PyObject *call(struct unit *unit, enum replaceable which, PyObject *a, PyObject *b, PyObject *c) {
    PyObject *function = Py_NewRef(replaced[which]); /* it may put itself away */
    PyObject *module = Py_NewRef(PyWeakref_GetObject(unit->module_ref));
    PyObject *result = PyObject_CallFunctionObjArgs(function, module, a, b, c, NULL);
    Py_DECREF(function);
    Py_DECREF(module);
    return result;
}

static int done(PyObject *result) {
    Py_XDECREF(result);
    return result ? 0 : -1;
}

int replaced_reshard(struct unit *unit, bool free_storage) {
    return done(call(unit, REPLACED_RESHARD, unit->handle_object, free_storage ? Py_True : Py_False, NULL));
}

int replaced_post_backward_reshard(struct unit *unit) {
    return done(call(unit, REPLACED_POST_BACKWARD_RESHARD, unit->handle_object, NULL, NULL));
}

int replaced_register_post_backward_hook(struct unit *unit) {
    return done(call(unit, REPLACED_REGISTER_POST_BACKWARD_HOOK, handle_or_none(unit), NULL, NULL));
}

int replaced_register_pre_backward_hooks(struct unit *unit, PyObject **outputs) {
    PyObject *module = PyWeakref_GetObject(unit->module_ref);
    PyObject *result = call(unit, REPLACED_REGISTER_PRE_BACKWARD_HOOKS, module, *outputs, handle_or_none(unit));
    if (!result)
        return -1;
    ref_set(outputs, result);
    return 0;
}

static struct unit *unit_of_handle(const struct runtime *runtime, PyObject *handle_object) {
    for (int64_t i = 0; i < runtime->num_units; i++)
        if (runtime->units[i]->handle_object == handle_object)
            return runtime->units[i];
    return NULL;
}

int replaced_get_handle_to_prefetch(struct unit *unit, struct unit **chosen) {
    PyObject *handle = call(unit, REPLACED_GET_HANDLE_TO_PREFETCH, unit->handle_object, NULL, NULL);
    *chosen = handle && handle != Py_None ? unit_of_handle(unit->runtime, handle) : NULL;
    if (handle && handle != Py_None && !*chosen)
        PyErr_Format(PyExc_TypeError,
                     "rank %lld, unit %S: the function in place of _get_handle_to_prefetch returned %R: return the "
                     "handle of a unit below the same root, or None",
                     (long long)unit->handle->param.layout.rank, unit->name, handle);
    int result = handle && (handle == Py_None || *chosen) ? 0 : -1;
    Py_XDECREF(handle);
    return result;
}

static int refuse_sharded(const struct unit *unit) {
    PyErr_Format(
        PyExc_RuntimeError,
        "rank %lld, unit %S: the function in place of FlatParamHandle.unshard has not gathered the parameters: "
        "call the original in it, or _alloc_padded_unsharded_flat_param, _all_gather_flat_param and "
        "_use_unsharded_flat_param",
        (long long)unit->handle->param.layout.rank, unit->name);
    return -1;
}

int replaced_unshard(struct unit *unit) {
    PyObject *function = Py_NewRef(replaced[REPLACED_UNSHARD]);
    int failed = done(PyObject_CallFunctionObjArgs(function, unit->handle_object, NULL));
    Py_DECREF(function);
    if (!failed && unit->handle->storage.param_state != PARAM_SHARDED)
        return 0;
    if (!failed)
        refuse_sharded(unit);
    handle_free_unshard(unit->handle);
    return -1;
}
