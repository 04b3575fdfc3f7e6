/* The shard, its compute device, the precision copies and torch's attributes on the flat parameter. */
#include "handle/storage.h"

#include "torch/kernel_library.h"
#include "torch/py_torch.h"
#include "torch/tensor.h"

/* ---- init and fini ---- */

int storage_init(struct storage *storage, const struct config *config) {
    PyObject *param_dtype = config->param_dtype, *reduce_dtype = config->reduce_dtype;
    storage->may_offload = config->offload_params;
    storage->fallback_dtypes =
        PyTuple_Pack(2, param_dtype, reduce_dtype == Py_None ? param_dtype : reduce_dtype);
    return storage->fallback_dtypes ? 0 : -1;
}

void storage_share(struct storage *storage, struct deferred_free *full, struct pool *pool, bool is_segment) {
    storage->full_free = full;
    storage->pool = pool;
    storage->is_segment = is_segment;
}

void storage_leave_root(struct storage *storage) {
    for (int i = 0; i < PRECISIONS; i++)
        if (deferred_free_flush_buffer(storage->full_free, &storage->copies[i].full) < 0)
            PyErr_WriteUnraisable(storage->param->name);
    storage_share(storage, NULL, NULL, false);
}

/* ---- the shard ---- */

/* `.to(dtype)` by the user may have changed the dtype since the last call. */
int storage_read_shard(struct storage *storage) {
    ref_set(&storage->orig_dtype, PyObject_GetAttr(storage->param->tensor, torch_names.dtype));
    if (!storage->orig_dtype)
        return -1;
    ref_set(&storage->local_shard, torch_data(storage->param->tensor));
    if (!storage->local_shard || tensor_view_of(storage->local_shard, &storage->local_view) < 0)
        return -1;
    int64_t want = storage->param->layout.shard_numel, numel = tensor_view_numel(&storage->local_view);
    if (numel == want)
        return 0;
    return flat_param_error(storage->param, PyExc_RuntimeError,
                            "the flat parameter has %lld elements, but its shard has %lld. Assign only "
                            "tensors of the shard's size to flat_param.data.",
                            (long long)numel, (long long)want);
}

/* ---- compute device ---- */

const struct kernel_stream *storage_stream(const struct storage *storage) {
    return tensor_kernel_stream(&storage->compute_view);
}

