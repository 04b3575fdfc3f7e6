/* Hooks that users register on the flat parameter.
 *
 * [Note: hooks of the flat parameter] Tensor.register_hook and register_post_accumulate_grad_hook: no
 * gradient flows along the graph's edges to the flat parameter, so autograd would call the hooks with None.
 * The hooks are stashed from the unit's node to the end of the backward, and called here, between the last
 * contribution and the reduction. The flat parameter exposes its unsharded data in the compute dtype, the
 * gradient is this rank's without right padding, and `.grad` is the gradient accumulated so far (no_sync,
 * NO_SHARD). All of this is FSDP1's behaviour. A gradient hook may replace the gradient, a post-accumulate
 * hook `.grad`; the final `.grad` is reduced. The hooks run once per forward in low precision. */
#include "handle/grads.h"

#include <string.h>

#include "torch/py_torch.h"
#include "torch/tensor.h"

/* ---- search for hooks ---- */

/* Return the dict of hooks, or None. New reference. */
static PyObject *hooks_of(const struct grads *grads, PyObject *attribute) {
    if (!grads->stashed_hooks)
        return PyObject_GetAttr(grads->param->tensor, attribute);
    return Py_NewRef(PyTuple_GetItem(grads->stashed_hooks, attribute != torch_names._backward_hooks));
}

/* Return a list of the functions in a dict of hooks, which calls may change. New reference. */
static PyObject *hook_functions(const struct grads *grads, PyObject *attribute) {
    OWNED *hooks = hooks_of(grads, attribute);
    if (!hooks)
        return NULL;
    return hooks == Py_None ? PyList_New(0) : PyMapping_Values(hooks);
}

/* Return 1 if there are hooks, 0 if not, -1 with an exception. Hooks found before may have been removed, so
 * the search is repeated. */
static int has_hooks(struct grads *grads) {
    int registered = torch_hooks_registered_since(&grads->hooks_seen);
    if (registered < 0 || (!registered && !grads->has_param_hooks))
        return registered;
    OWNED *on_gradient = hooks_of(grads, torch_names._backward_hooks);
    OWNED *on_accumulated = on_gradient ? hooks_of(grads, torch_names._post_accumulate_grad_hooks) : NULL;
    int result = !on_accumulated ? -1 : on_gradient == Py_None ? 0 : PyObject_IsTrue(on_gradient);
    if (!result && on_accumulated != Py_None)
        result = PyObject_IsTrue(on_accumulated);
    grads->has_param_hooks = result != 0;
    return result;
}

/* ---- stash ---- */

/* Install the hooks, or empty dicts in their place: autograd ignores None and keeps the previous dict. */
static int set_hooks(const struct grads *grads, PyObject *both, bool stashed) {
    PyObject *attributes[] = {torch_names._backward_hooks, torch_names._post_accumulate_grad_hooks};
    for (int i = 0; i < 2; i++) {
        PyObject *hooks = PyTuple_GetItem(both, i);
        if (hooks == Py_None)
            continue;
        OWNED *installed = stashed ? PyObject_CallNoArgs((PyObject *)Py_TYPE(hooks)) : Py_NewRef(hooks);
        if (!installed || PyObject_SetAttr(grads->param->tensor, attributes[i], installed) < 0)
            return -1;
    }
    return 0;
}

int grads_stash_param_hooks(struct grads *grads) {
    int any = grads->param->use_orig_params || grads->stashed_hooks ? 0 : has_hooks(grads);
    if (any <= 0)
        return any;
    OWNED *on_gradient = hooks_of(grads, torch_names._backward_hooks);
    OWNED *on_accumulated = hooks_of(grads, torch_names._post_accumulate_grad_hooks);
    if (on_gradient && on_accumulated)
        grads->stashed_hooks = PyTuple_Pack(2, on_gradient, on_accumulated);
    return grads->stashed_hooks ? set_hooks(grads, grads->stashed_hooks, true) : -1;
}

int grads_restore_param_hooks(struct grads *grads) {
    OWNED *stashed = grads->stashed_hooks;
    if (!stashed)
        return 0;
    grads->stashed_hooks = NULL;
    return set_hooks(grads, stashed, false);
}

/* ---- call ---- */

/* Call all gradient hooks and return the resulting gradient. Steals `grad`; new reference, or NULL. */
static PyObject *call_gradient_hooks(struct grads *grads, PyObject *grad) {
    OWNED *functions = hook_functions(grads, torch_names._backward_hooks);
    OWNED *current = grad;
    struct tensor_view old, new;
    for (Py_ssize_t i = 0; functions && i < PyList_Size(functions); i++) {
        PyObject *function = PyList_GetItem(functions, i);
        OWNED *value = PyObject_CallFunctionObjArgs(function, current, NULL);
        if (!value)
            return NULL;
        if (value == Py_None)
            continue;
        if (!torch_is_tensor(value)) {
            flat_param_error(
                grads->param, PyExc_TypeError,
                "expected a Tensor or None from hook %R of the flat parameter, but hook returned %R",
                function, (PyObject *)Py_TYPE(value));
            return NULL;
        }
        if (tensor_view_of(current, &old) < 0 || tensor_view_of(value, &new) < 0)
            return NULL;
        bool same_type =
            new.dtype == old.dtype && new.device == old.device && new.device_index == old.device_index;
        bool same_size =
            new.ndim == old.ndim && memcmp(new.sizes, old.sizes, (size_t)old.ndim * sizeof *old.sizes) == 0;
        if (!same_type || !same_size) {
            flat_param_error(
                grads->param, PyExc_RuntimeError,
                "hook %R of the flat parameter has changed the %s of value: return a gradient of "
                "the same size, dtype and device, not a %R.",
                function, same_type ? "size" : "type", (PyObject *)Py_TYPE(value));
            return NULL;
        }
        ref_set(&current, Py_NewRef(value));
    }
    return functions ? Py_NewRef(current) : NULL;
}

