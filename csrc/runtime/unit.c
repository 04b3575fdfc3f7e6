/* A unit's life and its forward. */
#include "runtime/hook.h"
#include "runtime/replaced.h"
#include "runtime/runtime.h"
#include "torch/names.h"
#include "torch/profile.h"
#include "torch/tensor.h"

#include <string.h>

/* ---- life ---- */

static PyObject *on_module_end(PyObject *self, PyObject *reference) {
    struct unit *unit = PyCapsule_GetPointer(self, NULL);
    (void)reference;
    if (!unit)
        return NULL;
    if (unit->is_root && unit->runtime)
        runtime_detach_views(unit->runtime);
    else if (unit_detach_views(unit) < 0)
        return NULL;
    Py_RETURN_NONE;
}

static PyMethodDef module_end_def = {"on_module_end", on_module_end, METH_O, NULL};

/* views -> their node -> its context -> the unit -> views is a cycle that passes through C++, where the collector does not look:
 * it is cut when the module goes, for the whole tree when that is the root. The weak reference dies with the unit, so the capsule's pointer is good while it can be called. */
static PyObject *watch_module(struct unit *unit, PyObject *module) {
    PyObject *capsule = PyCapsule_New(unit, NULL, NULL), *callback = NULL, *reference = NULL;
    if (capsule)
        callback = PyCFunction_New(&module_end_def, capsule);
    if (callback)
        reference = PyWeakref_NewRef(module, callback);
    Py_XDECREF(capsule);
    Py_XDECREF(callback);
    return reference;
}

int unit_init(struct unit *unit, PyObject *object, const struct unit_spec *spec) {
    unit->object = object;
    unit->module_ref = watch_module(unit, spec->module);
    unit->handle_object = Py_XNewRef(spec->handle_object);
    unit->handle = spec->handle;
    unit->name = Py_NewRef(spec->name);
    unit->param_dtype = spec->param_dtype == Py_None ? NULL : Py_NewRef(spec->param_dtype);
    unit->cast_forward_inputs = spec->cast_forward_inputs;
    unit->cast_root_forward_inputs = spec->cast_root_forward_inputs;
    unit->backward_prefetch = (enum backward_prefetch)spec->backward_prefetch;
    unit->forward_prefetch = spec->forward_prefetch;
    unit->limit_all_gathers = spec->limit_all_gathers;
    unit->full_precision_in_eval = spec->full_precision_in_eval;
    unit->sync_gradients = true;
    unit->ledger_index = -1;
    unit->pre_forward_index = unit->post_forward_index = -1;
    return unit->module_ref ? 0 : -1;
}

int unit_clear(struct unit *unit) {
    if (unit->anchor_hook)
        hook_disarm(unit->anchor_hook);
    Py_CLEAR(unit->anchor_hook);
    Py_CLEAR(unit->anchor_node);
    Py_CLEAR(unit->anchor);
    Py_CLEAR(unit->hooks_seen);
    Py_CLEAR(unit->reshard_hook);
    Py_CLEAR(unit->module_ref);
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
    Py_VISIT(unit->runtime_object);
    return 0;
}

/* ---- state ---- */

/* The unit's own, else that of the first unit with parameters; NULL where there is none. */
static const struct handle *handle_or_first(const struct unit *unit) {
    if (unit->handle)
        return unit->handle;
    for (int64_t i = 0; unit->runtime && i < unit->runtime->num_units; i++)
        if (unit->runtime->units[i]->handle)
            return unit->runtime->units[i]->handle;
    return NULL;
}

/* For messages; -1 where there are no parameters. */
static long long unit_rank(const struct unit *unit) {
    const struct handle *handle = handle_or_first(unit);
    return handle ? (long long)handle->param.layout.rank : -1;
}

