/* Calls of replaceable operations. */
#include "runtime/operations.h"

#include <string.h>

#include "runtime/runtime.h"
#include "torch/ref.h"

PyObject *operations_replaced[REPLACEABLES];

int operations_replace(const char *name, PyObject *function) {
    static const char *const names[REPLACEABLES] = {
        "unshard",
        "_reshard",
        "_post_backward_reshard",
        "_get_handle_to_prefetch",
        "_register_pre_backward_hooks",
        "_register_post_backward_hook",
    };
    for (int i = 0; i < REPLACEABLES; i++) {
        if (strcmp(names[i], name) != 0)
            continue;
        ref_set(&operations_replaced[i], function == Py_None ? NULL : Py_NewRef(function));
        return 0;
    }
    return RAISED(PyExc_ValueError, "%s cannot be replaced, because this runtime does not call it", name);
}

PyObject *operations_call(struct unit *unit, enum replaceable which, PyObject *a, PyObject *b, PyObject *c) {
    OWNED *function = Py_NewRef(operations_replaced[which]); /* the function may unregister itself */
    OWNED *module = unit_module(unit);
    return PyObject_CallFunctionObjArgs(function, module ? module : Py_None, a, b, c, NULL);
}

static PyObject *handle_or_none(const struct unit *unit) {
    return unit->handle_object ? unit->handle_object : Py_None;
}

int operations_unshard(struct unit *part) {
    OWNED *function = Py_XNewRef(operations_replaced[REPLACEABLE_UNSHARD]);
    if (!function)
        return unit_unshard_part(part);
    int result = ref_done(PyObject_CallFunctionObjArgs(function, part->handle_object, NULL));
    if (!result && part->handle->storage.param_state == PARAM_SHARDED)
        result =
            unit_error(PyExc_RuntimeError, part->handle->param.layout.rank, part->name,
                       "the function in place of FlatParamHandle.unshard has not gathered the parameters. "
                       "Call the original function in it, or _alloc_padded_unsharded_flat_param, "
                       "_all_gather_flat_param and _use_unsharded_flat_param.");
    return result < 0 ? storage_abandon_unshard(&part->handle->storage) : 0;
}

int operations_reshard(struct unit *part, bool free_storage) {
    if (!operations_replaced[REPLACEABLE_RESHARD])
        return 0;
    return ref_done(operations_call(part, REPLACEABLE_RESHARD, part->handle_object,
                                    free_storage ? Py_True : Py_False, NULL));
}

int operations_post_backward_reshard(struct unit *unit) {
    if (!operations_replaced[REPLACEABLE_POST_BACKWARD_RESHARD])
        return unit_post_backward_reshard(unit);
    return ref_done(
        operations_call(unit, REPLACEABLE_POST_BACKWARD_RESHARD, unit->handle_object, NULL, NULL));
}

int operations_register_pre_backward_hooks(struct unit *unit, PyObject **outputs) {
    if (!operations_replaced[REPLACEABLE_REGISTER_PRE_BACKWARD_HOOKS])
        return unit_register_pre_backward_hooks(unit, outputs);
    OWNED *module = unit_module(unit);
    PyObject *result = operations_call(unit, REPLACEABLE_REGISTER_PRE_BACKWARD_HOOKS,
                                       module ? module : Py_None, *outputs, handle_or_none(unit));
    if (!result)
        return -1;
    ref_set(outputs, result);
    return 0;
}

int operations_register_post_backward_hook(struct unit *unit) {
    if (!operations_replaced[REPLACEABLE_REGISTER_POST_BACKWARD_HOOK])
        return unit_register_post_backward_hook(unit);
    /* detach the views, unless the replacement attaches them to a node */
    if (node_detach_views(unit) < 0)
        return -1;
    return ref_done(
        operations_call(unit, REPLACEABLE_REGISTER_POST_BACKWARD_HOOK, handle_or_none(unit), NULL, NULL));
}
