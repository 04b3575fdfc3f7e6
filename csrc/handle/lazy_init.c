/* Lazy init, and what follows where the flat parameter's data has become another one. */
#include "handle/handle.h"
#include "handle/unit_error.h"
#include "torch/names.h"
#include "torch/tensor.h"

#include "base/check.h"

int handle_init_shard(struct handle *handle) {
    handle->ready = false;
    if (storage_read_shard(&handle->storage) < 0)
        return -1;
    return handle->param.params ? slots_point_params_at(&handle->slots, handle->storage.local_shard) : 0;
}

int handle_lazy_init(struct handle *handle) {
    if (handle->storage.local_shard && !handle->ready && edits_take_over_params(&handle->edits) < 0)
        return -1;
    if (handle_init_shard(handle) < 0 || storage_follow_shard(&handle->storage) < 0)
        return -1;
    slots_forget_wrapped(&handle->slots);
    if (gradients_lazy_init(&handle->gradients) < 0)
        return -1;
    handle->ready = true;
    if (published_storage(&handle->published, &handle->storage) < 0)
        return -1;
    CHECKED(handle_check(handle));
    return 0;
}

int handle_publish(struct handle *handle) {
    if (published_begin(&handle->published, handle->param.tensor) < 0)
        return -1;
    return published_storage(&handle->published, &handle->storage);
}

static int follow_other_data(struct handle *handle) {
    edits_note_copied(&handle->edits);
    if (!handle->param.use_orig_params && slots_show_nothing(&handle->slots) < 0)
        return -1;
    if (handle_lazy_init(handle) < 0)
        return -1;
    return handle->param.use_orig_params ? 0 : handle_show_views(handle);
}

/* `flat_param.data = other` is honoured: the new tensor becomes the shard. */
int handle_follow_flat_param(struct handle *handle) {
    struct tensor_view view;
    PyObject *left;
    if (!handle->ready)
        return handle_lazy_init(handle);
    if (tensor_view_of(handle->param.tensor, &view) < 0)
        return -1;
    if (storage_is_current(&handle->storage, &view))
        return 0;
    if (torch_leave_inference_mode(&left) < 0)
        return -1;
    int result = follow_other_data(handle);
    return torch_return_to_inference_mode(left) < 0 ? -1 : result;
}

int handle_writeback(struct handle *handle) {
    if (handle_follow_flat_param(handle) < 0 || handle_take_over_views(handle) < 0)
        return -1;
    return edits_take_over_params(&handle->edits);
}

/* ---- a flat parameter that moves ---- */

static int refuse_to_move(struct handle *handle) {
    return unit_error(PyExc_AssertionError, handle->param.layout.rank, handle->param.name,
                      "its flat parameter cannot be moved in state %s. Move it between steps, outside of "
                      "summon_full_params.",
                      training_state_name(handle->training_state));
}

int handle_leave(struct handle *handle) {
    if (handle->training_state != USE_IDLE)
        return 0;
    if (handle_collect_user_grads(handle) < 0)
        return -1;
    if (handle->storage.param_state == PARAM_SHARDED)
        return 0;
    if (handle_take_over_views(handle) < 0)
        return -1;
    return storage_reshard(&handle->storage, true) < 0 ? -1 : handle_show_sharded(handle);
}

int handle_follow(struct handle *handle) {
    if (slots_show_nothing(&handle->slots) < 0)
        return -1;
    if ((handle->param.use_orig_params ? handle_init_shard(handle) : handle_lazy_init(handle)) < 0)
        return -1;
    return handle_show_sharded(handle) < 0 ? -1 : gradients_follow(&handle->gradients);
}

static PyObject *moved(PyObject *tensor, PyObject *args, PyObject *kwargs) {
    PyObject *to = PyObject_GetAttrString(tensor, "to");
    PyObject *result = to ? PyObject_Call(to, args, kwargs) : NULL;
    Py_XDECREF(to);
    return result;
}

static int follow_to(struct handle *handle, PyObject *data) {
    if (torch_set_data(handle->param.tensor, data) < 0 || handle_follow_flat_param(handle) < 0)
        return -1;
    return storage_leave_device(&handle->storage);
}

/* What could not be followed is left for what was there before; the exception stays. */
static void move_back(struct handle *handle, PyObject *data) {
    PyObject *type, *value, *traceback;
    PyErr_Fetch(&type, &value, &traceback);
    if (follow_to(handle, data) < 0)
        PyErr_WriteUnraisable(handle->param.name);
    PyErr_Restore(type, value, traceback);
}

int handle_flat_param_to(struct handle *handle, PyObject *args, PyObject *kwargs) {
    if (handle->training_state != USE_IDLE)
        return refuse_to_move(handle);
    if ((!handle->param.skip_writeback_check && handle_writeback(handle) < 0) ||
        storage_reshard(&handle->storage, true) < 0)
        return -1;
    PyObject *data = torch_data(handle->param.tensor), *to = data ? moved(data, args, kwargs) : NULL;
    int result = to ? follow_to(handle, to) : -1;
    if (result < 0 && to)
        move_back(handle, data);
    Py_XDECREF(data);
    Py_XDECREF(to);
    return result;
}
