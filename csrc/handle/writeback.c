/* Writeback: user edits of parameters and gradients between steps, applied to the shard and the flat gradient
 * before the next unshard.
 *
 * Invariant: after handle_writeback the exposed Parameters point into the shard and are the objects in
 * `params`. After handle_collect_user_grads the flat gradient contains the parameters' gradients. Replaced
 * Parameters are written back while SHARDED, in-place writes to views while UNSHARDED. */
#include "handle/handle.h"

#include "torch/py_torch.h"
#include "torch/tensor.h"

bool writeback_pop_copied(struct handle *handle) {
    bool copied = handle->writeback.copied;
    handle->writeback.copied = false;
    return copied;
}

/* ---- original parameters ---- */

/* Warn about the writeback of a parameter or gradient under TORCH_DISTRIBUTED_DEBUG=INFO. Return 0 or -1. */
static int warn_writeback(struct handle *handle, int64_t param, const char *subject, PyObject *value) {
    if (!handle->param.verbose)
        return 0;
    OWNED *shape = value == Py_None ? Py_NewRef(Py_None) : PyObject_GetAttrString(value, "shape");
    OWNED *device = value == Py_None ? Py_NewRef(Py_None) : PyObject_GetAttr(value, torch_names.device);
    OWNED *fqn = flat_param_fqn(&handle->param, param);
    int result = -1;
    if (shape && device)
        result = PyErr_WarnFormat(PyExc_UserWarning, 1,
                                  "[Rank %lld] %s needs writeback in HandleTrainingState.%s: %S of unit %S, "
                                  "shape=%S device=%S, expected device=%S",
                                  (long long)handle->param.layout.rank, subject,
                                  training_state_names[handle->training_state], fqn, handle->param.name,
                                  shape, device, handle->param.device);
    return result;
}

/* [Note: swapped parameters] torch.func.functional_call and similar functions set other tensors in
 * `_parameters` for the duration of a call, without register_parameter. Values of such tensors must not reach
 * the shard: the unit's own parameters return after the call, and a backward would unshard the wrong values.
 * Attribute assignment and load_state_dict(assign=True) do register: a hook
 * (fsdp_c/sharding/param_views.py) marks the new Parameter with the handle's id. */
static int check_registered(const struct handle *handle, int64_t param, PyObject *value) {
    const struct flat_param *flat_param = &handle->param;
    PyObject *views = handle->storage.copy->views;
    if (value == Py_None)
        return 0;
    /* functional_call began while views were exposed */
    if (views && value == PyTuple_GetItem(views, param))
        return param_views_restore_param(&handle->param_views, param);
    int is_param = PyObject_IsInstance(value, torch_names.parameter_type);
    OWNED *mark = is_param > 0 ? PyObject_GetAttrString(value, "_fsdp_registered_for") : NULL;
    if (is_param < 0)
        return -1;
    if (mark && PyLong_AsLongLong(mark) == flat_param->registration_id)
        return 0;
    PyErr_Clear();
    OWNED *fqn = flat_param_fqn(flat_param, param);
    return flat_param_error(
        flat_param, PyExc_RuntimeError,
        "%S is another tensor than the unit's, set in its module without registration, and its values would "
        "be written to the shards for good; torch.func.functional_call swaps tensors in this way. Call it "
        "under torch.no_grad() inside FullyShardedDataParallel.summon_full_params(module), or on a submodule "
        "inside the unit's forward. To change a weight, assign an nn.Parameter to the attribute of its "
        "module.",
        fqn);
}

/* Accept a parameter that was deleted from its module. Raise RuntimeError if a property or attribute computes
 * something in its place. */
static int check_removed(const struct handle *handle, int64_t param) {
    const struct param_view *param_view = &handle->param_views.all[param];
    if (PyErr_Occurred())
        return -1;
    int replaced =
        param_view->setting == SETTING_BYPASS ? 0 : PyDict_Contains(param_view->attributes, param_view->name);
    OWNED *of_class =
        replaced ? NULL : PyObject_GetAttr((PyObject *)Py_TYPE(param_view->module), param_view->name);
    if (replaced < 0)
        return -1;
    PyErr_Clear();
    if (!replaced && !(of_class && PyObject_TypeCheck(of_class, &PyProperty_Type)))
        return 0;
    OWNED *fqn = flat_param_fqn(&handle->param, param);
    return flat_param_error(&handle->param, PyExc_RuntimeError,
                            "%S was taken from its module after wrapping, and is now computed from this "
                            "rank's shard alone; torch.nn.utils.parametrize, weight_norm, spectral_norm and "
                            "prune do so. Apply these before wrapping.",
                            fqn);
}

