/* Unshard and reshard of a storage, and unshard of a handle. */
#include "handle/handle.h"

#include "base/check.h"
#include "torch/py_torch.h"
#include "torch/tensor.h"

/* ---- state of the unsharded storage ---- */

static const bool param_allowed[PARAM_STATES][PARAM_STATES] = {
    [PARAM_SHARDED] = {[PARAM_UNSHARDING] = true},  /* all-gather enqueued */
    [PARAM_UNSHARDING] = {[PARAM_UNSHARDED] = true, /* the compute stream waits for it */
                          [PARAM_SHARDED] = true},  /* prefetched, and not needed */
    [PARAM_UNSHARDED] = {[PARAM_SHARDED] = true},   /* full storage freed */
};

static const char *const param_names[PARAM_STATES] = {"SHARDED", "UNSHARDING", "UNSHARDED"};

int storage_set_state(struct storage *storage, enum param_state state) {
    if (!param_allowed[storage->param_state][state])
        return flat_param_refuse(storage->param, param_names[storage->param_state], param_names[state], "");
    storage->param_state = state;
    if (state != PARAM_UNSHARDING)
        freed_views_set(&storage->copy->freed_views, state == PARAM_SHARDED);
    CHECKED(storage_check(storage));
    return 0;
}

void storage_check(const struct storage *storage) {
    const struct precision_copy *copy = storage->copy;
    bool has_storage = storage->param_state != PARAM_SHARDED;
    INVARIANT(copy >= storage->copies && copy < storage->copies + PRECISIONS);
    INVARIANT(!has_storage || copy->is_local || copy->full.allocated);
    INVARIANT(storage->param_state == PARAM_UNSHARDING || !storage->unshard_work);
    INVARIANT(storage->param_state == PARAM_UNSHARDED || !copy->snapshot);
    for (int i = 0; i < PRECISIONS; i++)
        INVARIANT(&storage->copies[i] == copy || !storage->copies[i].full.allocated ||
                  deferred_free_holds(storage->full_free, &storage->copies[i].full));
}

int storage_refuse_freed_view(const struct storage *storage, const PyObject *tensor) {
    for (int i = 0; i < PRECISIONS; i++) {
        int64_t param = freed_views_find(&storage->copies[i].freed_views, tensor);
        if (param < 0)
            continue;
        OWNED *fqn = flat_param_fqn(storage->param, param);
        return flat_param_error(
            storage->param, PyExc_RuntimeError,
            "the values of %S are not gathered outside of the unit's forward and backward. Read or change "
            "them inside FullyShardedDataParallel.summon_full_params(module), or pass use_orig_params=True, "
            "with which each rank may read and change its shard between steps.",
            fqn);
    }
    return 0;
}

/* ---- memory ---- */

/* Allocation in the pool may fail: torch's allocator before 2.13 releases no cached memory of other pools
 * there. Outside of the pool it does. */
int storage_alloc_unsharded(struct storage *storage) {
    struct buffer *full = &storage->copy->full;
    if (storage->copy->is_local)
        return 0;
    if (storage->full_free && deferred_free_reclaim(storage->full_free, full) < 0)
        return -1;
    if (storage->pool && !full->allocated) {
        int result = pool_enter(storage->pool) < 0 ? -1 : buffer_alloc(full);
        if (pool_leave(storage->pool) == 0 && !result)
            return 0;
        if (!PyErr_ExceptionMatches(PyExc_RuntimeError))
            return -1;
        PyErr_Clear();
    }
    return buffer_alloc(full);
}

/* ---- input of the all-gather ---- */

bool storage_needs_pre_unshard(const struct storage *storage) {
    return !storage->copy->is_local && (storage->copy->low_precision || storage->offload);
}

static int cast_shard(const struct storage *storage, const struct tensor_view *shard) {
    struct tensor_view part;
    if (tensor_view_of(storage->copy->own_part, &part) < 0)
        return -1;
    return tensor_check(storage->kernels->cast_divide(part.data, storage->copy->kind, shard->data,
                                                      storage->orig_kind, storage->param->layout.shard_numel,
                                                      1.0, storage_stream(storage)),
                        "cast of a shard");
}

/* Kernels may still use the memory: deferred_free_forget orders the free after the last use. */
int storage_abandon_unshard(struct storage *storage) {
    PyObject *error = PyErr_GetRaisedException();
    if (deferred_free_flush_buffer(storage->full_free, &storage->copy->full) == 0)
        buffer_free(&storage->copy->full);
    buffer_free(&storage->device_shard);
    PyErr_SetRaisedException(error);
    return -1;
}

int storage_pre_unshard(struct storage *storage) {
    struct buffer *shard = &storage->device_shard;
    if (!storage_needs_pre_unshard(storage))
        return 0;
    int result = storage_alloc_unsharded(storage);
    if (!result && !storage->offload) {
        result = cast_shard(storage, &storage->local_view);
    } else if (!result && !storage->copy->low_precision) {
        result = torch_enqueue_copy(storage->copy->own_part, storage->local_shard);
    } else if (!result) { /* free the uploaded shard after the cast */
        result = buffer_alloc(shard) < 0 || torch_enqueue_copy(shard->tensor, storage->local_shard) < 0 ||
                         cast_shard(storage, &shard->view) < 0
                     ? -1
                     : buffer_free(shard);
    }
    return result < 0 ? storage_abandon_unshard(storage) : 0;
}

