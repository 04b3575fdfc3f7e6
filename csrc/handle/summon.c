/* summon_full_params on one handle: exposes full parameters and gradients in full precision for the duration
 * of a context. */
#include "handle/handle.h"
#include "torch/py_torch.h"
#include "torch/tensor.h"

static int restore_flat_param(struct handle *handle) {
    struct summon *summon = &handle->summon;
    if (handle->param.use_orig_params || !summon->flat_param_owner)
        return 0;
    return PyDict_SetItem(summon->flat_param_owner, summon->flat_param_name, handle->param.tensor);
}

/* ---- parameters ---- */

/* Return to the compute precision, and keep the current exception. */
static int leave_full_precision(struct handle *handle) {
    PyObject *error = PyErr_GetRaisedException();
    int result = handle_use_precision(handle, PRECISION_COMPUTE);
    if (error)
        PyErr_SetRaisedException(error);
    return result;
}

/* Return true if the full parameters do not alias the local shard. */
static bool full_is_copy(const struct handle *handle) {
    return handle->param.sharded || handle->storage.offload;
}

static int copy_to(PyObject *tensor, PyObject *source) {
    OWNED *data = torch_data(tensor);
    return data ? torch_copy(data, source) : -1;
}

/* shard[0 .. valid) <- full[shard_start .. shard_start + valid) */
static int copy_own_part(struct handle *handle, PyObject *shard, PyObject *full) {
    const struct flat_layout *layout = &handle->param.layout;
    if (layout->shard_numel_valid == 0)
        return 0;
    OWNED *from = torch_part(full, layout->shard_start, layout->shard_numel_valid);
    OWNED *to = from ? torch_part(shard, 0, layout->shard_numel_valid) : NULL;
    return to ? copy_to(to, from) : -1;
}

static int writeback_full(struct handle *handle) {
    OWNED *views = flat_param_views(&handle->param, handle->summon.full);
    if (!views)
        return -1;
    /* Copy a Parameter whose data was replaced back to its view. */
    for (int64_t i = 0; i < handle->param.num_params; i++) {
        PyObject *value = param_views_value(&handle->param_views, i), *view = PyTuple_GetItem(views, i);
        struct tensor_view current, original;
        if (!value && PyErr_Occurred())
            return -1;
        if (!value)
            continue;
        value = param_views_local_value(&handle->param_views, value);
        if (tensor_view_of(value, &current) < 0 || tensor_view_of(view, &original) < 0)
            return -1;
        OWNED *data = current.data == original.data ? NULL : torch_data(value);
        if (current.data != original.data && (!data || copy_to(view, data) < 0))
            return -1;
    }
    if (!full_is_copy(handle))
        return 0;
    /* Order this write before the all-gathers of a backward that follows, on other streams. */
    handle->writeback.copied = true;
    return copy_own_part(handle, handle->storage.local_shard, handle->summon.full);
}

/* Free the full parameters at once: no step follows that would run the deferred free. */
static int free_full(struct handle *handle) {
    Py_CLEAR(handle->summon.full);
    if (leave_full_precision(handle) < 0 || handle_expose_sharded(handle) < 0 ||
        storage_reshard(&handle->storage, handle->summon.freed_after || !handle->param.sharded) < 0)
        return -1;
    return handle->storage.full_free ? deferred_free_flush(handle->storage.full_free) : 0;
}

static int unexpose_full(struct handle *handle) {
    return restore_flat_param(handle) < 0 ? -1 : free_full(handle);
}

/* Run a cleanup even after an error, and retry it once: half-done state would be mistaken for a user edit.
 * The first exception is kept. Return `result`, or -1 on failure. */
static int run_cleanup(struct handle *handle, int (*verb)(struct handle *), int result) {
    PyObject *error = PyErr_GetRaisedException();
    if (verb(handle) < 0) {
        result = -1;
        if (error)
            PyErr_Clear();
        else
            error = PyErr_GetRaisedException();
        if (verb(handle) < 0)
            PyErr_WriteUnraisable(handle->param.name);
    }
    PyErr_SetRaisedException(error);
    return result;
}

