/* The unsharded parameters in one precision: made when first wanted, and which of them is in use. */
#include "handle/handle.h"
#include "torch/names.h"
#include "torch/tensor.h"

/* ---- what a form is made of ---- */

static PyObject *dtype_or(PyObject *chosen, PyObject *fallback) {
    return Py_NewRef(chosen != Py_None ? chosen : fallback);
}

/* The user's dtypes win; what was left open follows the flat parameter, which `.to(dtype)` may have changed (C-018). A
 * low-precision hook reduces in its own dtype whatever it is given. */
static int init_dtypes(struct handle *handle, struct form *form) {
    PyObject *param = PyTuple_GetItem(handle->fallback_dtypes, 0),
             *reduce = PyTuple_GetItem(handle->fallback_dtypes, 1);
    if (!param || !reduce)
        return -1;
    if (form == &handle->forms[PRECISION_FULL]) {
        param = Py_None;
        reduce = handle->comm_hook.native ? reduce : Py_None;
    }
    ref_set(&form->dtype, dtype_or(param, handle->orig_dtype));
    ref_set(&form->reduce_dtype, dtype_or(reduce, form->dtype));
    form->low_precision = form->dtype != handle->orig_dtype;
    form->is_local = !handle->sharded && !form->low_precision && !handle->offload;
    return 0;
}

/* A tensor that only says what to allocate later. New reference. */
PyObject *handle_freed_tensor(int64_t numel, PyObject *dtype, PyObject *device) {
    struct buffer buffer;
    if (buffer_init(&buffer, numel, dtype, device, false) < 0)
        return NULL;
    PyObject *tensor = buffer_free(&buffer) < 0 ? NULL : Py_NewRef(buffer.tensor);
    buffer_fini(&buffer);
    return tensor;
}

/* Tensors at hand say how gradients look where the dtypes agree; only mixed precision needs others. */
static int init_likes(struct handle *handle, struct form *form) {
    int64_t padded = handle->layout.padded_numel, shard = handle->layout.shard_numel;
    PyObject *gradient = form->is_local ? handle->local_shard : form->full.tensor;
    bool same = form->reduce_dtype == form->dtype, same_shard = form->reduce_dtype == handle->orig_dtype;
    struct tensor_view view;
    ref_set(&form->gradient_like.tensor, Py_NewRef(gradient));
    ref_set(&form->reduce_input_like.tensor,
            same ? Py_NewRef(gradient) : handle_freed_tensor(padded, form->reduce_dtype, handle->device));
    ref_set(&form->reduce_output_like.tensor, same_shard
                                                  ? Py_NewRef(handle->shard_like.tensor)
                                                  : handle_freed_tensor(shard, form->reduce_dtype, handle->device));
    if (!form->reduce_input_like.tensor || !form->reduce_output_like.tensor)
        return -1;
    if (tensor_view_of(form->reduce_input_like.tensor, &view) < 0)
        return -1;
    form->reduce_kind = view.dtype;
    form->kind = form->is_local ? handle->orig_kind : form->full.view.dtype;
    return 0;
}

static PyObject *unpadded(struct handle *handle, PyObject *full) {
    PyObject *part = PyObject_CallMethod(full, "narrow", "iLL", 0, 0LL, (long long)handle->layout.numel);
    PyObject *data = part ? torch_data(part) : NULL;
    Py_XDECREF(part);
    return data;
}

/* The storage is there while views of it are made, and not after. */
static int init_storage(struct handle *handle, struct form *form) {
    PyObject *full = handle->local_shard;
    if (!form->is_local) {
        if (buffer_init(&form->full, handle->layout.padded_numel, form->dtype, handle->device, true) < 0)
            return -1;
        full = form->full.tensor;
    }
    form->full_data = unpadded(handle, full);
    form->views = form->full_data ? handle_make_views(handle, full) : NULL;
    if (!form->views || (!form->is_local && buffer_free(&form->full) < 0))
        return -1;
    if (!handle->sharded || !form->low_precision)
        return 0;
    struct buffer *shard = &form->low_precision_shard;
    if (buffer_init(shard, handle->layout.shard_numel, form->dtype, handle->device, false) < 0)
        return -1;
    return buffer_free(shard);
}