int unit_set_training_state(struct unit *unit, enum training_state state) {
    static const bool allowed[USE_STATES][USE_STATES] = {
        [USE_IDLE] = {[USE_IDLE] = true, [USE_FORWARD] = true, [USE_SUMMON_FULL_PARAMS] = true},
        [USE_FORWARD] = {[USE_FORWARD] = true, [USE_IDLE] = true},
        [USE_SUMMON_FULL_PARAMS] = {[USE_IDLE] = true},
    };
    if (!allowed[unit->training_state][state]) {
        PyErr_Format(PyExc_RuntimeError, "rank %lld, unit %S: illegal transition from %s to %s", unit_rank(unit),
                     unit->name, training_state_name(unit->training_state), training_state_name(state));
        return -1;
    }
    unit->training_state = state;
    return 0;
}

/* ---- inputs ---- */

/* A cold path: containers and casts are walked by fsdp_c.tree. */
static PyObject *call_tree(const char *name, PyObject *a, PyObject *b, PyObject *c, PyObject *d) {
    static PyObject *tree; /* owned for ever */
    if (!tree && !(tree = PyImport_ImportModule("fsdp_c.tree")))
        return NULL;
    PyObject *function = PyObject_GetAttrString(tree, name);
    PyObject *result = function ? PyObject_CallFunctionObjArgs(function, a, b, c, d, NULL) : NULL;
    Py_XDECREF(function);
    return result;
}

static bool is_on(const struct tensor_view *view, const struct tensor_view *device) {
    return view->device == device->device && view->device_index == device->device_index;
}

/* Must this input be walked? Only containers, tensors of other devices, and floating tensors of another dtype must. `mover` is
 * NULL where inputs stay where they are. */
static bool input_is_ready(const struct unit *unit, PyObject *value, const struct handle *mover, bool cast) {
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
    if (mover && !is_on(&view, &mover->storage.compute_view))
        return false;
    if (!cast)
        return true;
    PyObject *dtype = PyObject_GetAttr(value, torch_names.dtype);
    if (!dtype) {
        PyErr_Clear();
        return false;
    }
    bool ready = dtype == unit->param_dtype || view.dtype == DTYPE_OTHER;
    Py_DECREF(dtype);
    return ready;
}

static bool inputs_are_ready(const struct unit *unit, PyObject *args, PyObject *kwargs, const struct handle *mover,
                             bool cast) {
    Py_ssize_t position = 0;
    PyObject *key, *value;
    for (Py_ssize_t i = 0; i < PyTuple_Size(args); i++)
        if (!input_is_ready(unit, PyTuple_GetItem(args, i), mover, cast))
            return false;
    while (PyDict_Next(kwargs, &position, &key, &value))
        if (!input_is_ready(unit, value, mover, cast))
            return false;
    return true;
}

/* A root casts as a root, and any unit with parameters as a unit (D-023, D-031). */
static bool casts_inputs(const struct unit *unit) {
    const struct handle *handle = unit->handle;
    if (!unit->param_dtype || (handle && storage_precision(&handle->storage) == PRECISION_FULL))
        return false;
    if (unit->is_root && unit->cast_root_forward_inputs && !unit->evaluating)
        return true;
    return handle && unit->cast_forward_inputs;
}

/* Move and cast the inputs; *args and *kwargs are replaced by new references where anything changed. A root moves them, also
 * one whose parameters all belong to inner units. */
static int convert_inputs(struct unit *unit, PyObject **args, PyObject **kwargs) {
    const struct handle *mover = unit->is_root ? handle_or_first(unit) : NULL;
    bool cast = casts_inputs(unit);
    if ((!mover && !cast) || inputs_are_ready(unit, *args, *kwargs, mover, cast))
        return 0;
    PyObject *converted = call_tree("convert_inputs", *args, *kwargs, mover ? mover->param.device : Py_None,
                                    cast ? unit->param_dtype : Py_None);
    if (!converted)
        return -1;
    PyObject *new_args, *new_kwargs;
    int parsed = PyArg_ParseTuple(converted, "OO", &new_args, &new_kwargs);
    if (parsed) {
        ref_set(args, Py_NewRef(new_args));
        ref_set(kwargs, Py_NewRef(new_kwargs));
    }
    Py_DECREF(converted);
    return parsed ? 0 : -1;
}

