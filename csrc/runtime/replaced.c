#include "runtime/replaced.h"

#include <string.h>

#include "runtime/runtime.h"
#include "torch/ref.h"

PyObject *replaced[REPLACEABLES];

static const char *const names[REPLACEABLES] = {"unshard", "_reshard", "_post_backward_reshard"};

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

/* replaced[which](the unit's module, its handle, free or nothing) */
static int call(struct unit *unit, enum replaceable which, PyObject *free_storage) {
    PyObject *function = Py_NewRef(replaced[which]); /* it may put itself away */
    PyObject *module = Py_NewRef(PyWeakref_GetObject(unit->module_ref));
    PyObject *done = PyObject_CallFunctionObjArgs(function, module, unit->handle_object, free_storage, NULL);
    Py_DECREF(function);
    Py_DECREF(module);
    Py_XDECREF(done);
    return done ? 0 : -1;
}

int replaced_reshard(struct unit *unit, bool free_storage) {
    return call(unit, REPLACED_RESHARD, free_storage ? Py_True : Py_False);
}

int replaced_post_backward_reshard(struct unit *unit) {
    return call(unit, REPLACED_POST_BACKWARD_RESHARD, NULL);
}

static int refuse_sharded(const struct unit *unit) {
    PyErr_Format(
        PyExc_RuntimeError,
        "rank %lld, unit %S: the function in place of FlatParamHandle.unshard has not gathered the parameters: "
        "call the original in it, or _alloc_padded_unsharded_flat_param, _all_gather_flat_param and "
        "_use_unsharded_flat_param",
        (long long)unit->handle->layout.rank, unit->name);
    return -1;
}

int replaced_unshard(struct unit *unit) {
    PyObject *function = Py_NewRef(replaced[REPLACED_UNSHARD]);
    PyObject *done = PyObject_CallFunctionObjArgs(function, unit->handle_object, NULL);
    Py_DECREF(function);
    Py_XDECREF(done);
    if (done && unit->handle->param_state != PARAM_SHARDED)
        return 0;
    if (done)
        refuse_sharded(unit);
    handle_free_unshard(unit->handle);
    return -1;
}
