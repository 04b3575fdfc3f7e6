/* Lazy attributes, unshard and reshard. */
#include "handle/handle.h"
#include "torch/kernel_library.h"
#include "torch/names.h"
#include "torch/tensor.h"

#include <string.h>

/* ---- lazy init ---- */

/* Follows the flat parameter, which `.to(dtype)` may have changed (C-018). */
static int init_dtype(struct handle *handle) {
    ref_set(&handle->orig_dtype, PyObject_GetAttr(handle->flat_param, torch_names.dtype));
    return handle->orig_dtype ? 0 : -1;
}

static int refuse_device(struct handle *handle, const char *why) {
    PyErr_Format(PyExc_NotImplementedError,
                 "rank %lld, unit %S: it computes on %S, and there are no kernels for that: %s. Pass "
                 "device_id=torch.device(\"cpu\") to compute on the CPU.",
                 (long long)handle->layout.rank, handle->name, handle->device, why);
    return -1;
}

static int init_local_shard(struct handle *handle) {
    const char *why = "";
    ref_set(&handle->local_shard, torch_data(handle->flat_param));
    if (!handle->local_shard || tensor_view_of(handle->local_shard, &handle->local_view) < 0)
        return -1;
    if (!kernels_of(handle->local_view.device, &why))
        return refuse_device(handle, why);
    int64_t want = handle->layout.shard_numel, numel = tensor_view_numel(&handle->local_view);
    if (numel == want)
        return 0;
    PyErr_Format(
        PyExc_RuntimeError,
        "rank %lld, unit %S: its flat parameter has %lld elements, its shard has %lld. Assign flat_param.data only "
        "tensors of the shard's size.",
        (long long)handle->layout.rank, handle->name, (long long)numel, (long long)want);
    return -1;
}

/* ---- where it computes ---- */

static int refuse_elsewhere(struct handle *handle) {
    PyObject *device = PyObject_GetAttr(handle->local_shard, torch_names.device);
    if (!device)
        return -1;
    PyErr_Format(
        PyExc_AssertionError,
        "rank %lld, unit %S: Expects tensor to be on the compute device %S, was on %S. Bring its flat parameter "
        "back first, by handle.flat_param_to(device) as it was moved away, or by moving the module.",
        (long long)handle->layout.rank, handle->name, handle->device, device);
    Py_DECREF(device);
    return -1;
}

static bool lies_elsewhere(const struct handle *handle) {
    const struct tensor_view *compute = &handle->compute_view, *shard = &handle->local_view;
    return !handle->offload && (compute->device != shard->device || compute->device_index != shard->device_index);
}

/* Is the shard in CPU memory, and what computes not? */
static bool offloads(struct handle *handle, const struct tensor_view *compute) {
    return handle->may_offload && handle->local_view.device == DEVICE_CPU && compute->device != DEVICE_CPU;
}

static int init_compute_device(struct handle *handle) {
    const char *why = "";
    PyObject *like = handle_freed_tensor(handle->layout.shard_numel, handle->orig_dtype, handle->device);
    if (!like)
        return -1;
    ref_set(&handle->shard_like.tensor, like);
    if (tensor_view_of(like, &handle->compute_view) < 0)
        return -1;
    handle->offload = offloads(handle, &handle->compute_view);
    handle->elsewhere = lies_elsewhere(handle);
    if (!handle->offload && handle->compute_view.device == handle->local_view.device)
        ref_set(&handle->shard_like.tensor, Py_NewRef(handle->local_shard));
    bool is_fake = !handle->local_view.data && handle->layout.shard_numel > 0;
    handle->kernels = is_fake ? &no_kernels : kernels_of(handle->compute_view.device, &why);
    if (!handle->kernels)
        return refuse_device(handle, why);
    if (retirement_forget(handle->input_retirement, &handle->device_shard) < 0)
        return -1;
    buffer_fini(&handle->device_shard);
    if (!handle->offload)
        return 0;
    if (buffer_init(&handle->device_shard, handle->layout.shard_numel, handle->orig_dtype, handle->device, false) < 0)
        return -1;
    return buffer_free(&handle->device_shard);
}