static int profiled_convert_inputs(struct unit *unit, PyObject **args, PyObject **kwargs) {
    PyObject *range = unit->is_root ? profile_begin_inner("FullyShardedDataParallel._to_kwargs") : NULL;
    int result = convert_inputs(unit, args, kwargs);
    profile_end(range);
    return result;
}

/* ---- pre-forward ---- */

/* Is this forward a recomputation inside this unit's own backward (activation checkpointing)? Then all is in place (D-030). */
static bool recomputing(const struct unit *unit) {
    if (unit->handle)
        return unit->handle->training_state == USE_BACKWARD_PRE;
    return unit->ran_pre_backward && unit->runtime->callback_queued;
}

/* 1 when any parameter of the unit requires grad. */
static int is_trainable(const struct handle *handle) {
    if (!handle->param.use_orig_params)
        return torch_requires_grad(handle->param.tensor);
    for (int64_t i = 0; i < handle->param.num_params; i++) {
        int requires_grad = torch_requires_grad(PyList_GetItem(handle->param.params, i));
        if (requires_grad)
            return requires_grad;
    }
    return 0;
}

static int reshard_only(void *target) {
    return unit_reshard_only(target);
}

/* A frozen unit has no post-backward: it is resharded once its inputs have their gradients (D-037). */
static int watch_inputs(struct unit *unit, PyObject *args, PyObject *kwargs) {
    if (unit->reshard_hook || !torch_grad_enabled())
        return 0;
    PyObject *hook = hook_new(reshard_only, unit, unit->object);
    PyObject *removable = hook ? call_tree("hook_inputs", args, kwargs, hook, NULL) : NULL;
    Py_XDECREF(hook);
    if (!removable)
        return -1;
    if (removable == Py_None) {
        Py_DECREF(removable);
        return 0;
    }
    unit->reshard_hook = removable;
    return 0;
}

int unit_register_post_backward_hook(struct unit *unit) {
    int trainable = is_trainable(unit->handle);
    if (trainable < 0)
        return -1;
    return trainable ? unit_attach_views(unit) : unit_detach_views(unit);
}

static int register_post_backward_hook(struct unit *unit) {
    if (!replaced[REPLACED_REGISTER_POST_BACKWARD_HOOK])
        return unit->handle ? unit_register_post_backward_hook(unit) : 0;
    if (unit->handle && unit_detach_views(unit) < 0)
        return -1;
    return replaced_register_post_backward_hook(unit);
}

static int show_unsharded(struct unit *unit, PyObject *args, PyObject *kwargs) {
    struct handle *handle = unit->handle;
    int trainable = is_trainable(handle);
    if (trainable < 0)
        return -1;
    if (handle_wrap_views(handle) < 0 || handle_show_views(handle) < 0)
        return -1;
    return trainable ? 0 : watch_inputs(unit, args, kwargs);
}

/* A unit that may not start a forward now is left as it is. */
static int begin_forward(struct unit *unit) {
    if (unit->handle && handle_set_training_state(unit->handle, USE_FORWARD) < 0)
        return -1;
    if (unit_set_training_state(unit, USE_FORWARD) == 0)
        return 0;
    if (unit->handle)
        handle_set_training_state(unit->handle, USE_IDLE);
    return -1;
}

static int unshard_for_forward(struct unit *unit) {
    if (order_record_pre_forward(unit) < 0 || begin_step_alone(unit) < 0)
        return -1;
    uint64_t place = ledger_enter(unit->ledger_index, LEDGER_FORWARD_GATHER);
    if (schedule_unshard(unit) < 0 || schedule_wait_unsharded(unit) < 0)
        return -1;
    ledger_leave(place);
    unit->prefetched = false;
    return order_prefetch_forward(unit);
}

