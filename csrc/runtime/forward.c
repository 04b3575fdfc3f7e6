/* Forward of a unit, from the root's pre-forward to its post-forward, with its inputs and outputs. */
#include "runtime/callbacks.h"
#include "runtime/operations.h"
#include "runtime/runtime.h"
#include "torch/py_torch.h"
#include "torch/tensor.h"

/* ---- inputs ---- */

/* Return true if an input needs no conversion. Containers, tensors on another device and floating tensors of
 * another dtype are converted. `device_owner` is NULL if inputs are not moved. */
static bool input_is_ready(const struct unit *unit, PyObject *value, const struct handle *device_owner,
                           bool cast) {
    struct tensor_view view;
    if (value == Py_None || PyBool_Check(value) || PyLong_Check(value) || PyFloat_Check(value) ||
        PyUnicode_Check(value))
        return true;
    if (!torch_is_tensor(value))
        return false;
    if (tensor_view_of(value, &view) < 0) {
        PyErr_Clear();
        return false;
    }
    const struct tensor_view *device = device_owner ? &device_owner->storage.compute_view : &view;
    if (view.device != device->device || view.device_index != device->device_index)
        return false;
    if (!cast)
        return true;
    OWNED *dtype = PyObject_GetAttr(value, torch_names.dtype);
    if (!dtype)
        PyErr_Clear();
    return dtype && (dtype == unit->param_dtype || !dtype_is_known(view.dtype));
}

/* Move and cast the inputs; *args and *kwargs become new references if anything changed. A root moves inputs,
 * also if all parameters belong to inner units. Roots cast with cast_root_forward_inputs, units with
 * parameters with cast_forward_inputs, as in FSDP1. */
static int convert_inputs(struct unit *unit, PyObject **args, PyObject **kwargs) {
    TRACE(unit->is_root ? TRACED_TO_KWARGS : TRACED_NOTHING, unit->name_index);
    const struct unit_options *options = &unit->options;
    const struct handle *device_owner = unit->is_root ? unit_handle_or_first(unit) : NULL;
    bool is_full = unit->handle && storage_precision(&unit->handle->storage) == PRECISION_FULL;
    bool casts_as_root = unit->is_root && options->cast_root_forward_inputs && !unit->evaluating;
    bool cast =
        unit->param_dtype && !is_full && (casts_as_root || (unit->handle && options->cast_forward_inputs));
    bool ready = true;
    Py_ssize_t position = 0;
    PyObject *key, *value;
    if (!device_owner && !cast)
        return 0;
    for (Py_ssize_t i = 0; ready && i < PyTuple_Size(*args); i++)
        ready = input_is_ready(unit, PyTuple_GetItem(*args, i), device_owner, cast);
    while (ready && PyDict_Next(*kwargs, &position, &key, &value)) {
        Py_INCREF(value); /* user code in input_is_ready() may remove it from the dict */
        ready = input_is_ready(unit, value, device_owner, cast);
        Py_DECREF(value);
    }
    if (ready)
        return 0;
    OWNED *converted = PyObject_CallFunctionObjArgs(callbacks.convert_inputs, *args, *kwargs,
                                                    device_owner ? device_owner->param.device : Py_None,
                                                    cast ? unit->param_dtype : Py_None, NULL);
    if (!converted)
        return -1;
    PyObject *new_args, *new_kwargs;
    int parsed = PyArg_ParseTuple(converted, "OO", &new_args, &new_kwargs);
    if (parsed) {
        ref_set(args, Py_NewRef(new_args));
        ref_set(kwargs, Py_NewRef(new_kwargs));
    }
    return parsed ? 0 : -1;
}

/* ---- outputs ---- */

/* A unit's backward begins with the first gradient of its forward's outputs. */

/* `identity` is an address. Negative keys cannot collide with torch's own, which count up from 0. */
static int add_hook(PyObject *hooks, const void *identity, PyObject *hook) {
    OWNED *key = PyLong_FromLongLong(-(long long)(intptr_t)identity);
    return key ? PyObject_SetItem(hooks, key, hook) : -1;
}

