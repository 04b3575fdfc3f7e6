/* Table of the operations of a step: the runtime's defaults, and calls of replacements. */
#include "runtime/operations.h"

#include <string.h>

#include "runtime/runtime.h"
#include "torch/ref.h"

#include "base/check.h"

struct operations operations;

const struct operations operations_default = {
    .unshard = unit_unshard_part,
    .post_backward_reshard = unit_post_backward_reshard,
    .prefetch = unit_prefetch_in_order,
    .register_pre_backward_hooks = unit_register_pre_backward_hooks,
    .register_post_backward_hook = unit_register_post_backward_hook,
};

/* ---- calls of replacements ---- */

static PyObject *handle_or_none(const struct unit *unit) {
    return unit->handle_object ? unit->handle_object : Py_None;
}

PyObject *operations_call(struct unit *unit, enum replaceable which, PyObject *a, PyObject *b, PyObject *c) {
    OWNED *function = Py_NewRef(operations.replaced[which]); /* the function may unregister itself */
    OWNED *module = unit_module(unit);
    return PyObject_CallFunctionObjArgs(function, module ? module : Py_None, a, b, c, NULL);
}

static int call_unshard(struct unit *unit) {
    OWNED *function = Py_NewRef(operations.replaced[REPLACEABLE_UNSHARD]);
    int result = ref_done(PyObject_CallFunctionObjArgs(function, unit->handle_object, NULL));
    if (!result && unit->handle->storage.param_state == PARAM_SHARDED)
        result =
            unit_error(PyExc_RuntimeError, unit->handle->param.layout.rank, unit->name,
                       "the function in place of FlatParamHandle.unshard has not gathered the parameters. "
                       "Call the original function in it, or _alloc_padded_unsharded_flat_param, "
                       "_all_gather_flat_param and _use_unsharded_flat_param.");
    if (result < 0)
        storage_abandon_unshard(&unit->handle->storage);
    return result;
}

static int call_reshard(struct unit *unit, bool free_storage) {
    return ref_done(operations_call(unit, REPLACEABLE_RESHARD, unit->handle_object,
                                    free_storage ? Py_True : Py_False, NULL));
}

static int call_post_backward_reshard(struct unit *unit) {
    return ref_done(
        operations_call(unit, REPLACEABLE_POST_BACKWARD_RESHARD, unit->handle_object, NULL, NULL));
}

static int call_register_pre_backward_hooks(struct unit *unit, PyObject **outputs) {
    OWNED *module = unit_module(unit);
    PyObject *result = operations_call(unit, REPLACEABLE_REGISTER_PRE_BACKWARD_HOOKS,
                                       module ? module : Py_None, *outputs, handle_or_none(unit));
    if (!result)
        return -1;
    ref_set(outputs, result);
    return 0;
}

/* Detach the views, unless the replacement attaches them to a node. */
static int call_register_post_backward_hook(struct unit *unit) {
    if (node_detach_views(unit) < 0)
        return -1;
    return ref_done(
        operations_call(unit, REPLACEABLE_REGISTER_POST_BACKWARD_HOOK, handle_or_none(unit), NULL, NULL));
}

static const struct operations operations_replaced = {
    .unshard = call_unshard,
    .reshard = call_reshard,
    .post_backward_reshard = call_post_backward_reshard,
    .prefetch = unit_prefetch_chosen,
    .register_pre_backward_hooks = call_register_pre_backward_hooks,
    .register_post_backward_hook = call_register_post_backward_hook,
};

/* ---- selection ---- */

static const struct operations *table_for(const struct operations *table, enum replaceable which) {
    return table->replaced[which] ? &operations_replaced : &operations_default;
}

void operations_init(struct operations *table) {
    table->unshard = table_for(table, REPLACEABLE_UNSHARD)->unshard;
    table->reshard = table_for(table, REPLACEABLE_RESHARD)->reshard;
    table->post_backward_reshard = table_for(table, REPLACEABLE_POST_BACKWARD_RESHARD)->post_backward_reshard;
    table->prefetch = table_for(table, REPLACEABLE_GET_HANDLE_TO_PREFETCH)->prefetch;
    table->register_pre_backward_hooks =
        table_for(table, REPLACEABLE_REGISTER_PRE_BACKWARD_HOOKS)->register_pre_backward_hooks;
    table->register_post_backward_hook =
        table_for(table, REPLACEABLE_REGISTER_POST_BACKWARD_HOOK)->register_post_backward_hook;
}

int operations_replace(struct operations *table, const char *name, PyObject *function) {
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
        ref_set(&table->replaced[i], function == Py_None ? NULL : Py_NewRef(function));
        operations_init(table);
        return 0;
    }
    return RAISED(PyExc_ValueError, "%s cannot be replaced, because this runtime does not call it", name);
}

void operations_check(const struct operations *table) {
    struct operations expected = *table;
    operations_init(&expected);
    INVARIANT(!memcmp(&expected, table, sizeof expected));
}