static int pre_forward(struct unit *unit, PyObject **args, PyObject **kwargs) {
    if (precision_for_forward(unit) < 0)
        return -1;
    if (unit->handle && unshard_for_forward(unit) < 0)
        return -1;
    if (profiled_convert_inputs(unit, args, kwargs) < 0 || register_post_backward_hook(unit) < 0)
        return -1;
    return unit->handle ? show_unsharded(unit, *args, *kwargs) : 0;
}

/* Buffers follow the mode as well (D-021). */
static int cast_buffers(struct unit *unit) {
    PyObject *module = PyWeakref_GetObject(unit->module_ref);
    PyObject *done = module ? PyObject_CallMethod(module, "_cast_buffers_for_mode", NULL) : NULL;
    Py_XDECREF(done);
    return done ? 0 : -1;
}

static int root_pre_forward(struct unit *unit) {
    if (!unit->is_root)
        return 0;
    PyObject *range = profile_begin_inner("FullyShardedDataParallel._root_pre_forward");
    int result = unit->full_precision_in_eval ? cast_buffers(unit) : 0;
    if (!result)
        result = runtime_root_pre_forward(unit->runtime);
    profile_end(range);
    return result;
}

/* ---- post-forward ---- */

static int pre_backward(void *target) {
    return unit_pre_backward(target);
}

/* Hook ids of torch count up from 0. */
static int add_hook(PyObject *hooks, PyObject *hook) {
    PyObject *key = PyLong_FromLongLong(-(long long)(intptr_t)hook);
    int result = key ? PyObject_SetItem(hooks, key, hook) : -1;
    Py_XDECREF(key);
    return result;
}

/* Register on a tensor without hooks: what Tensor.register_hook does, without its Python. */
static int hook_first(PyObject *tensor, PyObject *hook) {
    static PyObject *ordered_dict; /* owned for ever */
    if (!ordered_dict) {
        PyObject *collections = PyImport_ImportModule("collections");
        ordered_dict = collections ? PyObject_GetAttrString(collections, "OrderedDict") : NULL;
        Py_XDECREF(collections);
        if (!ordered_dict)
            return -1;
    }
    PyObject *hooks = PyObject_CallNoArgs(ordered_dict), *grad_fn = NULL, *done = NULL;
    int result = hooks ? add_hook(hooks, hook) : -1;
    if (!result)
        result = PyObject_SetAttr(tensor, torch_names._backward_hooks, hooks);
    if (!result)
        result = (grad_fn = PyObject_GetAttr(tensor, torch_names.grad_fn)) ? 0 : -1;
    if (!result && grad_fn != Py_None) {
        done = PyObject_CallMethodObjArgs(grad_fn, torch_names._register_hook_dict, tensor, NULL);
        result = done ? 0 : -1;
    }
    Py_XDECREF(hooks);
    Py_XDECREF(grad_fn);
    Py_XDECREF(done);
    return result;
}

static int hook_tensor(PyObject *tensor, PyObject *hook, int64_t *hooked) {
    int requires_grad = torch_requires_grad(tensor);
    if (requires_grad <= 0)
        return requires_grad;
    PyObject *hooks = PyObject_GetAttr(tensor, torch_names._backward_hooks);
    int result = !hooks ? -1 : hooks == Py_None ? hook_first(tensor, hook) : add_hook(hooks, hook);
    (*hooked)++;
    Py_XDECREF(hooks);
    return result;
}

static int hook_outputs(PyObject *output, PyObject *hook, int64_t *hooked);

static int hook_sequence(PyObject *sequence, PyObject *hook, int64_t *hooked) {
    for (Py_ssize_t i = 0, n = PySequence_Size(sequence); i < n; i++) {
        PyObject *item = PySequence_GetItem(sequence, i);
        int result = item ? hook_outputs(item, hook, hooked) : -1;
        Py_XDECREF(item);
        if (result < 0)
            return -1;
    }
    return 0;
}

static int hook_dict(PyObject *dict, PyObject *hook, int64_t *hooked) {
    Py_ssize_t position = 0;
    PyObject *key, *value;
    while (PyDict_Next(dict, &position, &key, &value))
        if (hook_outputs(value, hook, hooked) < 0)
            return -1;
    return 0;
}