const struct kernel_stream *handle_stream(const struct handle *handle) {
    return tensor_kernel_stream(&handle->compute_view);
}

static int init_sources(struct handle *handle) {
    PyMem_Free(handle->sources);
    handle->sources = PyMem_Calloc((size_t)handle->num_params + 1, sizeof *handle->sources);
    if (!handle->sources)
        return tensor_check(STATUS_NO_MEMORY, "gradient sources of a unit");
    for (int64_t i = 0; i < handle->num_params; i++) {
        handle->sources[i].offset = layout_param_offset(&handle->layout, i);
        handle->sources[i].numel = layout_param_numel(&handle->layout, i);
        handle->sources[i].output_strides = handle->param_shapes[i].strides;
    }
    return 0;
}

static int append_size(PyObject *sizes, int64_t size) {
    PyObject *value = PyLong_FromLongLong(size);
    int result = value ? PyList_Append(sizes, value) : -1;
    Py_XDECREF(value);
    return result;
}

/* How to split a shard (or, unsharded, the whole) so that each parameter's part is one piece. */
static int init_shard_pieces(struct handle *handle) {
    PyMem_Free(handle->shard_pieces);
    handle->shard_pieces = PyMem_Calloc((size_t)handle->num_params + 1, sizeof *handle->shard_pieces);
    ref_set(&handle->shard_sizes, PyList_New(0));
    if (!handle->shard_pieces || !handle->shard_sizes)
        return tensor_check(STATUS_NO_MEMORY, "shard pieces of a unit");
    int64_t end = 0, pieces = 0;
    for (int64_t i = 0; i < handle->num_params; i++) {
        const struct layout_shard_range *range = &handle->layout.shard_ranges[i];
        handle->shard_pieces[i] = -1;
        if (!range->in_shard)
            continue;
        if (range->offset_in_shard > end) {
            if (append_size(handle->shard_sizes, range->offset_in_shard - end) < 0)
                return -1;
            pieces++;
        }
        if (append_size(handle->shard_sizes, range->numel_in_shard) < 0)
            return -1;
        handle->shard_pieces[i] = pieces++;
        end = range->offset_in_shard + range->numel_in_shard;
    }
    return end < handle->layout.shard_numel ? append_size(handle->shard_sizes, handle->layout.shard_numel - end) : 0;
}

/* torch refuses a gradient of another dtype unless the leaf says that any will do. */
static int allow_low_precision_grads(struct handle *handle) {
    if (!handle->keep_low_precision_grads || !handle->forms[PRECISION_COMPUTE].low_precision)
        return 0;
    if (PyObject_SetAttr(handle->flat_param, torch_names.grad_dtype, Py_None) < 0)
        return -1;
    for (int64_t i = 0; handle->params && i < handle->num_params; i++)
        if (PyObject_SetAttr(PyList_GetItem(handle->params, i), torch_names.grad_dtype, Py_None) < 0)
            return -1;
    return 0;
}

int handle_init_shard(struct handle *handle) {
    handle->ready = false;
    if (init_dtype(handle) < 0 || init_local_shard(handle) < 0)
        return -1;
    return handle->params ? handle_point_params_at_shard(handle) : 0;
}

int handle_lazy_init(struct handle *handle) {
    if (handle->local_shard && !handle->ready && handle_take_over_params(handle) < 0)
        return -1;
    if (handle_init_shard(handle) < 0 || init_compute_device(handle) < 0 || handle_init_forms(handle) < 0)
        return -1;
    if (init_sources(handle) < 0 || init_shard_pieces(handle) < 0)
        return -1;
    if (allow_low_precision_grads(handle) < 0)
        return -1;
    handle->ready = true;
    return handle->published ? handle_publish(handle) : 0;
}

/* ---- unshard ---- */

/* Anew on the stream that is current, to which it belongs from then on. */
static int alloc_input(struct handle *handle, struct buffer *input) {
    return retirement_forget(handle->input_retirement, input) < 0 ? -1 : buffer_alloc(input);
}

