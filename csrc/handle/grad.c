/* A unit's gradient as the user sees it in `.grad`. */
#include "handle/gradients.h"
#include "torch/names.h"
#include "torch/tensor.h"

/* ---- shown ---- */

static int clear_grad(PyObject *param) {
    OWNED *grad = torch_get_grad(param);
    if (!grad || grad == Py_None)
        return grad ? 0 : -1;
    return torch_set_grad(param, Py_None);
}

/* Does the parameter show its part of the gradient? One that is frozen does if it did before, as no new one
 * comes (parity 42). 1, 0 or -1. */
static int shows_grad(const struct gradients *gradients, int64_t index) {
    PyObject *param = PyList_GetItem(gradients->param->params, index);
    int requires_grad = torch_requires_grad(param);
    if (requires_grad)
        return requires_grad;
    if (gradients->hidden)
        return PyList_GetItem(gradients->hidden, index) != Py_None;
    OWNED *grad = torch_get_grad(param);
    return grad ? grad != Py_None : -1;
}

/* As shows_grad, of a gradient in full, `view` of it: a rank that holds none of the parameter has none of its
 * gradient to look at. */
static int shows_full_grad(const struct gradients *gradients, int64_t index, PyObject *view) {
    if (!gradients->param->sharded && !layout_param_numel(&gradients->param->layout, index))
        return 0; /* nor does torch show one, which would be empty */
    int shows = shows_grad(gradients, index);
    if (shows || gradients->hidden || !gradients->param->sharded ||
        gradients->param->layout.shard_ranges[index].in_shard)
        return shows;
    int zero = gradients_is_zero(view);
    return zero < 0 ? -1 : !zero;
}

/* The original parameters show full-shape gradients: NO_SHARD always, sharded strategies under no_sync. */
static int show_unsharded_grads(struct gradients *gradients, PyObject *grad) {
    OWNED *views = flat_param_views(gradients->param, grad);
    for (int64_t i = 0; views && i < gradients->param->num_params; i++) {
        PyObject *param = PyList_GetItem(gradients->param->params, i), *view = PyTuple_GetItem(views, i);
        int shows = shows_full_grad(gradients, i, view);
        if (shows < 0 || (shows ? torch_set_foreign_grad(param, view) : clear_grad(param)) < 0)
            return -1;
    }
    return views ? 0 : -1;
}

/* ---- given back with the last view ---- */

enum { NOBODY = -1 }; /* in the place of a parameter */

/* Does the parameter show its part of the flat gradient, and not what the user has put there? New reference
 * to it, or NULL: an exception may be set. */
static PyObject *shown_part(const struct gradients *gradients, const struct tensor_view *flat,
                            int64_t index) {
    int64_t offset = gradients_offset(gradients, index);
    PyObject *grad = offset < 0 ? NULL : torch_get_grad(PyList_GetItem(gradients->param->params, index));
    struct tensor_view part;
    bool is_part = grad && grad != Py_None && tensor_view_of(grad, &part) == 0 &&
                   (const char *)part.data == (const char *)flat->data + offset * dtype_nbytes(flat->dtype);
    if (!is_part)
        Py_CLEAR(grad);
    return grad;
}

static int watch_part(struct gradients *gradients, PyObject *part, int64_t index) {
    gradients->shown_param = index;
    ref_set(&gradients->shown, PyWeakref_NewRef(part, gradients->shown_end));
    return gradients->shown ? 0 : -1;
}

/* Watch the last part that is shown, but for that of parameter `gone`: gradients are usually cleared in
 * order. */
static int watch_shown(struct gradients *gradients, int64_t gone) {
    OWNED *flat_grad = torch_get_grad(gradients->param->tensor);
    OWNED *part = NULL;
    struct tensor_view flat;
    if (!flat_grad || flat_grad == Py_None)
        return flat_grad ? 0 : -1;
    if (tensor_view_of(flat_grad, &flat) < 0)
        return -1;
    int64_t i = gradients->param->num_params;
    while (!part && --i >= 0 && !PyErr_Occurred())
        part = i == gone ? NULL : shown_part(gradients, &flat, i);
    return PyErr_Occurred() ? -1 : part ? watch_part(gradients, part, i) : 0;
}

/* The parameter may not be asked for what it has shown: this is called amid its end. */
static PyObject *end_of_part(PyObject *capsule, PyObject *reference) {
    (void)reference;
    if (!PyCapsule_IsValid(capsule, NULL))
        Py_RETURN_NONE; /* the unit has gone as well */
    struct gradients *gradients = PyCapsule_GetPointer(capsule, NULL);
    Py_CLEAR(gradients->shown);
    int result = watch_shown(gradients, gradients->shown_param);
    if (!result && !gradients->shown)
        result = gradients_drop_shown(gradients);
    return result < 0 ? NULL : Py_NewRef(Py_None);
}