int handle_summon_enter(struct handle *handle, bool writeback) {
    if (handle->training_state != USE_IDLE)
        return RAISED(
            PyExc_AssertionError,
            "Expects the handle training to be IDLE but got HandleTrainingState.%s (rank %lld, unit %S): "
            "leave the forward, the backward or the enclosing summon_full_params() first.",
            training_state_names[handle->training_state], (long long)handle->param.layout.rank,
            handle->param.name);
    if (handle_collect_user_grads(handle) < 0)
        return -1;
    if (!handle->param.skip_writeback_check &&
        (writeback_check_params_outside_shard(handle) < 0 || handle_writeback(handle) < 0))
        return -1;
    /* A unit that a forward left unsharded is unsharded again, as the shard may have changed since; an
     * unsharded low-precision copy is freed, as a writeback would make it stale. */
    handle->summon.freed_after = handle->storage.param_state == PARAM_SHARDED;
    if (full_is_copy(handle)) {
        bool low_precision = handle->storage.copies[PRECISION_COMPUTE].low_precision;
        if ((low_precision && handle_use_precision(handle, PRECISION_FULL) < 0) ||
            storage_reshard(&handle->storage, true) < 0 || handle_unshard_outside_step(handle) < 0) {
            leave_full_precision(handle);
            return -1;
        }
    }
    PyObject *full =
        Py_NewRef(full_is_copy(handle) ? handle->storage.copy->full.tensor : handle->storage.local_shard);
    handle->summon.writeback = writeback;
    ref_set(&handle->summon.full, full);
    int result = handle_set_training_state(handle, USE_SUMMON_FULL_PARAMS);
    PyObject *owner = handle->summon.flat_param_owner, *name = handle->summon.flat_param_name;
    if (!result && owner) {
        result = PyDict_Contains(owner, name);
        result = result > 0 ? PyDict_DelItem(owner, name) : result;
    }
    if (!result && param_views_expose_full_params(&handle->param_views, full) == 0)
        return 0;
    run_cleanup(handle, unexpose_full, -1);
    handle_set_training_state(handle, USE_IDLE);
    return -1;
}

int handle_summon_free(struct handle *handle) {
    return handle->summon.full ? free_full(handle) : 0;
}

int handle_summon_reshard(struct handle *handle) {
    return handle->summon.full ? unexpose_full(handle) : 0;
}

int handle_summon_exit(struct handle *handle) {
    if (handle->training_state != USE_SUMMON_FULL_PARAMS)
        return 0;
    int result = 0;
    if (handle->summon.full) {
        if (handle->summon.writeback || !full_is_copy(handle))
            result = writeback_full(handle);
        result = run_cleanup(handle, unexpose_full, result);
    } else {
        result = restore_flat_param(handle);
    }
    handle_set_training_state(handle, USE_IDLE);
    return result;
}

/* ---- gradients ---- */

/* Return the full gradient, or Py_None if no rank has one. New reference. Collective. */
static PyObject *full_grad(struct handle *handle, PyObject *grad) {
    const struct flat_param *param = &handle->param;
    if (!param->sharded)
        return Py_NewRef(grad);
    if (handle->grads.kind == GRAD_UNSHARDED)
        return Py_NewRef(handle->grads.unsharded);
    /* Count ranks without a gradient in int32: bfloat16 cannot represent 257. */
    OWNED *count = torch_empty(1, torch_names.int32, param->device);
    OWNED *flag = count ? PyObject_CallMethod(count, "fill_", "i", (int)(grad == Py_None)) : NULL;
    PyObject *work = flag ? collective_all_reduce(&param->shard_group, count) : NULL;
    OWNED *sum = work && collective_wait(work) == 0 ? PyObject_CallMethod(count, "item", NULL) : NULL;
    int64_t missing = sum ? PyLong_AsLongLong(sum) : -1;
    if (missing < 0)
        return NULL;
    if (missing == param->layout.world_size)
        return Py_NewRef(Py_None);
    if (grad == Py_None && param->verbose &&
        PyErr_WarnFormat(PyExc_UserWarning, 1,
                         "[Rank %lld] Only some but not all ranks have a `None` `FlatParameter` gradient in "
                         "unit %S, so that zeros stand for the missing ones",
                         (long long)param->layout.rank, param->name) < 0)
        return NULL;
    /* Zeros of the shard's dtype stand in for a missing gradient; torch uses the default dtype. */
    OWNED *shard = grad == Py_None ? grads_zeros(&handle->grads) : Py_NewRef(grad);
    OWNED *own = shard ? PyObject_CallMethod(shard, "to", "O", param->device) : NULL;
    OWNED *full =
        own ? PyObject_CallMethod(own, "new_empty", "(L)", (long long)param->layout.padded_numel) : NULL;
    work = full ? collective_all_gather(&param->shard_group, full, own) : NULL;
    if (!work || collective_wait(work) < 0 || grads_set_kind(&handle->grads, GRAD_SHARDED) < 0)
        return NULL;
    return Py_NewRef(full);
}

int handle_summon_grads(struct handle *handle) {
    OWNED *grad = torch_get_grad(handle->param.tensor);
    PyObject *full = grad ? full_grad(handle, grad) : NULL;
    if (!full)
        return -1;
    int result = grads_expose_full_grad(&handle->grads, full);
    if (!result && full != Py_None)
        result = param_views_expose_wrapped_grads(&handle->param_views, full);
    ref_set(&handle->summon.grad, full);
    return result;
}

static int expose_flat_grad(struct handle *handle) {
    return grads_expose_flat_grad(&handle->grads);
}

int handle_summon_grads_exit(struct handle *handle, bool writeback) {
    OWNED *full = handle->summon.grad;
    OWNED *grad = torch_get_grad(handle->param.tensor);
    handle->summon.grad = NULL;
    int result = grad ? 0 : -1;
    bool gathered = full && full != Py_None && handle->param.sharded && handle->grads.kind == GRAD_SHARDED;
    if (!result && writeback && gathered && grad != Py_None)
        result = copy_own_part(handle, grad, full);
    if (handle->param.sharded)
        result = run_cleanup(handle, expose_flat_grad, result);
    return result;
}