/* Make `value` the unit's Parameter. */
static int adopt_param(struct handle *handle, int64_t param, PyObject *value) {
    if (PyList_GetItem(handle->param.params, param) == value)
        return 0;
    if (PyList_SetItem(handle->param.params, param, Py_NewRef(value)) < 0)
        return -1;
    return PyObject_SetAttrString(value, "_fsdp_flattened", Py_True);
}

static bool points_into_shard(const struct handle *handle, int64_t param, const struct tensor_view *view) {
    const struct tensor_view *shard = &handle->storage.local_view;
    const char *expected =
        (const char *)shard->data +
        handle->param.layout.shard_ranges[param].offset_in_shard * dtype_nbytes(shard->dtype);
    return (const char *)view->data == expected || tensor_view_numel(view) == 0;
}

/* Copy a replaced Parameter, or its replaced data, to its part of `shard`. */
static int writeback_param(struct handle *handle, int64_t param, PyObject *shard) {
    const struct flat_param *flat_param = &handle->param;
    const struct layout_shard_range *range = &flat_param->layout.shard_ranges[param];
    PyObject *value = param_views_value(&handle->param_views, param);
    struct tensor_view view;
    if (!value)
        return PyErr_Occurred() ? -1 : 0; /* deleted from the module */
    if (tensor_view_of(value, &view) < 0)
        return -1;
    if (value == PyList_GetItem(flat_param->params, param) && points_into_shard(handle, param, &view))
        return 0;
    OWNED *source = torch_data(value);
    OWNED *flat_shape = Py_BuildValue("(L)", (long long)range->numel_in_shard);
    OWNED *part = NULL;
    PyObject *shape = flat_param->sharded ? flat_shape : PyTuple_GetItem(flat_param->shapes, param);
    PyObject *strides = flat_param->sharded ? Py_None : PyTuple_GetItem(flat_param->strides, param);
    if (source && flat_shape)
        part = torch_view(shard, range->offset_in_shard, range->numel_in_shard, shape, strides);
    if (!part || torch_copy(part, source) < 0)
        return -1;
    return adopt_param(handle, param, value);
}

static bool is_in_shard(const struct handle *handle, int64_t param) {
    return !handle->param.sharded || handle->param.layout.shard_ranges[param].in_shard;
}

/* Return 1 if the user replaced a parameter in this rank's shard or its data, 0 if not, -1 with an exception.
 * A parameter outside the shard must have no elements. Its new object is always noticed, its new data only if
 * `checks_data`: most parameters are outside the shard, and checking all of them at each unshard would be a
 * third of a step's host work. */
static int find_replaced(struct handle *handle, int64_t param, bool checks_data) {
    const struct flat_param *flat_param = &handle->param;
    PyObject *own = PyList_GetItem(flat_param->params, param);
    PyObject *value = param_views_value(&handle->param_views, param);
    struct tensor_view view;
    if (value != own) {
        if ((value ? check_registered(handle, param, value) : check_removed(handle, param)) < 0)
            return -1;
        value = param_views_value(&handle->param_views, param);
        if (!value)
            return PyErr_Occurred() ? -1 : 0;
    } else if (!checks_data) {
        return 0;
    }
    if (tensor_view_of(value, &view) < 0)
        return -1;
    long long numel = tensor_view_numel(&view), rank = flat_param->layout.rank;
    if (!is_in_shard(handle, param)) {
        if (!numel)
            return adopt_param(handle, param, value);
        OWNED *shape = PyObject_GetAttrString(value, "shape");
        OWNED *fqn = flat_param_fqn(flat_param, param);
        return RAISED(
            PyExc_RuntimeError,
            "Cannot writeback when the parameter shape changes: %S of unit %S was set to data of shape %S, "
            "but rank %lld holds none of the parameter, so the edit would be lost. Change parameters inside "
            "FullyShardedDataParallel.summon_full_params(module, writeback=True).",
            fqn, flat_param->name, shape ? shape : Py_None, rank);
    }
    if (value == own && points_into_shard(handle, param, &view))
        return 0;
    if (warn_writeback(handle, param, "Parameter", value) < 0)
        return -1;
    long long want = flat_param->layout.shard_ranges[param].numel_in_shard;
    if (numel == want && (!flat_param->sharded || view.ndim == 1))
        return 1;
    OWNED *shape = PyObject_GetAttrString(value, "shape");
    OWNED *fqn = flat_param_fqn(flat_param, param);
    return RAISED(PyExc_RuntimeError,
                  "Cannot writeback when the parameter shape changes: %S of unit %S has shape (%lld,) on "
                  "rank %lld (its shard there), but the new value has shape %S. Change full parameters "
                  "inside FullyShardedDataParallel.summon_full_params(module, writeback=True).",
                  fqn, flat_param->name, want, rank, shape ? shape : Py_None);
}