int storage_apply(const struct storage *storage, elementwise_kernel *kernel, PyObject *output,
                  PyObject *input, double divisor, const char *operation) {
    struct tensor_view to, from;
    if (tensor_view_of(output, &to) < 0 || tensor_view_of(input, &from) < 0)
        return -1;
    return tensor_check(kernel(to.data, to.dtype, from.data, from.dtype, tensor_view_numel(&from), divisor,
                               storage_stream(storage)),
                        operation);
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

/* ---- precision copies: built on first use ---- */

/* Return a tensor without storage, a template for later allocations. New reference. */
static PyObject *freed_tensor(int64_t numel, PyObject *dtype, PyObject *device) {
    struct buffer buffer;
    if (buffer_init(&buffer, numel, dtype, device, false) < 0)
        return NULL;
    PyObject *tensor = buffer_free(&buffer) < 0 ? NULL : Py_NewRef(buffer.tensor);
    buffer_fini(&buffer);
    return tensor;
}

/* Reuse existing tensors as templates where the dtypes agree. Only mixed precision needs others. */
static int init_likes(struct storage *storage, struct precision_copy *copy) {
    int64_t padded = storage->param->layout.padded_numel, shard = storage->param->layout.shard_numel;
    PyObject *gradient = copy->is_local ? storage->local_shard : copy->full.tensor;
    bool same = copy->reduce_dtype == copy->dtype, same_shard = copy->reduce_dtype == storage->orig_dtype;
    struct tensor_view view;
    ref_set(&copy->gradient_like, Py_NewRef(gradient));
    ref_set(&copy->reduce_input_like,
            same ? Py_NewRef(gradient) : freed_tensor(padded, copy->reduce_dtype, storage->param->device));
    ref_set(&copy->reduce_output_like, same_shard
                                           ? Py_NewRef(storage->shard_like)
                                           : freed_tensor(shard, copy->reduce_dtype, storage->param->device));
    if (!copy->reduce_input_like || !copy->reduce_output_like)
        return -1;
    copy->kind = copy->is_local ? storage->orig_kind : copy->full.view.dtype;
    if (!same && tensor_view_of(copy->reduce_input_like, &view) < 0)
        return -1;
    copy->reduce_kind = same ? copy->kind : view.dtype;
    return 0;
}

/* Set full_data and own_part to slices of `full`. Return 0 or -1. */
static int slice_full(const struct flat_param *param, struct precision_copy *copy, PyObject *full) {
    const struct flat_layout *layout = &param->layout;
    ref_set(&copy->full_data, torch_part(full, 0, layout->numel));
    ref_set(&copy->own_part,
            torch_part(full, layout->sharded ? layout->shard_start : 0, layout->shard_numel));
    return copy->full_data && copy->own_part ? 0 : -1;
}

static void copy_fini(struct precision_copy *copy) {
    Py_CLEAR(copy->dtype);
    Py_CLEAR(copy->reduce_dtype);
    freed_views_fini(&copy->freed_views);
    Py_CLEAR(copy->views);
    PyMem_Free(copy->view_versions);
    copy->view_versions = NULL;
    Py_CLEAR(copy->full_data);
    Py_CLEAR(copy->snapshot);
    buffer_fini(&copy->full);
    Py_CLEAR(copy->own_part);
    Py_CLEAR(copy->low_precision_shard);
    Py_CLEAR(copy->reduce_input_like);
    Py_CLEAR(copy->reduce_output_like);
    Py_CLEAR(copy->gradient_like);
}

/* Free the storage after its last use, then the copy. */
static void drop_copy(struct storage *storage, struct precision_copy *copy) {
    if (deferred_free_flush_buffer(storage->full_free, &copy->full) < 0)
        PyErr_WriteUnraisable(storage->param->name);
    copy_fini(copy);
}

void storage_fini(struct storage *storage) {
    Py_CLEAR(storage->unshard_work);
    Py_CLEAR(storage->local_shard);
    Py_CLEAR(storage->orig_dtype);
    for (int i = 0; i < PRECISIONS; i++)
        drop_copy(storage, &storage->copies[i]);
    Py_CLEAR(storage->shard_like);
    buffer_fini(&storage->device_shard);
    Py_CLEAR(storage->fallback_dtypes);
    Py_CLEAR(storage->attributes);
}

/* Steals `views`. Return 0 or -1. */
static int replace_views(const struct storage *storage, struct precision_copy *copy, PyObject *views) {
    freed_views_fini(&copy->freed_views);
    ref_set(&copy->views, views);
    if (copy->is_local)
        return 0;
    int result = freed_views_init(&copy->freed_views, views);
    if (copy == storage->copy && storage->param_state == PARAM_UNSHARDED)
        freed_views_set(&copy->freed_views, false);
    return result;
}

/* A graph may still read the former views, so they keep their history and autograd node. The former views are
 * no longer tracked as freed views. */
int storage_detach_views(struct storage *storage) {
    int64_t num_params = storage->param->num_params;
    for (int i = 0; i < PRECISIONS; i++) {
        struct precision_copy *copy = &storage->copies[i];
        if (!copy->views)
            continue;
        freed_views_set(&copy->freed_views, false);
        PyObject *views = PyTuple_New((Py_ssize_t)num_params);
        for (int64_t p = 0; views && p < num_params; p++) {
            PyObject *view =
                PyObject_CallMethodObjArgs(PyTuple_GetItem(copy->views, p), torch_names.detach, NULL);
            if (!view || PyTuple_SetItem(views, p, view) < 0)
                Py_CLEAR(views);
        }
        if (!views || replace_views(storage, copy, views) < 0)
            return -1;
    }
    return 0;
}

/* ---- the copy in use ---- */

static int build_copy(struct storage *storage, struct precision_copy *copy) {
    const struct flat_param *flat_param = storage->param;
    const struct flat_layout *layout = &flat_param->layout;
    PyObject *device = flat_param->device;
    /* A dtype that the user left open follows the flat parameter's, which `.to(dtype)` may have changed. A
     * low-precision hook fixes the reduce dtype. */
    bool in_full = copy == &storage->copies[PRECISION_FULL];
    PyObject *param = PyTuple_GetItem(storage->fallback_dtypes, 0),
             *reduce = PyTuple_GetItem(storage->fallback_dtypes, 1);
    if (!param || !reduce)
        return -1;
    bool has_param_dtype = param != Py_None && !in_full;
    bool has_reduce_dtype = reduce != Py_None && (!in_full || storage->reduce_dtype_is_fixed);
    ref_set(&copy->dtype, Py_NewRef(has_param_dtype ? param : storage->orig_dtype));
    ref_set(&copy->reduce_dtype, Py_NewRef(has_reduce_dtype ? reduce : copy->dtype));
    copy->low_precision = copy->dtype != storage->orig_dtype;
    copy->is_local = !flat_param->sharded && !copy->low_precision && !storage->offload;
    /* build the views while `full` has storage, then free the storage */
    if (!copy->is_local && buffer_init(&copy->full, layout->padded_numel, copy->dtype, device, true) < 0)
        return -1;
    PyObject *full = copy->is_local ? storage->local_shard : copy->full.tensor;
    copy->views = slice_full(flat_param, copy, full) == 0 ? flat_param_views(flat_param, full) : NULL;
    if (copy->views && !(copy->view_versions = PyMem_Calloc((size_t)flat_param->num_params, sizeof(int64_t))))
        return tensor_check(STATUS_NO_MEMORY, "views of a unit");
    if (!copy->views || (!copy->is_local && (buffer_free(&copy->full) < 0 ||
                                             freed_views_init(&copy->freed_views, copy->views) < 0)))
        return -1;
    if (flat_param->sharded && copy->low_precision) {
        ref_set(&copy->low_precision_shard, freed_tensor(layout->shard_numel, copy->dtype, device));
        if (!copy->low_precision_shard)
            return -1;
    }
    return init_likes(storage, copy);
}

/* Build the copy's tensors, without storage. */
static int make_copy(struct storage *storage, enum precision precision) {
    struct precision_copy *copy = &storage->copies[precision];
    PyObject *inference_guard;
    if (copy->views)
        return 0;
    if (torch_leave_inference_mode(&inference_guard) < 0)
        return -1;
    int result = build_copy(storage, copy);
    if (result < 0)
        copy_fini(copy);
    return torch_return_to_inference_mode(inference_guard) < 0 ? -1 : result;
}

int storage_use_copy(struct storage *storage, enum precision precision) {
    if (make_copy(storage, precision) < 0)
        return -1;
    storage->copy = &storage->copies[precision];
    return 0;
}

/* Keep a copy that still fits the shard: a pending backward may unshard its views. */
static int init_copies(struct storage *storage) {
    enum precision precision = storage_precision(storage);
    for (int i = 0; i < PRECISIONS; i++) {
        struct precision_copy *copy = &storage->copies[i];
        bool becomes_local = !storage->param->sharded && !copy->low_precision && !storage->offload;
        bool fits = copy->views && !becomes_local && !copy->is_local &&
                    storage->orig_kind == storage->local_view.dtype && dtype_is_known(storage->orig_kind);
        if (!fits)
            drop_copy(storage, copy);
        else if (init_likes(storage, copy) < 0)
            return -1;
    }
    storage->orig_kind = storage->local_view.dtype;
    return storage_use_copy(storage, PRECISION_COMPUTE) < 0 ? -1 : storage_use_copy(storage, precision);
}

int storage_follow_shard(struct storage *storage) {
    const char *why = NULL;
    const struct tensor_view *compute = &storage->compute_view, *shard = &storage->local_view;
    int64_t numel = storage->param->layout.shard_numel;
    PyObject *like = freed_tensor(numel, storage->orig_dtype, storage->param->device);
    if (!like)
        return -1;
    ref_set(&storage->shard_like, like);
    if (tensor_view_of(like, &storage->compute_view) < 0)
        return -1;
    storage->offload = storage->may_offload && shard->device == DEVICE_CPU && compute->device != DEVICE_CPU;
    storage->shard_moved_off_device = !storage->offload && (compute->device != shard->device ||
                                                            compute->device_index != shard->device_index);
    if (!storage->offload && compute->device == shard->device)
        ref_set(&storage->shard_like, Py_NewRef(storage->local_shard));
    bool is_fake = !shard->data && numel > 0;
    storage->kernels = is_fake ? &no_kernels : kernels_of(compute->device, compute->device_index, &why);
    buffer_fini(&storage->device_shard);
    if (storage->offload &&
        (buffer_init(&storage->device_shard, numel, storage->orig_dtype, storage->param->device, false) < 0 ||
         buffer_free(&storage->device_shard) < 0))
        return -1;
    return init_copies(storage);
}

/* ---- freeing ---- */

/* Move `full` and its views to new memory. The views keep their history, and tensors saved by graphs keep the
 * old memory. The new tuple makes param_views wrap the views again. */
static int renew_full(struct storage *storage) {
    struct precision_copy *copy = storage->copy;
    if (buffer_replace_storage(&copy->full) < 0 || slice_full(storage->param, copy, copy->full.tensor) < 0)
        return -1;
    OWNED *renewed = flat_param_views(storage->param, copy->full.tensor);
    OWNED *views = renewed ? PySequence_List(copy->views) : NULL;
    for (int64_t i = 0; views && i < storage->param->num_params; i++)
        if (torch_set_data(PyList_GetItem(views, i), PyTuple_GetItem(renewed, i)) < 0)
            return -1;
    freed_views_set(&copy->freed_views, false);
    PyObject *tuple = views ? PyList_AsTuple(views) : NULL;
    return tuple ? replace_views(storage, copy, tuple) : -1;
}

int storage_free_full(struct storage *storage) {
    struct buffer *full = &storage->copy->full;
    PyObject *inference_guard;
    if (buffer_free(full) == 0)
        return 0;
    OWNED *error = PyErr_GetRaisedException();
    if (buffer_is_exported(full) <= 0) {
        PyErr_SetRaisedException(Py_XNewRef(error));
        return -1;
    }
    if (torch_leave_inference_mode(&inference_guard) < 0)
        return -1;
    int result = renew_full(storage);
    if (torch_return_to_inference_mode(inference_guard) < 0 || result < 0)
        return -1;
    return buffer_free(full);
}

/* ---- writes ---- */

int storage_take_snapshot(struct storage *storage) {
    struct precision_copy *copy = storage->copy;
    if (!copy->snapshot)
        copy->snapshot = PyObject_CallMethod(copy->own_part, "clone", NULL);
    return copy->snapshot ? 0 : -1;
}

void storage_drop_snapshot(struct storage *storage) {
    Py_CLEAR(storage->copy->snapshot);
}

int storage_pop_written(const struct storage *storage, int64_t param) {
    const struct precision_copy *copy = storage->copy;
    const struct layout_shard_range *range = &storage->param->layout.shard_ranges[param];
    int64_t *seen = &copy->view_versions[param];
    int64_t version = torch_version(PyTuple_GetItem(copy->views, param));
    if (version < 0)
        return -1;
    if (version != *seen) {
        *seen = version;
        return 1;
    }
    if (!copy->snapshot || !range->in_shard)
        return 0;
    OWNED *now = torch_part(copy->own_part, range->offset_in_shard, range->numel_in_shard);
    OWNED *before = now ? torch_part(copy->snapshot, range->offset_in_shard, range->numel_in_shard) : NULL;
    /* compare bytes, so that NaN equals itself */
    ref_set(&now, before ? PyObject_CallMethodObjArgs(now, torch_names.view, torch_names.uint8, NULL) : NULL);
    ref_set(&before,
            now ? PyObject_CallMethodObjArgs(before, torch_names.view, torch_names.uint8, NULL) : NULL);
    OWNED *equal = before ? PyObject_CallMethod(now, "equal", "O", before) : NULL;
    return equal ? equal == Py_False : -1;
}

int storage_fix_reduce_dtype(struct storage *storage, PyObject *dtype) {
    PyObject *param_dtype = PyTuple_GetItem(storage->fallback_dtypes, 0);
    PyObject *dtypes = param_dtype ? PyTuple_Pack(2, param_dtype, dtype) : NULL;
    if (!dtypes)
        return -1;
    ref_set(&storage->fallback_dtypes, dtypes);
    storage->reduce_dtype_is_fixed = true;
    drop_copy(storage, &storage->copies[PRECISION_FULL]);
    if (!storage->copy->views)
        return 0;
    ref_set(&storage->copy->reduce_dtype, Py_NewRef(dtype));
    return init_likes(storage, storage->copy);
}

/* ---- attributes ---- */

int storage_publish_attributes(struct storage *storage) {
    if (!storage->attributes)
        storage->attributes = PyObject_GetAttrString(storage->param->tensor, "__dict__");
    return storage->attributes ? storage_update_attributes(storage) : -1;
}

int storage_set_attribute(const struct storage *storage, const char *name, PyObject *value) {
    if (!storage->attributes)
        return 0;
    OWNED *key = PyUnicode_InternFromString(name);
    int result = key ? 0 : -1;
    if (key && value)
        result = PyDict_SetItem(storage->attributes, key, value);
    else if (key && PyDict_Contains(storage->attributes, key) == 1)
        result = PyDict_DelItem(storage->attributes, key);
    return PyErr_Occurred() ? -1 : result;
}

int storage_update_attributes(struct storage *storage) {
    const struct precision_copy *compute = &storage->copies[PRECISION_COMPUTE];
    bool sharded = storage->param->sharded, two_precisions = sharded && compute->low_precision;
    if (!storage->attributes)
        return 0;
    if (two_precisions && make_copy(storage, PRECISION_FULL) < 0)
        return -1;
    PyObject *unsharded_full = storage->copies[PRECISION_FULL].full.tensor;
    /* without sharding, the unsharded parameters in low precision are torch's _mp_shard */
    PyObject *mp_shard = sharded ? compute->low_precision_shard : compute->full.tensor;
    if (storage_set_attribute(storage, "_local_shard", storage->local_shard) < 0 ||
        storage_set_attribute(storage, "_full_param_padded", sharded ? compute->full.tensor : NULL) < 0 ||
        storage_set_attribute(storage, "_full_prec_full_param_padded",
                              two_precisions ? unsharded_full : NULL) < 0)
        return -1;
    return storage_set_attribute(storage, "_mp_shard", compute->low_precision ? mp_shard : NULL);
}