/* Hook every tensor in `output` that requires grad; the output itself is returned to the user as it is. */
static int hook_outputs(PyObject *output, PyObject *hook, int64_t *hooked) {
    if (torch_is_tensor(output))
        return hook_tensor(output, hook, hooked);
    if (output == Py_None || PyBool_Check(output) || PyLong_Check(output) || PyFloat_Check(output) ||
        PyUnicode_Check(output))
        return 0;
    if (PyTuple_Check(output) || PyList_Check(output))
        return hook_sequence(output, hook, hooked);
    if (PyDict_CheckExact(output))
        return hook_dict(output, hook, hooked);
    PyObject *tensors = call_tree("tensors_of", output, NULL, NULL, NULL);
    int result = tensors ? hook_sequence(tensors, hook, hooked) : -1;
    Py_XDECREF(tensors);
    return result;
}

/* Where a tensor is hooked, a backward can follow: the unit's parameters will be needed again. */
int unit_register_pre_backward_hooks(struct unit *unit, PyObject *output) {
    int64_t hooked = 0;
    unit->ran_pre_backward = unit->needs_pre_backward_unshard = unit->cut_off = false;
    if (!torch_grad_enabled())
        return unit_note_checkpointed(unit);
    PyObject *hook = hook_new(pre_backward, unit, unit->object);
    int result = hook ? hook_outputs(output, hook, &hooked) : -1;
    Py_XDECREF(hook);
    if (!result && !hooked)
        return unit_note_cut_off(unit);
    unit->needs_pre_backward_unshard = hooked > 0 && unit->handle;
    if (unit->needs_pre_backward_unshard)
        unit->graph_precision = storage_precision(&unit->handle->storage);
    return result;
}

/* Freed unless the backward will want it gathered; nothing can go stale in a copy that no backward can use (parity 4). */
static int reshard_after_forward(struct unit *unit) {
    struct handle *handle = unit->handle;
    bool expected = unit->needs_pre_backward_unshard;
    bool keeps = handle->param.sharded && !flat_param_reshards_after_forward(&handle->param);
    bool free_storage = !handle->param.sharded || !expected || (!unit->is_root && !keeps);
    if (order_record_post_forward(unit) < 0 || schedule_reshard(unit, free_storage) < 0)
        return -1;
    bool views_stay = keeps && !free_storage && torch_grad_enabled(); /* C-091 */
    if (!views_stay && handle_show_sharded(handle) < 0)
        return -1;
    return handle_set_training_state(handle, USE_IDLE);
}

/* `output` is replaced only where the registration is. */
static int register_pre_backward_hooks(struct unit *unit, PyObject **output) {
    if (!replaced[REPLACED_REGISTER_PRE_BACKWARD_HOOKS])
        return unit_register_pre_backward_hooks(unit, *output);
    unit->ran_pre_backward = unit->needs_pre_backward_unshard = false;
    return replaced_register_pre_backward_hooks(unit, output);
}

static int post_forward(struct unit *unit, PyObject **output) {
    if (register_pre_backward_hooks(unit, output) < 0)
        return -1;
    if (unit->handle && reshard_after_forward(unit) < 0)
        return -1;
    if (unit->is_root && !unit->needs_pre_backward_unshard && schedule_settle(&unit->runtime->schedule) < 0)
        return -1;
    return unit_set_training_state(unit, USE_IDLE);
}

/* ---- forward ---- */

/* A layer of another unit, called past that unit, has failed on a parameter that is sharded: said in the exception itself. */
static void explain_error(const struct unit *unit, PyObject *error, PyObject *traceback) {
    PyObject *module = PyWeakref_GetObject(unit->module_ref);
    if (!module || !error || !traceback || PyException_SetTraceback(error, traceback) < 0)
        return;
    PyObject *done = PyObject_CallMethod(module, "_explain_error", "O", error);
    Py_XDECREF(done);
}

/* The module raised: nothing of this forward stays gathered, and the exception goes on. A root's failure is its whole tree's:
 * units that had finished wait for a backward that will not come. */