int writeback_check_params_outside_shard(struct handle *handle) {
    if (!handle->param.use_orig_params || handle->param_views.exposed != EXPOSED_SHARDED ||
        handle->param.skip_writeback_check)
        return 0;
    for (int64_t i = 0; i < handle->param.num_params; i++)
        if (!is_in_shard(handle, i) && find_replaced(handle, i, true) < 0)
            return -1;
    return 0;
}

/* [Note: another shard] Replaced parameters and data are written to a copy of the shard, which becomes the
 * new shard. A script that sets `param.data = average` for an evaluation and keeps the previous `.data` to
 * restore it later holds the old shard, whose values must not change. */
int writeback_replace_shard(struct handle *handle) {
    const struct storage *storage = &handle->storage;
    PyObject *inference_guard;
    if (!handle->param.use_orig_params || handle->param_views.exposed != EXPOSED_SHARDED ||
        handle->param.skip_writeback_check)
        return 0;
    /* parameter outside the shard whose data is checked in this call, -1 if this rank has a part of each */
    int64_t next = -1, num_params = handle->param.num_params;
    for (int64_t i = 1; next < 0 && i <= num_params; i++) {
        int64_t param = (handle->writeback.next_outside_shard + i) % num_params;
        if (!is_in_shard(handle, param))
            handle->writeback.next_outside_shard = next = param;
    }
    /* raise all errors before the first copy */
    bool any_replaced = false;
    for (int64_t i = 0; i < num_params; i++) {
        int replaced = find_replaced(handle, i, i == next || is_in_shard(handle, i));
        if (replaced < 0)
            return -1;
        any_replaced = any_replaced || replaced;
    }
    for (int64_t i = num_params; i < handle->param_views.count; i++) {
        const struct param_view *param_view = &handle->param_views.all[i];
        const struct param_view *primary = &handle->param_views.all[param_view->param];
        PyObject *value = PyDict_GetItemWithError(param_view->parameters, param_view->name);
        if (!value || value == PyDict_GetItemWithError(primary->parameters, primary->name)) {
            if (PyErr_Occurred())
                return -1;
            continue;
        }
        OWNED *infos = PyObject_GetAttrString(handle->param.tensor, "_shared_param_infos");
        OWNED *info = infos ? PySequence_GetItem(infos, i - num_params) : NULL;
        OWNED *where = info ? PyObject_GetAttrString(info, "module_name") : NULL;
        OWNED *fqn = where ? flat_param_fqn(&handle->param, param_view->param) : NULL;
        if (fqn)
            PyErr_Format(
                PyExc_NotImplementedError,
                "Changing shared parameters is not supported yet (rank %lld, unit %S): %S and the %S of %R "
                "were one parameter when the unit was wrapped, and are two now. Untie parameters before "
                "wrapping.",
                (long long)handle->param.layout.rank, handle->param.name, fqn, param_view->name, where);
        return -1;
    }
    if (!any_replaced)
        return 0;
    if (torch_leave_inference_mode(&inference_guard) < 0)
        return -1;
    handle->writeback.copied = true;
    OWNED *shard = storage->offload ? torch_empty_pinned_like(storage->shard_like)
                                    : torch_empty_like(storage->local_shard);
    int result = shard ? torch_copy(shard, storage->local_shard) : -1;
    for (int64_t i = 0; !result && i < num_params; i++)
        if (is_in_shard(handle, i))
            result = writeback_param(handle, i, shard);
    if (!result)
        result = torch_set_data(handle->param.tensor, shard);
    return torch_return_to_inference_mode(inference_guard) < 0 || result < 0 ? -1 : 1;
}

int handle_writeback(struct handle *handle) {
    if (handle_check_flat_param(handle) < 0 || handle_follow_flat_param(handle) < 0 ||
        handle_writeback_views(handle) < 0)
        return -1;
    int replaced = writeback_replace_shard(handle);
    return replaced > 0 ? handle_follow_flat_param(handle) : replaced;
}