/* ---- all-gather ---- */

/* Return a view in a dtype that all backends support: bytes for integers and other dtypes without kernels.
 * New reference. */
static PyObject *view_for_backend(const struct storage *storage, PyObject *tensor) {
    if (dtype_is_known(storage->copy->kind))
        return Py_NewRef(tensor);
    return PyObject_CallMethodObjArgs(tensor, torch_names.view, torch_names.uint8, NULL);
}

int storage_unshard(struct storage *storage, struct unshard_batch *batch) {
    OWNED *work = NULL;
    int result = storage_alloc_unsharded(storage);
    if (!result && !storage->copy->is_local && storage->param->sharded) {
        OWNED *input = view_for_backend(storage, storage_needs_pre_unshard(storage) ? storage->copy->own_part
                                                                                    : storage->local_shard);
        OWNED *output = input ? view_for_backend(storage, storage->copy->full.tensor) : NULL;
        if (output && batch) {
            result = PyList_Append(batch->outputs, output) < 0 ? -1 : PyList_Append(batch->inputs, input);
        } else {
            work = output ? collective_all_gather(&storage->param->shard_group, output, input) : NULL;
            result = work ? 0 : -1;
        }
    }
    if (result < 0)
        return storage_abandon_unshard(storage);
    return batch ? 0 : storage_unshard_started(storage, work);
}

int storage_unshard_started(struct storage *storage, PyObject *work) {
    ref_set(&storage->unshard_work, Py_XNewRef(work));
    if (work && storage_wait_in_stream(storage, &storage->unshard_work) < 0)
        return storage_abandon_unshard(storage);
    return storage_set_state(storage, PARAM_UNSHARDING);
}

int storage_wait_unshard(struct storage *storage) {
    if (storage->param_state != PARAM_UNSHARDING)
        return 0;
    PyObject *work = storage->unshard_work;
    storage->unshard_work = NULL;
    if ((work && collective_wait(work) < 0) ||
        (!storage->copy->is_local && torch_set_data(storage->param->tensor, storage->copy->full_data) < 0)) {
        storage_set_state(storage, PARAM_SHARDED);
        return storage_abandon_unshard(storage);
    }
    storage->exposes_full_data = !storage->copy->is_local;
    return storage_set_state(storage, PARAM_UNSHARDED);
}

int storage_reshard(struct storage *storage, bool free_storage) {
    struct buffer *full = &storage->copy->full;
    if (storage->param_state == PARAM_UNSHARDING && storage_wait_unshard(storage) < 0)
        return -1;
    if (storage->param_state != PARAM_UNSHARDED)
        return 0;
    storage_drop_snapshot(storage);
    /* Restore the shard only if set by storage_wait_unshard: the user may have assigned other data since. */
    if (storage->exposes_full_data && torch_set_data(storage->param->tensor, storage->local_shard) < 0)
        return -1;
    storage->exposes_full_data = false;
    /* enqueued kernels may still read the memory, hence the deferred free with streams */
    if (!storage->copy->is_local && free_storage &&
        (storage->full_free ? deferred_free_add(storage->full_free, full, storage->is_segment)
                            : storage_free_full(storage)) < 0)
        return -1;
    return free_storage ? storage_set_state(storage, PARAM_SHARDED) : 0;
}

/* ---- unshard of a handle ---- */

int handle_pre_unshard(struct handle *handle) {
    const struct storage *storage = &handle->storage;
    if (!handle->param.skip_writeback_check && handle_writeback(handle) < 0)
        return -1;
    if (!storage->shard_moved_off_device)
        return 0;
    OWNED *device = PyObject_GetAttr(storage->local_shard, torch_names.device);
    if (!device)
        return -1;
    return flat_param_error(
        &handle->param, PyExc_AssertionError,
        "Expects tensor to be on the compute device %S, was on %S. Move the flat parameter back first, with "
        "handle.flat_param_to(device) or by moving the module.",
        handle->param.device, device);
}

int handle_unshard(struct handle *handle) {
    struct storage *storage = &handle->storage;
    if (storage->param_state != PARAM_SHARDED)
        return 0;
    if (handle_pre_unshard(handle) < 0 || storage_pre_unshard(storage) < 0)
        return -1;
    return storage_unshard(storage, NULL);
}

int handle_unshard_outside_step(struct handle *handle) {
    struct storage *storage = &handle->storage;
    struct buffer *full = &storage->copy->full;
    int result = 0;
    if (!storage->copy->is_local && storage->param_state == PARAM_SHARDED) {
        /* not from the pool, where the next step expects its memory */
        if (storage->full_free)
            result = deferred_free_reclaim(storage->full_free, full);
        if (!result)
            result = buffer_alloc(full);
    }
    if (!result && handle_unshard(handle) == 0 && storage_wait_unshard(storage) == 0)
        return 0;
    return storage->param_state == PARAM_SHARDED ? storage_abandon_unshard(storage) : -1;
}
