/* Gathering the unsharded parameters, and freeing them. */
#include "handle/storage.h"
#include "torch/names.h"
#include "torch/tensor.h"

/* ---- what a gather reads ---- */

/* Anew on the stream that is current, to which it belongs from then on. */
static int alloc_input(struct storage *storage, struct buffer *input) {
    return deferred_free_forget(storage->input_free, input) < 0 ? -1 : buffer_alloc(input);
}

/* Not before its last use, where one is enqueued. */
static void free_in_order(struct deferred_free *deferred, struct buffer *buffer) {
    if (deferred_free_forget(deferred, buffer) == 0)
        buffer_free(buffer);
}

/* device_shard = the shard. Nobody waits where the shard's memory is pinned. */
static int enqueue_upload(struct storage *storage) {
    struct buffer *shard = &storage->device_shard;
    if (!storage->offload)
        return 0;
    if (alloc_input(storage, shard) < 0)
        return -1;
    PyObject *done = PyObject_CallMethod(shard->tensor, "copy_", "OO", storage->local_shard, Py_True);
    Py_XDECREF(done);
    return done ? 0 : -1;
}

static int cast_shard(struct storage *storage, struct buffer *output) {
    const struct tensor_view *view = storage->offload ? &storage->device_shard.view : &storage->local_view;
    return tensor_check(storage->kernels->cast_divide(output->view.data, storage->copy->kind, view->data,
                                                      storage->orig_kind, storage->param->layout.shard_numel, 1.0,
                                                      storage_stream(storage)),
                        "cast of a shard");
}

struct buffer *storage_gather_input(struct storage *storage) {
    if (storage->param->sharded && storage->copy->low_precision)
        return &storage->copy->low_precision_shard;
    return storage->offload ? &storage->device_shard : NULL;
}

/* What was brought to the device in order to be cast is not wanted any longer. */
static int cast_input(struct storage *storage) {
    struct buffer *shard = &storage->copy->low_precision_shard;
    if (!storage->param->sharded || !storage->copy->low_precision)
        return 0;
    if (alloc_input(storage, shard) < 0 || cast_shard(storage, shard) < 0)
        return -1;
    return buffer_free(&storage->device_shard);
}

static int enqueue_gather(struct storage *storage) {
    struct buffer *input = storage_gather_input(storage);
    ref_set(&storage->unshard_work, collective_all_gather(&storage->param->shard_group, storage->copy->full.tensor,
                                                          input ? input->tensor : storage->local_shard));
    return storage->unshard_work ? storage_wait_in_stream(storage, &storage->unshard_work) : -1;
}

/* The all-gather failed: nothing of it stays allocated. */
void storage_free_unshard(struct storage *storage) {
    PyObject *type, *value, *traceback;
    PyErr_Fetch(&type, &value, &traceback);
    storage->input_ready = false;
    free_in_order(storage->full_free, &storage->copy->full);
    free_in_order(storage->input_free, &storage->copy->low_precision_shard);
    free_in_order(storage->input_free, &storage->device_shard);
    PyErr_Restore(type, value, traceback);
}

static int free_after_failure(struct storage *storage) {
    storage_free_unshard(storage);
    return -1;
}

static int alloc_in_pool(struct storage *storage, struct buffer *full) {
    int result = pool_enter(storage->pool) < 0 ? -1 : buffer_alloc(full);
    return pool_leave(storage->pool) < 0 ? -1 : result;
}

/* Inside a pool torch's allocator does not give back what others have freed before it is out of memory: outside it does. */
static int alloc_full(struct storage *storage) {
    struct buffer *full = &storage->copy->full;
    if (storage->full_free && deferred_free_take_back(storage->full_free, full) < 0)
        return -1;
    if (!storage->pool || full->allocated)
        return buffer_alloc(full);
    if (alloc_in_pool(storage, full) == 0)
        return 0;
    if (!PyErr_ExceptionMatches(PyExc_RuntimeError))
        return -1;
    PyErr_Clear();
    return buffer_alloc(full);
}

int storage_reserve(struct storage *storage) {
    return storage->copy->is_local || storage->param_state != PARAM_SHARDED ? 0 : alloc_full(storage);
}

int storage_release_reserved(struct storage *storage) {
    return storage->copy->is_local || storage->param_state != PARAM_SHARDED ? 0 : buffer_free(&storage->copy->full);
}

/* Computation on it is enqueued, and with streams may not have run. */
static int free_full(struct storage *storage) {
    struct buffer *full = &storage->copy->full;
    return storage->full_free ? deferred_free_add(storage->full_free, full) : buffer_free(full);
}

int storage_alloc_unsharded(struct storage *storage) {
    return storage->copy->is_local ? 0 : alloc_full(storage);
}

bool storage_wants_memory(const struct storage *storage) {
    return !storage->copy->is_local && storage->param_state == PARAM_SHARDED && !storage->copy->full.allocated;
}

int storage_make_input(struct storage *storage) {
    if (storage->input_ready)
        return 0;
    if (enqueue_upload(storage) < 0 || cast_input(storage) < 0)
        return free_after_failure(storage);
    storage->input_ready = true;
    return 0;
}

static int enqueue_unshard(struct storage *storage) {
    if (storage->copy->is_local)
        return 0;
    if (alloc_full(storage) < 0)
        return -1;
    return storage->param->sharded ? enqueue_gather(storage) : cast_shard(storage, &storage->copy->full);
}

int storage_unshard_enqueue(struct storage *storage) {
    storage->input_ready = false;
    if (enqueue_unshard(storage) < 0)
        return free_after_failure(storage);
    return storage_set_state(storage, PARAM_UNSHARDING);
}

static int wait_for_gather(struct storage *storage) {
    PyObject *work = storage->unshard_work;
    struct buffer *input = storage_gather_input(storage);
    storage->unshard_work = NULL;
    if (work && collective_wait(work) < 0)
        return -1;
    return !input || deferred_free_holds(storage->input_free, input) ? 0 : buffer_free(input);
}

static int abandon_unshard(struct storage *storage) {
    storage_set_state(storage, PARAM_SHARDED);
    return free_after_failure(storage);
}

int storage_unshard_wait(struct storage *storage) {
    if (storage->param_state != PARAM_UNSHARDING)
        return 0;
    if (wait_for_gather(storage) < 0)
        return abandon_unshard(storage);
    if (!storage->copy->is_local && torch_set_data(storage->param->tensor, storage->copy->full_data) < 0)
        return abandon_unshard(storage);
    return storage_set_state(storage, PARAM_UNSHARDED);
}

int storage_reshard(struct storage *storage, bool free_storage) {
    if (storage->param_state == PARAM_UNSHARDING && storage_unshard_wait(storage) < 0)
        return -1;
    if (storage->param_state != PARAM_UNSHARDED)
        return 0;
    if (!storage->copy->is_local && torch_set_data(storage->param->tensor, storage->local_shard) < 0)
        return -1;
    if (!free_storage)
        return 0;
    if (!storage->copy->is_local && free_full(storage) < 0)
        return -1;
    return storage_set_state(storage, PARAM_SHARDED);
}

int64_t storage_unsharded_nbytes(const struct storage *storage) {
    const struct buffer *full = &storage->copy->full;
    return full->allocated ? full->nbytes : 0;
}