static int register_hook(PyObject *tensor, const void *identity, PyObject *hook) {
    static PyObject *ordered_dict; /* owned, immortal */
    const struct unit *unit = hook_target(hook);
    /* first: torch crashes with a hook on a view whose node a write to another view has made stale */
    OWNED *grad_fn = torch_grad_fn(tensor);
    OWNED *hooks = grad_fn ? torch_backward_hooks(tensor) : NULL;
    if (!hooks)
        return -1;
    if (hooks == Py_None) { /* like Tensor.register_hook, but without its Python */
        if (!ordered_dict && !(ordered_dict = ref_find("collections", "OrderedDict")))
            return -1;
        OWNED *own = PyObject_CallNoArgs(ordered_dict);
        if (!own || add_hook(own, identity, hook) < 0 ||
            PyObject_SetAttr(tensor, torch_names._backward_hooks, own) < 0)
            return -1;
        if (grad_fn == Py_None)
            return 0;
        return ref_done(PyObject_CallMethodObjArgs(grad_fn, torch_names._register_hook_dict, tensor, NULL));
    }
    if (!unit || !unit->optional.first)
        return add_hook(hooks, identity, hook);
    /* a tensor of an optional unit inside: the enclosing unit must unshard first, and hooks run in the order
     * of insertion */
    OWNED *others = PyDict_Copy(hooks);
    if (!others || ref_done(PyObject_CallMethod(hooks, "clear", NULL)) < 0 ||
        add_hook(hooks, identity, hook) < 0)
        return -1;
    return ref_done(PyObject_CallMethod(hooks, "update", "O", others));
}

/* A write in place to a view, such as the output of nn.Linear for inputs of three dimensions, gives the view a
 * new node and leaves the hooked one out of the graph. The node of the base stays in it. */
static int hook_base(PyObject *tensor, struct unit *unit) {
    OWNED *base = torch_base(tensor);
    OWNED *grad_fn = base && base != Py_None ? torch_grad_fn(base) : NULL;
    if (!base || base == Py_None || !grad_fn || grad_fn == Py_None)
        return base == Py_None || grad_fn ? 0 : -1;
    OWNED *hook = hook_new(unit_pre_backward_of_base, unit, unit->object);
    return hook ? register_hook(base, unit, hook) : -1;
}

static int hook_tensor(PyObject *tensor, PyObject *hook, int64_t *hooked) {
    int requires_grad = torch_requires_grad(tensor);
    if (requires_grad <= 0)
        return requires_grad;
    (*hooked)++;
    struct unit *unit = hook_target(hook);
    return register_hook(tensor, hook, hook) < 0 || (unit && hook_base(tensor, unit) < 0) ? -1 : 0;
}

static int hook_outputs(PyObject *output, PyObject *hook, int64_t *hooked);

static int hook_sequence(PyObject *sequence, PyObject *hook, int64_t *hooked) {
    for (Py_ssize_t i = 0, n = PySequence_Size(sequence); i < n; i++) {
        OWNED *item = PySequence_GetItem(sequence, i);
        if (!item || hook_outputs(item, hook, hooked) < 0)
            return -1;
    }
    return 0;
}

/* Hook every tensor in `output` that requires a gradient. The output itself is not changed. */
static int hook_outputs(PyObject *output, PyObject *hook, int64_t *hooked) {
    if (torch_is_tensor(output))
        return hook_tensor(output, hook, hooked);
    if (output == Py_None || PyBool_Check(output) || PyLong_Check(output) || PyFloat_Check(output) ||
        PyUnicode_Check(output))
        return 0;
    if (PyTuple_Check(output) || PyList_Check(output))
        return hook_sequence(output, hook, hooked);
    /* user code may change the dict */
    OWNED *tensors = PyDict_CheckExact(output)
                         ? PyDict_Values(output)
                         : PyObject_CallFunctionObjArgs(callbacks.tensors_of, output, NULL);
    return tensors ? hook_sequence(tensors, hook, hooked) : -1;
}

