/* Lifecycle of a unit, its phase, and its binding to a root. */
#include "runtime/unit.h"

#include <stdarg.h>

#include "runtime/callbacks.h"
#include "runtime/runtime.h"
#include "torch/py_torch.h"

/* ---- errors ---- */

const struct handle *unit_handle_or_first(const struct unit *unit) {
    if (unit->handle)
        return unit->handle;
    for (int64_t i = 0; unit->runtime && i < unit->runtime->num_units; i++)
        if (unit->runtime->units[i]->handle)
            return unit->runtime->units[i]->handle;
    return NULL;
}

long long unit_rank(const struct unit *unit) {
    const struct handle *handle = unit_handle_or_first(unit);
    return handle ? (long long)handle->param.layout.rank : -1;
}

int unit_error(PyObject *type, int64_t rank, PyObject *unit, const char *format, ...) {
    va_list arguments;
    va_start(arguments, format);
    OWNED *text = PyUnicode_FromFormatV(format, arguments);
    va_end(arguments);
    return text ? RAISED(type, "rank %lld, unit %S: %U", (long long)rank, unit, text) : -1;
}

/* During the enqueue only errors of the backend are errors of the collective. */
int unit_explain_failure(struct unit *unit, enum traced part, bool enqueued) {
    TRACE(part, unit->name_index);
    PyObject *error = PyErr_GetRaisedException();
    if (ref_done(PyObject_CallFunction(
            callbacks.explain_failed_collective, "OiLOi", error, (int)traced_parts[part].phase,
            (long long)unit->runtime->order.iteration, unit->handle_object, (int)enqueued)) < 0)
        PyErr_Clear();
    PyErr_SetRaisedException(error);
    return -1;
}

/* ---- phase ---- */

static const bool phase_allowed[UNIT_PHASES][UNIT_PHASES] = {
    [PHASE_IDLE] = {[PHASE_IDLE] = true, [PHASE_IN_STEP] = true, [PHASE_SUMMON_FULL_PARAMS] = true},
    /* a forward after an earlier unit's backward, or the unit's own backward */
    [PHASE_IN_STEP] = {[PHASE_IN_STEP] = true, [PHASE_IDLE] = true},
    [PHASE_SUMMON_FULL_PARAMS] = {[PHASE_IDLE] = true},
};

static const char *const phase_names[UNIT_PHASES] = {"IDLE", "IN_STEP", "SUMMON_FULL_PARAMS"};

int unit_set_phase(struct unit *unit, enum unit_phase phase) {
    if (!phase_allowed[unit->phase][phase])
        return unit_error(PyExc_RuntimeError, unit_rank(unit), unit->name, "illegal transition from %s to %s",
                          phase_names[unit->phase], phase_names[phase]);
    unit->phase = phase;
    return 0;
}

int unit_set_training_state(struct unit *unit, enum training_state state) {
    FOR_EACH_FLAT_PARAM(part, unit)
        if (handle_set_training_state(part->handle, state) < 0)
            return -1;
    return 0;
}

PyObject *unit_module(const struct unit *unit) {
    PyObject *module;
    PyWeakref_GetRef(unit->module_ref, &module);
    return module;
}

int unit_is_training(const struct unit *unit) {
    OWNED *module = unit_module(unit);
    if (!module)
        return unit_error(PyExc_RuntimeError, unit_rank(unit), unit->name,
                          "the module was deleted: keep the model while it is used");
    OWNED *wrapped = PyObject_GetAttrString(module, "_fsdp_wrapped_module");
    OWNED *training = wrapped ? PyObject_GetAttr(wrapped, torch_names.training) : NULL;
    return training ? PyObject_IsTrue(training) : -1;
}

/* ---- init and fini ---- */

/* Detach the views when the module is freed. The garbage collector may run during a compilation, whose
 * dispatch modes would intercept the creation of views: hence the guard. */
static int on_module_end(void *target) {
    struct unit *unit = target;
    OWNED *guard = PyObject_CallNoArgs(torch_names.no_dispatch_guard);
    if (!guard)
        PyErr_Clear(); /* without memory for it, detach all the same */
    if (!unit->is_root || !unit->runtime)
        return node_detach_views(unit);
    for (int64_t i = 0; i < unit->runtime->num_units; i++)
        if (node_detach_views(unit->runtime->units[i]) < 0)
            PyErr_WriteUnraisable(unit->runtime->units[i]->name);
    return 0;
}

int unit_init(struct unit *unit, PyObject *object, const struct unit_spec *spec) {
    unit->object = object;
    unit->handle_object = Py_XNewRef(spec->handle_object);
    unit->handle = spec->handle;
    unit->name = Py_NewRef(spec->name);
    unit->options = spec->config.options;
    unit->param_dtype = spec->config.param_dtype == Py_None ? NULL : Py_NewRef(spec->config.param_dtype);
    unit->segments = Py_NewRef(spec->segments);
    unit->sync_gradients = unit->nesting.can_nest = true;
    unit->name_index = -1;
    unit->place = (struct order_place){.unit = 0, .pre_forward = -1, .post_forward = -1};
    /* views -> node -> context -> unit -> views is a cycle through C++ objects, invisible to the garbage
     * collector. module_end breaks it when the module is freed, for the whole tree if that is the root. */
    unit->module_end = hook_new(on_module_end, unit, NULL);
    if (unit->module_end)
        unit->module_ref = PyWeakref_NewRef(spec->module, unit->module_end);
    return unit->module_ref ? 0 : -1;
}

void unit_add_segment(struct unit *unit, struct unit *segment) {
    struct unit *last = unit;
    while (last->next_segment)
        last = last->next_segment;
    last->next_segment = segment;
    segment->leader = unit;
}

void unit_set_sync_gradients(struct unit *unit, bool sync) {
    unit->sync_gradients = sync;
}

int unit_clear(struct unit *unit) {
    while (!unit->leader && unit->next_segment) {
        struct unit *segment = unit->next_segment;
        unit->next_segment = segment->next_segment;
        segment->leader = segment->next_segment = NULL;
    }
    Py_CLEAR(unit->segments);
    node_drop_anchor(unit);
    Py_CLEAR(unit->remove_input_hooks);
    if (unit->module_end)
        hook_disarm(unit->module_end);
    Py_CLEAR(unit->module_end);
    Py_CLEAR(unit->module_ref);
    /* The handle may outlive the root, which would no longer find it. */
    if (unit->handle && unit->runtime)
        storage_leave_root(&unit->handle->storage);
    Py_CLEAR(unit->runtime_object);
    unit->runtime = NULL;
    unit->handle = NULL;
    Py_CLEAR(unit->handle_object);
    Py_CLEAR(unit->name);
    Py_CLEAR(unit->param_dtype);
    return 0;
}

int unit_visit(struct unit *unit, visitproc visit, void *arg) {
    Py_VISIT(unit->handle_object);
    Py_VISIT(unit->segments);
    Py_VISIT(unit->runtime_object);
    return 0;
}

/* ---- end of a step ---- */

int unit_remove_input_hooks(struct unit *unit) {
    OWNED *remove = unit->remove_input_hooks;
    unit->remove_input_hooks = NULL;
    return remove ? ref_done(PyObject_CallNoArgs(remove)) : 0;
}

int unit_end_step(struct unit *unit) {
    unit->ran_pre_backward = unit->needs_pre_backward_unshard = unit->inputs_only = false;
    unit->nesting.awaits_input_grads = false;
    unit->unsharded.prefetched = false;
    unit->place.post_forward = -1;
    return unit_set_phase(unit, PHASE_IDLE);
}