static PyMethodDef end_of_part_def = {"end_of_part", end_of_part, METH_O, NULL};

int gradients_init_shown(struct gradients *gradients) {
    OWNED *capsule = gradients->shown_end ? NULL : PyCapsule_New(gradients, NULL, NULL);
    if (capsule)
        gradients->shown_end = PyCFunction_New(&end_of_part_def, capsule);
    return gradients->shown_end ? 0 : -1;
}

void gradients_watch_nothing(struct gradients *gradients) {
    Py_CLEAR(gradients->shown);
}

void gradients_fini_shown(struct gradients *gradients) {
    gradients_watch_nothing(gradients);
    if (gradients->shown_end)
        PyCapsule_SetName(PyCFunction_GetSelf(gradients->shown_end), "of a unit that has gone");
    Py_CLEAR(gradients->shown_end);
}

/* ---- handed over ---- */

/* The original parameters show their parts of the sharded flat gradient; those outside the shard show
 * None. */
static int show_sharded_grads(struct gradients *gradients, PyObject *grad) {
    OWNED *pieces =
        PyObject_CallFunctionObjArgs(torch_names.split_with_sizes, grad, gradients->shard_sizes, NULL);
    for (int64_t i = gradients->param->num_params - 1; pieces && i >= 0; i--) {
        PyObject *param = PyList_GetItem(gradients->param->params, i);
        int shows = gradients->shard_pieces[i] < 0 ? 0 : shows_grad(gradients, i);
        OWNED *piece = shows > 0 ? PySequence_GetItem(pieces, gradients->shard_pieces[i]) : NULL;
        if (!piece && (shows || clear_grad(param) < 0))
            return -1;
        if (piece &&
            (torch_set_grad(param, piece) < 0 || (!gradients->shown && watch_part(gradients, piece, i) < 0)))
            return -1;
    }
    return pieces ? 0 : -1;
}

static int show_grads(struct gradients *gradients, PyObject *grad) {
    if (!gradients->param->use_orig_params)
        return 0;
    Py_CLEAR(gradients->shown); /* nothing goes with the views of before */
    if (gradients->param->sharded && gradients->kind == GRAD_SHARDED)
        return show_sharded_grads(gradients, grad);
    int result = show_unsharded_grads(gradients, grad);
    return result < 0 || gradients->kind != GRAD_SHARDED ? result : watch_shown(gradients, NOBODY);
}

/* The gradient of this backward where the shard lies; new reference. What was never reduced is copied while
 * the host waits. */
static PyObject *take_saved_shard(struct gradients *gradients) {
    PyObject *shard = gradients->saved_shard, *offloaded = gradients->offloaded;
    gradients->saved_shard = gradients->offloaded = NULL;
    if (!gradients->storage->offload)
        return shard;
    if (!offloaded)
        offloaded = PyObject_CallMethod(shard, "cpu", NULL);
    Py_DECREF(shard);
    if (offloaded && storage_put_attribute(gradients->storage, "_cpu_grad", offloaded) < 0)
        Py_CLEAR(offloaded);
    return offloaded;
}

/* flat_param.grad = what no_sync left, without the right padding */
static int show_flat_unsharded(struct gradients *gradients) {
    OWNED *grad = torch_part(gradients->unsharded, 0, gradients->param->layout.numel); /* of version 0 */
    return grad ? torch_set_foreign_grad(gradients->param->tensor, grad) : -1;
}

static int show_no_sync(struct gradients *gradients) {
    bool shown = gradients->kind == GRAD_UNSHARDED && !gradients->hides_some;
    gradients->hides_some = false;
    if (shown)
        return 0; /* accumulated in place */
    if (gradients->kind == GRAD_UNSHARDED)
        return show_grads(gradients, gradients->unsharded);
    if (gradients_add_late(gradients, &gradients->saved_shard) < 0)
        return -1;
    int result = show_flat_unsharded(gradients);
    if (gradients_set_kind(gradients, GRAD_UNSHARDED) < 0 || result < 0)
        return -1;
    return show_grads(gradients, gradients->unsharded);
}