/* Called when the outputs of the last forward are freed and no backward ran through them. */
static int graph_dropped(void *target, const void *hook) {
    struct unit *unit = target;
    if (unit->backward_hook != hook || !unit->runtime || unit->runtime->callback_queued)
        return 0;
    FOR_EACH_FLAT_PARAM(part, unit)
        if (unit_exposes_views(part) && handle_unexpose_views(part->handle) < 0)
            return -1;
    return 0;
}

int unit_register_pre_backward_hooks(struct unit *unit, PyObject **output) {
    int64_t hooked = 0;
    unit->ran_pre_backward = unit->needs_pre_backward_unshard = false;
    if (!torch_grad_enabled())
        return 0;
    if (unit->handle && unit->runtime && unit->node.views_attached && !unit->had_gradient &&
        !unit->runtime->warned_no_gradient && !unit->optional.enclosing) {
        int training = unit_is_training(unit);
        unit->expects_gradient = training > 0;
        if (training < 0)
            return -1;
    }
    PyObject *hook = hook_new(unit_pre_backward, unit, unit->object);
    int result = hook ? hook_outputs(*output, hook, &hooked) : -1;
    unit->backward_hook = hook;
    if (hooked && unit->handle && handle_keeps_views_exposed(unit->handle))
        hook_set_on_drop(hook, graph_dropped);
    Py_XDECREF(hook);
    if (!result && !hooked)
        return 0;
    unit->needs_pre_backward_unshard = hooked && unit->handle;
    if (unit->needs_pre_backward_unshard)
        unit_record_precision(unit);
    return result;
}

/* ---- pre-forward ---- */

int unit_unshard_for_forward(struct unit *unit) {
    struct runtime *runtime = unit->runtime;
    if (!unit->handle)
        return optional_begin_forward(unit);
    if (!unit->optional.enclosing)
        order_record_pre_forward(&runtime->order, &unit->place);
    else if (optional_check(unit, false) < 0)
        return -1;
    if (runtime_begin_step_alone(runtime) < 0 || unit_reshard_stale(unit) < 0 ||
        unit_unshard_and_wait(unit) < 0)
        return -1;
    unit->unsharded.for_forward = runtime->num_forwards;
    if (optional_begin_forward(unit) < 0)
        return -1;
    unit_set_prefetched(unit, false);
    return unit_prefetch_next(unit, USE_FORWARD);
}

/* Return 1 if some parameter requires a gradient, 0 if none does, -1 with an exception. */
static int is_trainable(struct unit *unit) {
    int trainable = 0;
    FOR_EACH_FLAT_PARAM(part, unit)
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
    return trainable ? node_attach_views(unit) : node_detach_views(unit);
}

static int pre_forward(struct unit *unit, PyObject **args, PyObject **kwargs) {
    TRACE(TRACED_PRE_FORWARD, unit->name_index);
    struct order *order = &unit->runtime->order;
    if (unit_precision_for_forward(unit) < 0)
        return -1;
    if (order->validate && unit->handle && !unit->optional.enclosing) {
        /* no end-of-backward callback ends an iteration in eval mode */
        int training = unit_is_training(unit);
        if (training < 0 ||
            (training && ref_done(PyObject_CallFunction(order->validate, "LL", (long long)unit->place.unit,
                                                        (long long)order->iteration)) < 0))
            return -1;
    }
    if (unit_unshard_for_forward(unit) < 0 || convert_inputs(unit, args, kwargs) < 0 ||
        operations_register_post_backward_hook(unit) < 0)
        return -1;
    if (!unit->handle)
        return 0;
    FOR_EACH_FLAT_PARAM(part, unit) {
        struct handle *handle = part->handle;
        if (param_views_wrap_views(&handle->param_views, handle->storage.copy->views) < 0 ||
            handle_expose_views(handle) < 0)
            return -1;
    }
    int trainable = is_trainable(unit);
    if (trainable < 0)
        return -1;
    if ((trainable && !unit->nesting.can_nest) || unit->remove_input_hooks || !torch_grad_enabled())
        return 0;
    /* A frozen unit has no post-backward, and a unit whose trained parts are all checkpointed has one for each
     * part: they end with the gradients of their inputs. */
    OWNED *hook = hook_new(trainable ? unit_post_backward_of_parts : unit_reshard_only, unit, unit->object);
    OWNED *remove = hook ? PyObject_CallFunctionObjArgs(callbacks.hook_inputs, *args, *kwargs, hook,
                                                        trainable ? Py_False : Py_True, NULL)
                         : NULL;
    if (remove && remove != Py_None)
        unit->remove_input_hooks = Py_NewRef(remove);
    return remove ? 0 : -1;
}