/* ---- .grad during the hooks ---- */

static PyObject *without_padding(const struct grads *grads, PyObject *padded) {
    return PyObject_CallMethod(padded, "narrow", "iLL", 0, 0LL, (long long)grads->param->layout.numel);
}

static int call_accumulated_hooks(struct grads *grads) {
    OWNED *functions = hook_functions(grads, torch_names._post_accumulate_grad_hooks);
    for (Py_ssize_t i = 0; functions && i < PyList_Size(functions); i++) {
        OWNED *value = PyObject_CallFunctionObjArgs(PyList_GetItem(functions, i), grads->param->tensor, NULL);
        if (!value)
            return -1;
        if (value != Py_None)
            return flat_param_error(grads->param, PyExc_RuntimeError,
                                    "Tensor post accumulate grad hooks should return None, not a %R",
                                    (PyObject *)Py_TYPE(value));
    }
    return functions ? 0 : -1;
}

static int expose_accumulated(struct grads *grads, PyObject *padded) {
    OWNED *grad = padded ? without_padding(grads, padded) : NULL;
    if (padded && !grad)
        return -1;
    return grad ? torch_set_foreign_grad(grads->param->tensor, grad)
                : torch_set_grad(grads->param->tensor, Py_None);
}

/* Set `.grad` to the gradient, or add the gradient to it. Steals `grad`. A gradient that a hook keeps is
 * cloned first. */
static int accumulate(struct grads *grads, PyObject *grad) {
    OWNED *sum = torch_get_grad(grads->param->tensor);
    int result = -1;
    if (sum && sum != Py_None) {
        result = ref_done(PyObject_CallMethod(sum, "add_", "O", grad));
    } else if (sum) {
        bool is_referenced = Py_REFCNT(grad) > 1;
        OWNED *own = is_referenced ? PyObject_CallMethod(grad, "clone", NULL) : Py_NewRef(grad);
        result = own ? torch_set_foreign_grad(grads->param->tensor, own) : -1;
    }
    Py_DECREF(grad);
    return result;
}

/* Take `.grad` after the hooks as the unit's gradient. `padded` is its memory unless a hook replaced it; a
 * replacement is copied and padded. */
static int take_hooked_grad(struct grads *grads, PyObject *padded) {
    const struct flat_param *param = grads->param;
    OWNED *grad = torch_get_grad(param->tensor);
    OWNED *result = NULL;
    struct tensor_view inner, outer;
    if (!grad)
        return -1;
    if (grad != Py_None) {
        bool has_memory = tensor_view_of(grad, &inner) == 0 && tensor_view_of(padded, &outer) == 0;
        PyErr_Clear();
        if (has_memory && inner.data == outer.data && inner.dtype == outer.dtype &&
            tensor_view_is_contiguous(&inner) && tensor_view_numel(&inner) == param->layout.numel) {
            result = Py_NewRef(padded);
        } else {
            OWNED *dtype = PyObject_GetAttr(grad, torch_names.dtype);
            result = dtype ? torch_empty(param->layout.padded_numel, dtype, param->device) : NULL;
            OWNED *part = result && torch_zero(result) == 0 ? without_padding(grads, result) : NULL;
            if (!part || torch_copy(part, grad) < 0)
                return -1;
        }
        if (torch_set_grad(param->tensor, Py_None) < 0)
            return -1;
    }
    grads->hooked = result != NULL;
    ref_set(grads_accumulator(grads), Py_XNewRef(result));
    return grads_set_kind(grads, GRAD_NONE); /* until grads_expose */
}

/* The flat parameter exposes its unsharded data during the hooks. If a hook raises, `.grad` is restored. */
int grads_call_param_hooks(struct grads *grads) {
    int any = grads->pending ? has_hooks(grads) : 0;
    if (any <= 0)
        return any;
    PyObject *param = grads->param->tensor;
    OWNED *total = grads_take_received(grads);
    if (!total)
        return -1;
    bool is_local = grads->storage->copy->is_local;
    OWNED *data = is_local ? NULL : torch_data(param);
    int result = is_local ? 0 : data ? torch_set_data(param, grads->storage->copy->full_data) : -1;
    if (!result) {
        PyObject *previous = *grads_accumulator(grads);
        result = expose_accumulated(grads, previous);
        PyObject *grad = result < 0 ? NULL : without_padding(grads, total);
        if (grad)
            grad = call_gradient_hooks(grads, grad);
        if (!grad || accumulate(grads, grad) < 0 || call_accumulated_hooks(grads) < 0)
            result = -1;
        else
            result = take_hooked_grad(grads, previous ? previous : total);
        if (data)
            torch_restore_data(param, data);
    }
    if (result == 0)
        return 0;
    PyObject *error = PyErr_GetRaisedException();
    if (expose_accumulated(grads, grads->kind == GRAD_UNSHARDED ? *grads_accumulator(grads) : NULL) < 0)
        PyErr_WriteUnraisable(grads->param->name);
    PyErr_SetRaisedException(error);
    return -1;
}