static void abandon_forward(struct unit *unit) {
    PyObject *type, *value, *traceback;
    PyErr_Fetch(&type, &value, &traceback);
    PyErr_NormalizeException(&type, &value, &traceback);
    explain_error(unit, value, traceback);
    PyErr_Clear();
    unit_set_training_state(unit, USE_IDLE);
    unit->prefetched = false;
    if (unit->handle) {
        schedule_reshard(unit, true);
        handle_show_sharded(unit->handle);
        handle_set_training_state(unit->handle, USE_IDLE);
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
    PyObject *done = module ? PyObject_CallMethod(module, "_lazy_init", NULL) : NULL;
    Py_XDECREF(done);
    if (!done || unit->runtime)
        return done ? 0 : -1;
    PyErr_Format(PyExc_RuntimeError, "unit %S: lazy initialisation did not bind a runtime", unit->name);
    return -1;
}

/* One phase of a forward, as a range of the profiler. */
static int profiled_pre_forward(struct unit *unit, PyObject **args, PyObject **kwargs) {
    if (root_pre_forward(unit) < 0)
        return -1;
    PyObject *range = profile_begin_inner("FullyShardedDataParallel._pre_forward");
    int result = pre_forward(unit, args, kwargs);
    profile_end(range);
    return result;
}

static int profiled_post_forward(struct unit *unit, PyObject **output) {
    PyObject *range = profile_begin("FullyShardedDataParallel._post_forward");
    int result = post_forward(unit, output);
    profile_end(range);
    return result;
}

static PyObject *run_forward(struct unit *unit, PyObject *wrapped, PyObject *args, PyObject *kwargs) {
    PyObject *output = NULL;
    uint64_t place = ledger_enter(unit->ledger_index, LEDGER_FORWARD);
    unit->runtime->num_in_forward++;
    Py_INCREF(args);
    Py_INCREF(kwargs);
    if (profiled_pre_forward(unit, &args, &kwargs) == 0)
        output = PyObject_Call(wrapped, args, kwargs);
    if (output && profiled_post_forward(unit, &output) < 0)
        Py_CLEAR(output);
    if (!output)
        abandon_forward(unit);
    unit->runtime->num_in_forward--;
    ledger_leave(place);
    Py_DECREF(args);
    Py_DECREF(kwargs);
    return output;
}

static bool is_summoned(const struct unit *unit) {
    return unit->training_state == USE_SUMMON_FULL_PARAMS ||
           (unit->handle && unit->handle->training_state == USE_SUMMON_FULL_PARAMS);
}

/* Inside summon_full_params: the parameters are there, in full precision, and stay there. */
static PyObject *forward_on_full_params(const struct unit *unit, PyObject *wrapped, PyObject *args, PyObject *kwargs) {
    if (!torch_grad_enabled())
        return PyObject_Call(wrapped, args, kwargs);
    PyErr_Format(
        PyExc_RuntimeError,
        "rank %lld, unit %S: illegal transition from SUMMON_FULL_PARAMS to FORWARD: no backward could follow, as "
        "summon_full_params() frees the parameters at its end. Use torch.no_grad() around the forward, or leave "
        "summon_full_params() first.",
        unit_rank(unit), unit->name);
    return NULL;
}

PyObject *unit_forward(struct unit *unit, PyObject *wrapped, PyObject *args, PyObject *kwargs) {
    if (ensure_lazy_init(unit) < 0)
        return NULL;
    if (is_summoned(unit))
        return forward_on_full_params(unit, wrapped, args, kwargs);
    if (runtime_reset_after_failed_backward(unit->runtime) < 0)
        return NULL;
    if (recomputing(unit))
        return PyObject_Call(wrapped, args, kwargs);
    if (begin_forward(unit) < 0)
        return NULL;
    PyObject *range = profile_begin("FullyShardedDataParallel.forward");
    PyObject *output = run_forward(unit, wrapped, args, kwargs);
    profile_end(range);
    return output;
}