static void form_fini(struct form *form) {
    Py_CLEAR(form->dtype);
    Py_CLEAR(form->reduce_dtype);
    Py_CLEAR(form->views);
    Py_CLEAR(form->full_data);
    buffer_fini(&form->full);
    buffer_fini(&form->low_precision_shard);
    Py_CLEAR(form->reduce_input_like.tensor);
    Py_CLEAR(form->reduce_output_like.tensor);
    Py_CLEAR(form->gradient_like.tensor);
}

static int form_init(struct handle *handle, struct form *form) {
    if (init_dtypes(handle, form) == 0 && init_storage(handle, form) == 0 && init_likes(handle, form) == 0)
        return 0;
    form_fini(form);
    return -1;
}

/* Its storage goes with it, but not before its last use. */
static void drop_form(struct handle *handle, struct form *form) {
    if (retirement_forget(handle->retirement, &form->full) < 0 ||
        retirement_forget(handle->input_retirement, &form->low_precision_shard) < 0)
        PyErr_WriteUnraisable(handle->name);
    form_fini(form);
}

void handle_fini_forms(struct handle *handle) {
    for (int i = 0; i < PRECISIONS; i++)
        drop_form(handle, &handle->forms[i]);
}

/* ---- the form in use ---- */

int handle_make_form(struct handle *handle, enum precision precision) {
    struct form *form = &handle->forms[precision];
    return form->views ? 0 : form_init(handle, form);
}

static int take(struct handle *handle, enum precision precision) {
    if (handle_make_form(handle, precision) < 0)
        return -1;
    Py_CLEAR(handle->wrapped_views); /* of the form that was in use */
    handle->form = &handle->forms[precision];
    return 0;
}

/* Is it good for the shard as it is now? Then it stays: a backward may yet gather what its views belong to. */
static bool still_fits(const struct handle *handle, const struct form *form) {
    bool is_local = !handle->sharded && !form->low_precision && !handle->offload;
    bool same_dtype = handle->orig_kind == handle->local_view.dtype && handle->orig_kind != DTYPE_OTHER;
    return form->views && same_dtype && !is_local && !form->is_local;
}

int handle_init_forms(struct handle *handle) {
    enum precision precision = (enum precision)(handle->form - handle->forms);
    for (int i = 0; i < PRECISIONS; i++) {
        if (!still_fits(handle, &handle->forms[i]))
            drop_form(handle, &handle->forms[i]);
        else if (init_likes(handle, &handle->forms[i]) < 0)
            return -1;
    }
    handle->orig_kind = handle->local_view.dtype;
    return take(handle, PRECISION_COMPUTE) < 0 ? -1 : take(handle, precision);
}

bool handle_has_mixed_precision(const struct handle *handle) {
    const struct form *form = &handle->forms[PRECISION_COMPUTE];
    return form->low_precision || form->reduce_dtype != handle->orig_dtype;
}

/* The slots let go of the views; without original parameters they show those of the form that is in use then. */
static int hide_views(struct handle *handle) {
    if (handle->shown != SHOWN_VIEWS)
        return 0;
    if (handle->use_orig_params)
        return handle_show_sharded(handle);
    handle->shown = SHOWN_NOTHING;
    return 0;
}

int handle_use_precision(struct handle *handle, enum precision precision) {
    if (handle->form == &handle->forms[precision])
        return 0;
    bool shows_views = handle->shown == SHOWN_VIEWS && !handle->use_orig_params;
    if (handle_reshard(handle, true) < 0 || hide_views(handle) < 0 || take(handle, precision) < 0)
        return -1;
    return shows_views ? handle_show_views(handle) : 0;
}

int handle_set_reduce_dtype(struct handle *handle, PyObject *dtype) {
    if (handle_use_precision(handle, PRECISION_COMPUTE) < 0)
        return -1;
    drop_form(handle, &handle->forms[PRECISION_FULL]);
    ref_set(&handle->form->reduce_dtype, Py_NewRef(dtype));
    return init_likes(handle, handle->form);
}
