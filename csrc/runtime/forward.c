/* A unit's forward, from the root's pre-forward to its post-forward. */
#include "handle/unit_error.h"
#include "runtime/callbacks.h"
#include "runtime/operations.h"
#include "runtime/runtime.h"
#include "torch/names.h"
#include "torch/tensor.h"

/* ---- pre-forward ---- */

/* 1 when any parameter of the unit requires grad. */
static int is_trainable(struct unit *unit) {
    int trainable = 0;
    FOR_PARTS(part, unit)
        if (!trainable)
            trainable = flat_param_is_trainable(&part->handle->param);
    return trainable;
}

int unit_register_post_backward_hook(struct unit *unit) {
    if (!unit->handle)
        return 0;
    int trainable = is_trainable(unit);
    if (trainable < 0)
        return -1;
    return trainable ? unit_attach_views(unit) : unit_detach_views(unit);
}

static int show_unsharded(struct unit *unit, PyObject *args, PyObject *kwargs) {
    FOR_PARTS(part, unit) {
        struct handle *handle = part->handle;
        if (param_views_wrap_views(&handle->param_views, handle->storage.copy->views) < 0 ||
            handle_show_views(handle) < 0 || call_guards_remove(&handle->call_guards) < 0)
            return -1;
    }
    int trainable = is_trainable(unit);
    if (trainable < 0)
        return -1;
    return trainable ? 0 : unit_watch_inputs(unit, args, kwargs);
}

/* A unit that may not start a forward now is left as it is. */
static int begin_forward(struct unit *unit) {
    if (unit->handle && unit_set_training_state(unit, USE_FORWARD) < 0)
        return -1;
    if (unit_set_phase(unit, PHASE_IN_STEP) == 0)
        return 0;
    if (unit->handle)
        unit_set_training_state(unit, USE_IDLE);
    return -1;
}

/* Nothing marks the end of an iteration in evaluation. */
static int validate_order(struct unit *unit) {
    struct order *order = &unit->runtime->order;
    bool has_turn = unit->handle && !unit->optional.enclosing;
    int training = order->validation && has_turn ? unit_is_training(unit) : 0;
    return training > 0 ? order_validate(order, &unit->place) : training;
}

static int pre_forward(struct unit *unit, PyObject **args, PyObject **kwargs) {
    TRACE(TRACED_PRE_FORWARD, unit->recorder_index);
    if (unit_precision_for_forward(unit) < 0 || validate_order(unit) < 0 ||
        unit_unshard_for_forward(unit) < 0 || unit_convert_inputs(unit, args, kwargs) < 0 ||
        unit->runtime->operations->register_post_backward_hook(unit) < 0)
        return -1;
    return unit->handle ? show_unsharded(unit, *args, *kwargs) : 0;
}

static int root_pre_forward(struct unit *unit) {
    if (!unit->is_root)
        return 0;
    TRACE(TRACED_ROOT_PRE_FORWARD, unit->recorder_index);
    PyObject *module = PyWeakref_GetObject(unit->module_ref);
    if (!module || (unit->full_precision_in_eval && /* buffers follow the mode as well (D-021) */
                    callbacks_tell(callbacks.cast_buffers_for_mode, module, NULL) < 0))
        return -1;
    return runtime_root_pre_forward(unit->runtime);
}

/* ---- post-forward ---- */

/* *output are replaced only where the registration of hooks is. */
static int post_forward(struct unit *unit, PyObject **output) {
    TRACE(TRACED_POST_FORWARD, unit->recorder_index);
    unit->ran_pre_backward = unit->needs_pre_backward_unshard = false;
    if (unit->runtime->operations->register_pre_backward_hooks(unit, output) < 0 ||
        unit_reshard_after_forward(unit) < 0)
        return -1;
    return unit_set_phase(unit, PHASE_IDLE);
}

/* ---- forward ---- */

/* The module raised: nothing of this forward stays gathered, and the exception goes on. A root's failure is
 * its whole tree's: units that had finished wait for a backward that will not come. */