static int show_reduced(struct gradients *gradients) {
    const struct flat_param *param = gradients->param;
    const struct storage *storage = gradients->storage;
    OWNED *shard = take_saved_shard(gradients);
    struct tensor_view view;
    if (gradients_set_kind(gradients, GRAD_SHARDED) < 0 || !shard ||
        gradients_add_late(gradients, &shard) < 0)
        return -1;
    /* NO_SHARD keeps the dtype of the reduction instead */
    bool keeps_low = param->sharded && param->keep_low_precision_grads && storage->copy->low_precision;
    OWNED *grad = keeps_low ? PyObject_CallMethod(shard, "to", "O", storage->copy->dtype) : Py_NewRef(shard);
    if (!grad || tensor_view_of(grad, &view) < 0)
        return -1;
    /* in the usual step it has the shape and dtype of the shard */
    bool fits =
        view.dtype == storage->orig_kind && view.ndim == 1 && view.sizes[0] == param->layout.shard_numel;
    int result = fits ? torch_set_grad(param->tensor, grad) : torch_set_foreign_grad(param->tensor, grad);
    return result < 0 ? -1 : show_grads(gradients, grad);
}

int gradients_note_hidden(struct gradients *gradients, int64_t index) {
    int requires_grad = torch_requires_grad(PyList_GetItem(gradients->param->params, index));
    gradients->hides_some = gradients->hides_some || requires_grad > 0;
    return requires_grad < 0 ? -1 : 0;
}

int gradients_hand_over(struct gradients *gradients) {
    gradients->in_backward = gradients->hooked = false;
    /* left when a backward has raised and is ended by hand: part of a gradient, which nobody will complete */
    Py_CLEAR(gradients->pending);
    Py_CLEAR(gradients->sum);
    int result = 0;
    if (gradients->unsharded)
        result = show_no_sync(gradients); /* what was reduced before stays aside until the next reduction */
    else if (gradients->saved_shard)
        result = show_reduced(gradients);
    Py_CLEAR(gradients->hidden);
    return result;
}

int gradients_show_full_grad(struct gradients *gradients, PyObject *grad) {
    Py_CLEAR(gradients->shown);
    if (grad != Py_None)
        return show_unsharded_grads(gradients, grad);
    for (int64_t i = 0; i < gradients->param->num_params; i++)
        if (clear_grad(PyList_GetItem(gradients->param->params, i)) < 0)
            return -1;
    return 0;
}

int gradients_show_flat_grad(struct gradients *gradients) {
    if (!gradients->param->use_orig_params)
        return 0;
    if (gradients->kind == GRAD_UNSHARDED)
        return show_unsharded_grads(gradients, gradients->unsharded);
    OWNED *grad = torch_get_grad(gradients->param->tensor);
    if (!grad)
        return -1;
    return grad == Py_None ? gradients_show_full_grad(gradients, grad) : show_grads(gradients, grad);
}

/* ---- moved ---- */

/* The parameters that show a gradient show their parts of `grad`; where the user wants none, there is
 * none. */
static int show_parts_anew(struct gradients *gradients, PyObject *grad) {
    Py_CLEAR(gradients->shown); /* nothing goes with the views of before */
    for (int64_t i = 0; gradients->param->use_orig_params && i < gradients->param->num_params; i++) {
        PyObject *param = PyList_GetItem(gradients->param->params, i);
        OWNED *before = torch_get_grad(param);
        if (!before)
            return -1;
        if (before == Py_None || gradients_offset(gradients, i) < 0)
            continue;
        OWNED *part = gradients_part(gradients, grad, i);
        if (!part || torch_set_foreign_grad(param, part) < 0)
            return -1;
    }
    return gradients->kind == GRAD_SHARDED ? watch_shown(gradients, NOBODY) : 0;
}

/* What no_sync left goes where the shard is, in its dtype unless mixed precision says another. */
static int move_unsharded(struct gradients *gradients) {
    const struct storage *storage = gradients->storage;
    PyObject *like = storage->may_offload ? gradients->unsharded : storage->local_shard;
    PyObject *dtype = PyTuple_GetItem(storage->fallback_dtypes, 0);
    OWNED *device = PyObject_GetAttr(like, torch_names.device);
    PyObject *moved = device ? PyObject_CallMethod(gradients->unsharded, "to", "OO", device,
                                                   dtype == Py_None ? storage->orig_dtype : dtype)
                             : NULL;
    if (!moved)
        return -1;
    ref_set(&gradients->unsharded, moved);
    return show_flat_unsharded(gradients);
}

int gradients_follow(struct gradients *gradients) {
    if (gradients->in_backward || gradients->kind == GRAD_NONE)
        return 0;
    if (gradients->kind == GRAD_UNSHARDED)
        return move_unsharded(gradients) < 0 ? -1 : show_parts_anew(gradients, gradients->unsharded);
    OWNED *grad = torch_get_grad(gradients->param->tensor);
    return !grad ? -1 : grad == Py_None ? 0 : show_parts_anew(gradients, grad);
}