/* ---- post-forward ---- */

/* *output is replaced only by a replacement of _register_pre_backward_hooks. */
static int post_forward(struct unit *unit, PyObject **output) {
    TRACE(TRACED_POST_FORWARD, unit->name_index);
    unit->ran_pre_backward = unit->needs_pre_backward_unshard = false;
    if (operations_register_pre_backward_hooks(unit, output) < 0 || unit_reshard_after_forward(unit) < 0)
        return -1;
    return unit_set_phase(unit, PHASE_IDLE);
}

/* ---- forward ---- */

PyObject *unit_forward(struct unit *unit, PyObject *wrapped, PyObject *args, PyObject *kwargs) {
    if (!unit->runtime) {
        OWNED *module = unit_module(unit);
        if (module && callbacks_call(callbacks.lazy_init, module, NULL) < 0)
            return NULL;
        if (!unit->runtime)
            return PyErr_Format(PyExc_RuntimeError, "unit %S: lazy initialisation did not bind a runtime",
                                unit->name);
    }
    struct runtime *runtime = unit->runtime;
    const struct handle *handle = unit->handle;
    if (unit->phase == PHASE_SUMMON_FULL_PARAMS ||
        (handle && handle->training_state == USE_SUMMON_FULL_PARAMS)) {
        /* full parameters in full precision are exposed, and remain so */
        if (!torch_grad_enabled())
            return PyObject_Call(wrapped, args, kwargs);
        unit_error(PyExc_RuntimeError, unit_rank(unit), unit->name,
                   "illegal transition from SUMMON_FULL_PARAMS to FORWARD: summon_full_params() frees the "
                   "parameters at its end, before a backward could run. Use torch.no_grad() around the "
                   "forward, or leave summon_full_params() first.");
        return NULL;
    }
    if (runtime_reset_after_failed_backward(runtime) < 0)
        return NULL;
    /* activation checkpointing recomputes the forward inside the unit's backward: only the inputs need
     * conversion */
    bool recomputes = handle ? handle->training_state == USE_BACKWARD_PRE
                             : unit->ran_pre_backward && runtime->callback_queued;
    /* the module calls its own unit: the outer forward reshards (FSDP1 frees the parameters too early) */
    bool calls_itself = handle && handle->training_state == USE_FORWARD;
    PyObject *output = NULL;
    if (recomputes || calls_itself) {
        if (runtime_check_forward_thread(runtime) < 0)
            return NULL;
        Py_INCREF(args);
        Py_INCREF(kwargs);
        if (convert_inputs(unit, &args, &kwargs) == 0)
            output = PyObject_Call(wrapped, args, kwargs);
    } else {
        /* leave the unit's state unchanged on error */
        if (handle && unit_set_training_state(unit, USE_FORWARD) < 0)
            return NULL;
        if (unit_set_phase(unit, PHASE_IN_STEP) < 0) {
            if (handle)
                unit_set_training_state(unit, USE_IDLE);
            return NULL;
        }
        unit->nesting.recomputed = runtime->callback_queued;
        TRACE(TRACED_FORWARD, unit->name_index);
        runtime_enter_forward(runtime);
        Py_INCREF(args);
        Py_INCREF(kwargs);
        if ((!unit->is_root || runtime_pre_forward(runtime) == 0) && pre_forward(unit, &args, &kwargs) == 0)
            output = PyObject_Call(wrapped, args, kwargs);
        if (output && post_forward(unit, &output) < 0)
            Py_CLEAR(output);
        if (!output)
            unit_abandon_forward(unit);
        runtime_leave_forward(unit->runtime);
    }
    Py_DECREF(args);
    Py_DECREF(kwargs);
    return output;
}