static void abandon_forward(struct unit *unit) {
    PyObject *type, *value, *traceback;
    PyErr_Fetch(&type, &value, &traceback);
    PyErr_NormalizeException(&type, &value, &traceback);
    /* where a layer of another unit, called past that unit, has failed on a parameter that is sharded, the
     * exception says so itself */
    PyObject *module = PyWeakref_GetObject(unit->module_ref);
    if (module && value && traceback && PyException_SetTraceback(value, traceback) == 0)
        callbacks_tell(callbacks.explain_error, value, module);
    PyErr_Clear(); /* nothing of Python's is called with an exception set */
    unit_set_phase(unit, PHASE_IDLE);
    optional_abandon(unit);
    unit_set_prefetched(unit, false);
    FOR_PARTS(part, unit->handle ? unit : NULL) {
        unit_reshard(part, !unit->optional.enclosing);
        PyErr_Clear();
        handle_show_sharded(part->handle);
        PyErr_Clear();
        handle_set_training_state(part->handle, USE_IDLE);
    }
    if (unit->is_root && !unit->runtime->callback_queued)
        runtime_reset(unit->runtime);
    PyErr_Clear();
    PyErr_Restore(type, value, traceback);
}

static int ensure_lazy_init(struct unit *unit) {
    if (unit->runtime)
        return 0;
    PyObject *module = PyWeakref_GetObject(unit->module_ref); /* borrowed: it is in its own forward */
    if (!module || callbacks_tell(callbacks.lazy_init, module, NULL) < 0)
        return -1;
    if (unit->runtime)
        return 0;
    return RAISED(PyExc_RuntimeError, "unit %S: lazy initialisation did not bind a runtime", unit->name);
}

static PyObject *run_forward(struct unit *unit, PyObject *wrapped, PyObject *args, PyObject *kwargs) {
    PyObject *output = NULL;
    runtime_enter_forward(unit->runtime);
    Py_INCREF(args);
    Py_INCREF(kwargs);
    if (root_pre_forward(unit) == 0 && pre_forward(unit, &args, &kwargs) == 0)
        output = PyObject_Call(wrapped, args, kwargs);
    if (output && post_forward(unit, &output) < 0)
        Py_CLEAR(output);
    if (!output)
        abandon_forward(unit);
    runtime_leave_forward(unit->runtime);
    Py_DECREF(args);
    Py_DECREF(kwargs);
    return output;
}

static PyObject *run_within(struct unit *unit, PyObject *wrapped, PyObject *args, PyObject *kwargs) {
    PyObject *output = NULL;
    Py_INCREF(args);
    Py_INCREF(kwargs);
    if (unit_convert_inputs(unit, &args, &kwargs) == 0)
        output = PyObject_Call(wrapped, args, kwargs);
    Py_DECREF(args);
    Py_DECREF(kwargs);
    return output;
}

/* Inside summon_full_params: the parameters are there, in full precision, and stay there. */
static PyObject *forward_on_full_params(const struct unit *unit, PyObject *wrapped, PyObject *args,
                                        PyObject *kwargs) {
    if (!torch_grad_enabled())
        return PyObject_Call(wrapped, args, kwargs);
    unit_error(PyExc_RuntimeError, unit_rank(unit), unit->name,
               "illegal transition from SUMMON_FULL_PARAMS to FORWARD: no backward could follow, as "
               "summon_full_params() frees the parameters at its end. Use torch.no_grad() around the "
               "forward, or leave summon_full_params() first.");
    return NULL;
}

PyObject *unit_forward(struct unit *unit, PyObject *wrapped, PyObject *args, PyObject *kwargs) {
    if (ensure_lazy_init(unit) < 0)
        return NULL;
    const struct handle *handle = unit->handle;
    if (unit->phase == PHASE_SUMMON_FULL_PARAMS ||
        (handle && handle->training_state == USE_SUMMON_FULL_PARAMS))
        return forward_on_full_params(unit, wrapped, args, kwargs);
    if (runtime_reset_after_failed_backward(unit->runtime) < 0)
        return NULL;
    /* a recomputation inside this unit's own backward, as activation checkpointing makes it: all is in place
     * but for its inputs (D-030) */
    bool recomputes = handle ? handle->training_state == USE_BACKWARD_PRE
                             : unit->ran_pre_backward && unit->runtime->callback_queued;
    /* the module calls its unit: the parameters are there, and the forward around it gives them back (parity
     * 53) */
    bool calls_itself = handle && handle->training_state == USE_FORWARD;
    if (recomputes || calls_itself)
        return runtime_check_forward_thread(unit->runtime) < 0 ? NULL
                                                               : run_within(unit, wrapped, args, kwargs);
    if (begin_forward(unit) < 0)
        return NULL;
    unit->recomputed = unit->runtime->callback_queued;
    TRACE(TRACED_FORWARD, unit->recorder_index);
    return run_forward(unit, wrapped, args, kwargs);
}