int64_t writeback_count_writes(const struct handle *handle) {
    if (!handle->param.use_orig_params)
        return torch_version(handle->param.tensor);
    int64_t sum = 0;
    for (int64_t i = 0; i < handle->param.num_params; i++) {
        PyObject *param = PyList_GetItem(handle->param.params, i);
        int64_t version = torch_version(param);
        if (version < 0)
            return -1;
        sum += version + (param_views_value(&handle->param_views, i) != param);
    }
    return sum;
}

/* ---- views that stay between forward and backward ---- */

/* A parameter has the same offset in the shard and in own_part. */
static int writeback_view(struct handle *handle, int64_t param) {
    const struct storage *storage = &handle->storage;
    const struct layout_shard_range *range = &handle->param.layout.shard_ranges[param];
    if (!range->in_shard)
        return 0;
    OWNED *part = torch_part(storage->local_shard, range->offset_in_shard, range->numel_in_shard);
    OWNED *view = torch_part(storage->copy->own_part, range->offset_in_shard, range->numel_in_shard);
    OWNED *value = part && view ? Py_NewRef(view) : NULL;
    if (value && storage->copy->low_precision) { /* elements that were not written keep their bits */
        OWNED *own = PyObject_CallMethod(part, "to", "O", handle->param.device);
        OWNED *cast = own ? PyObject_CallMethod(own, "to", "O", storage->copy->dtype) : NULL;
        OWNED *differs = cast ? PyObject_CallMethod(view, "ne", "O", cast) : NULL;
        OWNED *wide = differs ? PyObject_CallMethod(view, "to", "O", storage->orig_dtype) : NULL;
        ref_set(&value, wide ? PyObject_CallMethod(wide, "where", "OO", differs, own) : NULL);
    }
    int result = value ? torch_copy(part, value) : -1;
    handle->writeback.copied = true;
    return result;
}

/* Write changed views back to the shard. Return 1 and the index of the last one in `*last`, 0 if none has
 * changed, -1 with an exception. */
static int writeback_views(struct handle *handle, int64_t *last) {
    int any = 0;
    for (int64_t i = 0; i < handle->param.num_params; i++) {
        int written = storage_pop_written(&handle->storage, i);
        if (written < 0 || (written && writeback_view(handle, i) < 0))
            return -1;
        if (written)
            *last = i;
        any = any || written;
    }
    return any;
}

int handle_writeback_views(struct handle *handle) {
    int64_t last;
    bool in_backward =
        handle->training_state == USE_BACKWARD_PRE || handle->training_state == USE_BACKWARD_POST;
    bool expected = !in_backward || handle_keeps_views_exposed(handle) || handle->writeback.forward_writes;
    if (!expected || handle->storage.copy->is_local || handle->param_views.exposed != EXPOSED_VIEWS ||
        handle->storage.param_state != PARAM_UNSHARDED || handle->param.skip_writeback_check)
        return 0;
    if (writeback_views(handle, &last) < 0)
        return -1;
    storage_drop_snapshot(&handle->storage);
    return 0;
}

/* ---- writes by a forward ---- */

/* [Note: writes in a forward] Each view has its own version counter, and reading all of them costs a tenth of
 * a step's host work. The counters are therefore read after the first forwards of a unit, after each forward
 * once one has written, and otherwise after every 64th. A unit that begins to write late gets an error that
 * earlier writes are lost. */
enum { FIRST_FORWARDS = 2, FORWARDS_BETWEEN = 64 };

int handle_writeback_forward(struct handle *handle) {
    const struct storage *storage = &handle->storage;
    struct writeback *writeback = &handle->writeback;
    if (storage->copy->is_local || storage->param_state != PARAM_UNSHARDED ||
        handle->param.skip_writeback_check)
        return 0;
    int64_t count = writeback->num_forwards[torch_grad_enabled()]++, last;
    bool expected = writeback->forward_writes || count < FIRST_FORWARDS;
    if (!expected && count % FORWARDS_BETWEEN)
        return 0;
    int written = writeback_views(handle, &last);
    if (written <= 0)
        return written;
    writeback->forward_writes = true;
    if (expected)
        return 0;
    OWNED *fqn = flat_param_fqn(&handle->param, last);
    return flat_param_error(
        &handle->param, PyExc_RuntimeError,
        "its forward writes in place to %S, but its first %d forwards did not. Forwards are not checked each "
        "time then, so writes of the last %d may be lost; later ones are kept. Write in one of the first "
        "forwards too, if only unchanged values, or keep in a buffer the values that a forward changes.",
        fqn, FIRST_FORWARDS, FORWARDS_BETWEEN);
}

/* ---- views that are replaced ---- */

