/* The shard as the flat parameter is now, and where its unit computes. */
#include "handle/storage.h"
#include "handle/unit_error.h"

#include "torch/kernel_library.h"
#include "torch/names.h"
#include "torch/tensor.h"

/* ---- life ---- */

void storage_bind(struct storage *storage, const struct flat_param *param) {
    storage->param = param;
    storage->copy = &storage->copies[PRECISION_COMPUTE];
}

int storage_init(struct storage *storage, const struct handle_spec *spec) {
    storage->may_offload = spec->offload;
    storage->fallback_dtypes = PyTuple_Pack(2, spec->param_dtype, spec->reduce_dtype);
    return storage->fallback_dtypes ? 0 : -1;
}

void storage_fini(struct storage *storage) {
    Py_CLEAR(storage->unshard_work);
    Py_CLEAR(storage->local_shard);
    Py_CLEAR(storage->orig_dtype);
    storage_fini_copies(storage);
    Py_CLEAR(storage->shard_like.tensor);
    buffer_fini(&storage->device_shard);
    Py_CLEAR(storage->fallback_dtypes);
}

int storage_visit(const struct storage *storage, visitproc visit, void *arg) {
    for (int i = 0; i < PRECISIONS; i++)
        Py_VISIT(storage->copies[i].views);
    return 0;
}

void storage_share(struct storage *storage, struct deferred_free *full, struct pool *pool, bool is_further) {
    storage->full_free = full;
    storage->pool = pool;
    storage->is_further = is_further;
}

/* ---- the shard ---- */

/* Follows the flat parameter, which `.to(dtype)` may have changed (C-018). */
static int init_dtype(struct storage *storage) {
    ref_set(&storage->orig_dtype, PyObject_GetAttr(storage->param->tensor, torch_names.dtype));
    return storage->orig_dtype ? 0 : -1;
}

static int refuse_device(struct storage *storage, const char *why) {
    return unit_error(PyExc_NotImplementedError, storage->param->layout.rank, storage->param->name,
                      "it computes on %S, and there are no kernels for that: %s. Pass "
                      "device_id=torch.device(\"cpu\") to compute on the CPU.",
                      storage->param->device, why);
}

static int init_local_shard(struct storage *storage) {
    const char *why = "";
    ref_set(&storage->local_shard, torch_data(storage->param->tensor));
    if (!storage->local_shard || tensor_view_of(storage->local_shard, &storage->local_view) < 0)
        return -1;
    if (!kernels_of(storage->local_view.device, &why))
        return refuse_device(storage, why);
    int64_t want = storage->param->layout.shard_numel, numel = tensor_view_numel(&storage->local_view);
    if (numel == want)
        return 0;
    return unit_error(PyExc_RuntimeError, storage->param->layout.rank, storage->param->name,
                      "its flat parameter has %lld elements, its shard has %lld. Assign flat_param.data only "
                      "tensors of the shard's size.",
                      (long long)numel, (long long)want);
}

int storage_read_shard(struct storage *storage) {
    return init_dtype(storage) < 0 ? -1 : init_local_shard(storage);
}

bool storage_is_current(const struct storage *storage, const struct tensor_view *data) {
    return data->data == storage->local_view.data && data->dtype == storage->orig_kind;
}

/* ---- where it computes ---- */

int storage_refuse_elsewhere(const struct storage *storage) {
    if (!storage->elsewhere)
        return 0;
    PyObject *device = PyObject_GetAttr(storage->local_shard, torch_names.device);
    if (!device)
        return -1;
    unit_error(PyExc_AssertionError, storage->param->layout.rank, storage->param->name,
               "Expects tensor to be on the compute device %S, was on %S. Bring its flat parameter "
               "back first, by handle.flat_param_to(device) as it was moved away, or by moving the module.",
               storage->param->device, device);
    Py_DECREF(device);
    return -1;
}

static bool lies_elsewhere(const struct storage *storage) {
    const struct tensor_view *compute = &storage->compute_view, *shard = &storage->local_view;
    return !storage->offload && (compute->device != shard->device || compute->device_index != shard->device_index);
}

/* Is the shard in CPU memory, and what computes not? */
static bool offloads(struct storage *storage, const struct tensor_view *compute) {
    return storage->may_offload && storage->local_view.device == DEVICE_CPU && compute->device != DEVICE_CPU;
}

static int init_compute_device(struct storage *storage) {
    const char *why = NULL;
    PyObject *like =
        storage_freed_tensor(storage->param->layout.shard_numel, storage->orig_dtype, storage->param->device);
    if (!like)
        return -1;
    ref_set(&storage->shard_like.tensor, like);
    if (tensor_view_of(like, &storage->compute_view) < 0)
        return -1;
    storage->offload = offloads(storage, &storage->compute_view);
    storage->elsewhere = lies_elsewhere(storage);
    if (!storage->offload && storage->compute_view.device == storage->local_view.device)
        ref_set(&storage->shard_like.tensor, Py_NewRef(storage->local_shard));
    bool is_fake = !storage->local_view.data && storage->param->layout.shard_numel > 0;
    storage->kernels = is_fake ? &no_kernels : kernels_of(storage->compute_view.device, &why);
    if (storage->kernels)
        why = storage->kernels->why_not_on(storage->compute_view.device_index);
    if (!storage->kernels || why)
        return refuse_device(storage, why);
    buffer_fini(&storage->device_shard);
    if (!storage->offload)
        return 0;
    if (buffer_init(&storage->device_shard, storage->param->layout.shard_numel, storage->orig_dtype,
                    storage->param->device, false) < 0)
        return -1;
    return buffer_free(&storage->device_shard);
}

int storage_follow_shard(struct storage *storage) {
    return init_compute_device(storage) < 0 ? -1 : storage_init_copies(storage);
}

int storage_leave_device(struct storage *storage) {
    if (!storage->elsewhere)
        return 0;
    if (deferred_free_forget(storage->full_free, &storage->copy->full) < 0 || storage_forget_node_part(storage) < 0)
        return -1;
    return storage->pool ? pool_empty(storage->pool) : 0;
}

const struct kernel_stream *storage_stream(const struct storage *storage) {
    return tensor_kernel_stream(&storage->compute_view);
}

int storage_wait_in_stream(const struct storage *storage, PyObject **work) {
    if (!storage->full_free)
        return 0;
    PyObject *waited = *work;
    *work = NULL;
    if (collective_wait(waited) < 0)
        return -1;
    *work = Py_NewRef(Py_None);
    return 0;
}