/* Not before its last use, where one is enqueued. */
static void free_in_order(struct retirement *retirement, struct buffer *buffer) {
    if (retirement_forget(retirement, buffer) == 0)
        buffer_free(buffer);
}

/* device_shard = the shard. Nobody waits where the shard's memory is pinned. */
static int enqueue_upload(struct handle *handle) {
    struct buffer *shard = &handle->device_shard;
    if (!handle->offload)
        return 0;
    if (alloc_input(handle, shard) < 0)
        return -1;
    PyObject *done = PyObject_CallMethod(shard->tensor, "copy_", "OO", handle->local_shard, Py_True);
    Py_XDECREF(done);
    return done ? 0 : -1;
}

static int cast_shard(struct handle *handle, struct buffer *output) {
    const struct tensor_view *view = handle->offload ? &handle->device_shard.view : &handle->local_view;
    return tensor_check(handle->kernels->cast_divide(output->view.data, handle->form->kind, view->data,
                                                     handle->orig_kind, handle->layout.shard_numel, 1.0,
                                                     handle_stream(handle)),
                        "cast of a shard");
}

int handle_wait_in_stream(const struct handle *handle, PyObject **work) {
    if (!handle->retirement)
        return 0;
    PyObject *waited = *work;
    *work = NULL;
    if (collective_wait(waited) < 0)
        return -1;
    *work = Py_NewRef(Py_None);
    return 0;
}

struct buffer *handle_gather_input(struct handle *handle) {
    if (handle->sharded && handle->form->low_precision)
        return &handle->form->low_precision_shard;
    return handle->offload ? &handle->device_shard : NULL;
}

/* What was brought to the device in order to be cast is not wanted any longer. */
static int cast_input(struct handle *handle) {
    struct buffer *shard = &handle->form->low_precision_shard;
    if (!handle->sharded || !handle->form->low_precision)
        return 0;
    if (alloc_input(handle, shard) < 0 || cast_shard(handle, shard) < 0)
        return -1;
    return buffer_free(&handle->device_shard);
}

static int enqueue_gather(struct handle *handle) {
    struct buffer *input = handle_gather_input(handle);
    ref_set(&handle->unshard_work, collective_all_gather(&handle->shard_group, handle->form->full.tensor,
                                                         input ? input->tensor : handle->local_shard));
    return handle->unshard_work ? handle_wait_in_stream(handle, &handle->unshard_work) : -1;
}

/* The all-gather failed: nothing of it stays allocated. */
void handle_free_unshard(struct handle *handle) {
    PyObject *type, *value, *traceback;
    PyErr_Fetch(&type, &value, &traceback);
    handle->input_ready = handle->changes_taken = false;
    free_in_order(handle->retirement, &handle->form->full);
    free_in_order(handle->input_retirement, &handle->form->low_precision_shard);
    free_in_order(handle->input_retirement, &handle->device_shard);
    PyErr_Restore(type, value, traceback);
}

static int free_after_failure(struct handle *handle) {
    handle_free_unshard(handle);
    return -1;
}

static int alloc_in_pool(struct handle *handle, struct buffer *full) {
    int result = pool_enter(handle->pool) < 0 ? -1 : buffer_alloc(full);
    return pool_leave(handle->pool) < 0 ? -1 : result;
}

/* Inside a pool torch's allocator does not give back what others have freed before it is out of memory: outside it does. */
static int alloc_full(struct handle *handle) {
    struct buffer *full = &handle->form->full;
    if (handle->retirement && retirement_take_back(handle->retirement, full) < 0)
        return -1;
    if (!handle->pool || full->allocated)
        return buffer_alloc(full);
    if (alloc_in_pool(handle, full) == 0)
        return 0;
    if (!PyErr_ExceptionMatches(PyExc_RuntimeError))
        return -1;
    PyErr_Clear();
    return buffer_alloc(full);
}