int writeback_check_views(struct handle *handle) {
    if (!handle->param.use_orig_params || handle->param_views.exposed != EXPOSED_VIEWS ||
        handle->param.skip_writeback_check)
        return 0;
    const char *full = handle->storage.copy->is_local ? handle->storage.local_view.data
                                                      : handle->storage.copy->full.view.data;
    for (int64_t i = 0; i < handle->param_views.count; i++) {
        const struct param_view *param_view = &handle->param_views.all[i];
        PyObject *value = PyDict_GetItemWithError(param_view->parameters, param_view->name);
        int64_t offset = layout_param_offset(&handle->param.layout, param_view->param);
        struct tensor_view view;
        if (!value &&
            (i < handle->param.num_params ? check_removed(handle, i) < 0 : PyErr_Occurred() != NULL))
            return -1;
        /* functional_call may have restored the sharded Parameter, which is not an edit */
        if (!value || value == PyList_GetItem(handle->param.params, param_view->param) ||
            !layout_param_numel(&handle->param.layout, param_view->param))
            continue;
        if (tensor_view_of(param_views_local_value(&handle->param_views, value), &view) < 0)
            return -1;
        if ((const char *)view.data == full + offset * dtype_nbytes(handle->storage.copy->kind))
            continue;
        OWNED *fqn = flat_param_fqn(&handle->param, param_view->param);
        return RAISED(PyExc_AssertionError,
                      "FSDP does not support changing the parameters between forward and backward for "
                      "strategies that do not reshard after forward (rank %lld, unit %S): %S was replaced. "
                      "Change it after the backward.",
                      (long long)handle->param.layout.rank, handle->param.name, fqn);
    }
    return 0;
}

/* ---- gradients ---- */

/* Apply the user's change of one gradient to the flat gradient: zero if .grad is None, else a copy. */
static int collect_param_grad(struct handle *handle, PyObject *flat_grad, const struct tensor_view *flat,
                              int64_t param, PyObject *grad) {
    int64_t offset = grads_offset(&handle->grads, param);
    struct tensor_view view;
    if (offset < 0)
        return 0;
    if (grad != Py_None) {
        if (tensor_view_of(grad, &view) < 0)
            return grads_refuse(&handle->grads, param);
        if ((const char *)view.data == (const char *)flat->data + offset * dtype_nbytes(flat->dtype))
            return 0;
    }
    if (grad == Py_None && grads_mark_unexposed(&handle->grads, param) < 0)
        return -1;
    if (warn_writeback(handle, param, "Gradient", grad) < 0 || grads_zero_reduced(&handle->grads, param) < 0)
        return -1;
    OWNED *part = grads_part(&handle->grads, flat_grad, param);
    int result = !part ? -1 : grad == Py_None ? torch_zero(part) : torch_copy(part, grad);
    /* Point .grad into the flat gradient, which receives later accumulation. */
    if (!result && grad != Py_None)
        result = torch_set_foreign_grad(PyList_GetItem(handle->param.params, param), part);
    return result;
}

int handle_collect_user_grads(struct handle *handle) {
    const struct flat_param *param = &handle->param;
    struct grads *grads = &handle->grads;
    if (!grads->shard_sizes || grads->in_backward) /* true before lazy init, or during a backward */
        return 0;
    bool some = false;
    if (!param->use_orig_params) {
        OWNED *grad = torch_get_grad(param->tensor);
        if (!grad)
            return -1;
        return grad == Py_None ? grads_clear_accumulated(grads) : 0;
    }
    for (int64_t i = 0; !some && i < param->num_params; i++) {
        OWNED *grad = grads_offset(grads, i) < 0 ? Py_NewRef(Py_None)
                                                 : torch_get_grad(PyList_GetItem(param->params, i));
        if (!grad)
            return -1;
        some = grad != Py_None;
    }
    if (!some)
        return grads_clear_accumulated(grads);
    struct tensor_view view;
    OWNED *flat_grad = torch_get_grad(param->tensor);
    if (flat_grad == Py_None)
        ref_set(&flat_grad, grads_set_kind(grads, GRAD_SHARDED) < 0 ? NULL : grads_zeros(grads));
    int result = flat_grad ? tensor_view_of(flat_grad, &view) : -1;
    for (int64_t i = 0; !result && i < param->num_params; i++) {
        OWNED *grad = torch_get_grad(PyList_GetItem(param->params, i));
        result = grad ? collect_param_grad(handle, flat_grad, &view, i, grad) : -1;
    }
    return result;
}