int handle_reserve(struct handle *handle) {
    return handle->form->is_local || handle->param_state != PARAM_SHARDED ? 0 : alloc_full(handle);
}

int handle_release_reserved(struct handle *handle) {
    return handle->form->is_local || handle->param_state != PARAM_SHARDED ? 0 : buffer_free(&handle->form->full);
}

/* Computation on it is enqueued, and with streams may not have run. */
static int free_full(struct handle *handle) {
    struct buffer *full = &handle->form->full;
    return handle->retirement ? retirement_add(handle->retirement, full) : buffer_free(full);
}

int handle_alloc_unsharded(struct handle *handle) {
    if (!handle->skip_writeback_check && handle_writeback(handle) < 0)
        return -1;
    return handle->form->is_local ? 0 : alloc_full(handle);
}

int handle_take_changes(struct handle *handle) {
    if (handle->changes_taken || handle->param_state != PARAM_SHARDED)
        return 0;
    if (!handle->skip_writeback_check && handle_writeback(handle) < 0)
        return -1;
    if (handle->elsewhere)
        return refuse_elsewhere(handle);
    handle->changes_taken = true;
    return 0;
}

int handle_pre_unshard(struct handle *handle) {
    if (handle->param_state != PARAM_SHARDED || handle->input_ready)
        return 0;
    if (handle_take_changes(handle) < 0)
        return -1;
    if (enqueue_upload(handle) < 0 || cast_input(handle) < 0)
        return free_after_failure(handle);
    handle->input_ready = true;
    return 0;
}

static int enqueue_unshard(struct handle *handle) {
    if (handle->form->is_local)
        return 0;
    if (alloc_full(handle) < 0)
        return -1;
    return handle->sharded ? enqueue_gather(handle) : cast_shard(handle, &handle->form->full);
}

int handle_unshard_enqueue(struct handle *handle) {
    if (handle->param_state != PARAM_SHARDED)
        return 0;
    if (handle_pre_unshard(handle) < 0)
        return -1;
    handle->input_ready = handle->changes_taken = false;
    if (enqueue_unshard(handle) < 0)
        return free_after_failure(handle);
    return handle_set_param_state(handle, PARAM_UNSHARDING);
}

static int wait_for_gather(struct handle *handle) {
    PyObject *work = handle->unshard_work;
    struct buffer *input = handle_gather_input(handle);
    handle->unshard_work = NULL;
    if (work && collective_wait(work) < 0)
        return -1;
    return !input || retirement_holds(handle->input_retirement, input) ? 0 : buffer_free(input);
}

static int abandon_unshard(struct handle *handle) {
    handle_set_param_state(handle, PARAM_SHARDED);
    return free_after_failure(handle);
}

int handle_unshard_wait(struct handle *handle) {
    if (handle->param_state != PARAM_UNSHARDING)
        return 0;
    if (wait_for_gather(handle) < 0)
        return abandon_unshard(handle);
    if (!handle->form->is_local && torch_set_data(handle->flat_param, handle->form->full_data) < 0)
        return abandon_unshard(handle);
    return handle_set_param_state(handle, PARAM_UNSHARDED);
}

int handle_reshard(struct handle *handle, bool free_storage) {
    if (handle->param_state == PARAM_UNSHARDING && handle_unshard_wait(handle) < 0)
        return -1;
    if (handle->param_state != PARAM_UNSHARDED)
        return 0;
    if (!handle->form->is_local && torch_set_data(handle->flat_param, handle->local_shard) < 0)
        return -1;
    if (!free_storage)
        return 0;
    if (!handle->form->is_local && free_full(handle) < 0)
        return -1;
    return handle_set_param_state(handle, PARAM_SHARDED);
}

bool handle_reshards_after_forward(const struct handle *handle) {
    return handle->strategy == FULL_SHARD || handle->strategy == HYBRID_SHARD;
}

int64_t handle_unsharded_nbytes(const struct handle *handle) {
    const struct buffer *full = &handle->form->full;
    return full->allocated ? full->nbytes : 0;
}
