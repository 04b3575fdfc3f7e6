/* Gradients as autograd brings them to a unit, and the user's hooks on the flat parameter, which are called
 * with them.
 *
 * [Note: order of addition] Sums follow torch's FSDP1 bit for bit. Contributions of one backward meet first,
 * in order of arrival (autograd's input buffer), and then are added to what earlier backwards left in .grad.
 * With low-precision parameters each forward there has its own AccumulateGrad node, so each contribution is
 * added to .grad by itself.
 *
 * [Note: hooks of the flat parameter] Tensor.register_hook and register_post_accumulate_grad_hook: no
 * gradient goes along the graph's edges to the flat parameter, so autograd would call its hooks with nothing.
 * They are hidden from the unit's node to the end of the backward, and called here, between the last
 * contribution to a unit's gradient and its reduction, as autograd would call them. The parameter shows its
 * unsharded data in the compute dtype, the gradient is that of this rank's batch, without the right padding,
 * and `.grad` what earlier backwards left (no_sync, NO_SHARD). A hook may replace the gradient, a later one
 * `.grad`; what stands there in the end is what is reduced. With low-precision parameters every forward has
 * its own turn. */
#include "handle/gradients.h"
#include "torch/names.h"
#include "torch/tensor.h"

#include <string.h>

/* ---- life ---- */

void gradients_init(struct gradients *gradients, const struct handle_spec *spec) {
    gradients->predivide = spec->predivide;
    gradients->postdivide = spec->postdivide;
}

void gradients_fini(struct gradients *gradients) {
    gradients_drop(gradients);
    Py_CLEAR(gradients->hidden);
    gradients_fini_shown(gradients);
    Py_CLEAR(gradients->unsharded);
    Py_CLEAR(gradients->shard_sizes);
    Py_CLEAR(gradients->hooks_seen);
    Py_CLEAR(gradients->hidden_hooks);
    Py_CLEAR(gradients->comm_hook.function);
    Py_CLEAR(gradients->comm_hook.state);
    collective_group_fini(&gradients->comm_hook.group);
    PyMem_Free(gradients->sources);
    PyMem_Free(gradients->shard_pieces);
}

int gradients_visit(const struct gradients *gradients, visitproc visit, void *arg) {
    Py_VISIT(gradients->comm_hook.function);
    Py_VISIT(gradients->comm_hook.state);
    Py_VISIT(gradients->pending);
    Py_VISIT(gradients->hidden_hooks);
    return 0;
}

static int init_sources(struct gradients *gradients) {
    PyMem_Free(gradients->sources);
    gradients->sources = PyMem_Calloc((size_t)gradients->param->num_params + 1, sizeof *gradients->sources);
    if (!gradients->sources)
        return tensor_check(STATUS_NO_MEMORY, "gradient sources of a unit");
    for (int64_t i = 0; i < gradients->param->num_params; i++) {
        gradients->sources[i].offset = layout_param_offset(&gradients->param->layout, i);
        gradients->sources[i].numel = layout_param_numel(&gradients->param->layout, i);
        gradients->sources[i].output_strides = gradients->param->param_shapes[i].strides;
    }
    return 0;
}

/* How to split a shard (or, unsharded, the whole) so that each parameter's part is one piece. */
static int init_shard_pieces(struct gradients *gradients) {
    PyMem_Free(gradients->shard_pieces);
    gradients->shard_pieces =
        PyMem_Calloc((size_t)gradients->param->num_params + 1, sizeof *gradients->shard_pieces);
    ref_set(&gradients->shard_sizes, PyList_New(0));
    if (!gradients->shard_pieces || !gradients->shard_sizes)
        return tensor_check(STATUS_NO_MEMORY, "shard pieces of a unit");
    const struct flat_layout *layout = &gradients->param->layout;
    int64_t end = 0, pieces = 0;
    for (int64_t i = 0; i < layout->num_params; i++) {
        const struct layout_shard_range *range = &layout->shard_ranges[i];
        gradients->shard_pieces[i] = -1;
        if (!range->in_shard)
            continue;
        if (range->offset_in_shard > end) {
            if (ref_append(gradients->shard_sizes, PyLong_FromLongLong(range->offset_in_shard - end)) < 0)
                return -1;
            pieces++;
        }
        if (ref_append(gradients->shard_sizes, PyLong_FromLongLong(range->numel_in_shard)) < 0)
            return -1;
        gradients->shard_pieces[i] = pieces++;
        end = range->offset_in_shard + range->numel_in_shard;
    }
    int64_t rest = layout->shard_numel - end;
    return rest > 0 ? ref_append(gradients->shard_sizes, PyLong_FromLongLong(rest)) : 0;
}

/* torch refuses a gradient of another dtype unless the leaf says that any will do. */
static int allow_low_precision_grads(struct gradients *gradients) {
    const struct flat_param *param = gradients->param;
    if (!param->keep_low_precision_grads || !gradients->storage->copies[PRECISION_COMPUTE].low_precision)
        return 0;
    int result = PyObject_SetAttr(param->tensor, torch_names.grad_dtype, Py_None);
    for (int64_t i = 0; !result && param->params && i < param->num_params; i++)
        result = PyObject_SetAttr(PyList_GetItem(param->params, i), torch_names.grad_dtype, Py_None);
    return result;
}

int gradients_lazy_init(struct gradients *gradients) {
    if (init_sources(gradients) < 0 || init_shard_pieces(gradients) < 0 ||
        gradients_init_shown(gradients) < 0)
        return -1;
    return allow_low_precision_grads(gradients);
}

void gradients_drop(struct gradients *gradients) {
    Py_CLEAR(gradients->pending);
    Py_CLEAR(gradients->sum);
    Py_CLEAR(gradients->saved_shard);
    Py_CLEAR(gradients->offloaded);
    Py_CLEAR(gradients->reduce_input);
    Py_CLEAR(gradients->hook_input);
    Py_CLEAR(gradients->reduce_output);
    Py_CLEAR(gradients->cast_output);
    Py_CLEAR(gradients->work);
    gradients->in_backward = gradients->hooked = false;
}

/* ---- receiving ---- */

/* A second contribution has come: the first one is added up. See [Note: order of addition]. */
static int settle_pending(struct gradients *gradients) {
    bool low_precision = gradients->storage->copy->low_precision;
    if (low_precision && gradients_call_param_hooks(gradients) < 0)
        return -1;
    if (!gradients->pending)
        return 0;
    PyObject *previous = *gradients_previous(gradients);
    if (low_precision && previous)
        return gradients_add_pending(gradients, previous);
    PyObject *sum = gradients_take_received(gradients);
    if (sum)
        gradients->sum = sum;
    return sum ? 0 : -1;
}

static bool has_gradient(PyObject *args, int64_t num_params) {
    for (int64_t i = 0; i < num_params; i++)
        if (PyTuple_GetItem(args, i + 1) != Py_None)
            return true;
    return false;
}

bool gradients_have_new(const struct gradients *gradients) {
    return gradients->pending || gradients->hooked;
}

int gradients_receive(struct gradients *gradients, PyObject *args) {
    if (!has_gradient(args, gradients->param->num_params))
        return 0;
    if (gradients->pending && settle_pending(gradients) < 0)
        return -1;
    ref_set(&gradients->pending, Py_NewRef(args));
    return 0;
}

/* `pending` and `sum` are another backward's, if they are there. */
static PyObject *pack_alone(struct gradients *gradients, PyObject *args) {
    PyObject *pending = gradients->pending, *sum = gradients->sum;
    gradients->pending = Py_NewRef(args);
    gradients->sum = NULL;
    PyObject *total = gradients_take_received(gradients);
    ref_set(&gradients->pending, pending);
    gradients->sum = sum;
    return total;
}

PyObject *gradients_flat_of(struct gradients *gradients, PyObject *args) {
    const struct flat_param *param = gradients->param;
    if (param->sharded) {
        flat_param_error(
            param, PyExc_RuntimeError,
            "torch.autograd.grad() cannot return the gradient of its flat parameter, of which each of %lld "
            "ranks holds a part: call backward(), or backward(inputs=...), and read .grad. Schedules that "
            "take the gradients of inputs and weights apart need FSDP units with a group of one rank",
            (long long)param->shard_group.world_size);
        return NULL;
    }
    if (!has_gradient(args, param->num_params))
        return Py_NewRef(Py_None);
    OWNED *total = pack_alone(gradients, args);
    return total ? torch_part(total, 0, param->layout.shard_numel) : NULL;
}

/* Packed, they are zeros. */
static int receive_none(struct gradients *gradients) {
    Py_ssize_t count = (Py_ssize_t)gradients->param->num_params + 1;
    PyObject *nothing = PyTuple_New(count);
    for (Py_ssize_t i = 0; nothing && i < count; i++)
        PyTuple_SetItem(nothing, i, Py_NewRef(Py_None));
    gradients->pending = nothing;
    return nothing ? 0 : -1;
}

int gradients_receive_nothing(struct gradients *gradients) {
    if (gradients->pending || gradients->sum || *gradients_previous(gradients))
        return 0;
    return receive_none(gradients);
}

/* ---- hooks of the flat parameter ---- */

/* The dict of hooks, or None. New reference. */
static PyObject *hooks_of(const struct gradients *gradients, PyObject *attribute) {
    if (!gradients->hidden_hooks)
        return PyObject_GetAttr(gradients->param->tensor, attribute);
    return Py_NewRef(PyTuple_GetItem(gradients->hidden_hooks, attribute != torch_names._backward_hooks));
}

/* The functions in a dict of hooks, which may change while they are called; an empty list where there are
 * none. New reference. */
static PyObject *functions_of(const struct gradients *gradients, PyObject *attribute) {
    OWNED *hooks = hooks_of(gradients, attribute);
    if (!hooks)
        return NULL;
    return hooks == Py_None ? PyList_New(0) : PyMapping_Values(hooks);
}

/* What a hook returned must be able to stand for the gradient it was given. */
static int check_replacement(const struct gradients *gradients, PyObject *function, PyObject *grad,
                             PyObject *value) {
    const struct flat_param *param = gradients->param;
    struct tensor_view old, new;
    if (!torch_is_tensor(value))
        return flat_param_error(
            param, PyExc_TypeError,
            "expected a Tensor or None from hook %R of its flat parameter, but hook returned %R", function,
            (PyObject *)Py_TYPE(value));
    if (tensor_view_of(grad, &old) < 0 || tensor_view_of(value, &new) < 0)
        return -1;
    bool same_type =
        new.dtype == old.dtype && new.device == old.device && new.device_index == old.device_index;
    bool same_size =
        new.ndim == old.ndim && memcmp(new.sizes, old.sizes, (size_t)old.ndim * sizeof *old.sizes) == 0;
    if (same_type && same_size)
        return 0;
    return flat_param_error(param, PyExc_RuntimeError,
                            "hook %R of its flat parameter has changed the %s of value: a gradient is "
                            "replaced by one of the same size, dtype and device, not by a %R",
                            function, same_type ? "size" : "type", (PyObject *)Py_TYPE(value));
}

/* The gradient after all hooks. Steals `grad`; new reference or NULL. */
static PyObject *call_gradient_hooks(struct gradients *gradients, PyObject *grad) {
    OWNED *functions = functions_of(gradients, torch_names._backward_hooks);
    int result = functions ? 0 : -1;
    for (Py_ssize_t i = 0; !result && i < PyList_Size(functions); i++) {
        PyObject *function = PyList_GetItem(functions, i);
        OWNED *value = PyObject_CallFunctionObjArgs(function, grad, NULL);
        result = !value ? -1 : value == Py_None ? 0 : check_replacement(gradients, function, grad, value);
        if (!result && value != Py_None)
            ref_set(&grad, Py_NewRef(value));
    }
    if (result < 0)
        Py_CLEAR(grad);
    return grad;
}

static int call_accumulated_hooks(struct gradients *gradients) {
    OWNED *functions = functions_of(gradients, torch_names._post_accumulate_grad_hooks);
    for (Py_ssize_t i = 0; functions && i < PyList_Size(functions); i++) {
        OWNED *value =
            PyObject_CallFunctionObjArgs(PyList_GetItem(functions, i), gradients->param->tensor, NULL);
        if (!value)
            return -1;
        if (value != Py_None)
            return flat_param_error(gradients->param, PyExc_RuntimeError,
                                    "Tensor post accumulate grad hooks should return None, not a %R",
                                    (PyObject *)Py_TYPE(value));
    }
    return functions ? 0 : -1;
}

/* ---- .grad while they are called ---- */

static PyObject *without_padding(const struct gradients *gradients, PyObject *padded) {
    return PyObject_CallMethod(padded, "narrow", "iLL", 0, 0LL, (long long)gradients->param->layout.numel);
}

static int show_grad(struct gradients *gradients, PyObject *padded) {
    OWNED *grad = padded ? without_padding(gradients, padded) : NULL;
    if (padded && !grad)
        return -1;
    return grad ? torch_set_foreign_grad(gradients->param->tensor, grad)
                : torch_set_grad(gradients->param->tensor, Py_None);
}

/* `.grad` becomes, or grows by, the gradient. Steals `grad`. One that a hook has kept stays as the hook has
 * seen it. */
static int accumulate(struct gradients *gradients, PyObject *grad) {
    OWNED *sum = torch_get_grad(gradients->param->tensor);
    int result = -1;
    if (sum && sum != Py_None) {
        result = ref_done(PyObject_CallMethod(sum, "add_", "O", grad));
    } else if (sum) {
        bool kept = Py_REFCNT(grad) > 1;
        OWNED *own = kept ? PyObject_CallMethod(grad, "clone", NULL) : Py_NewRef(grad);
        result = own ? torch_set_foreign_grad(gradients->param->tensor, own) : -1;
    }
    Py_DECREF(grad);
    return result;
}

/* `grad` with the padding behind it; new reference. */
static PyObject *padded_copy(struct gradients *gradients, PyObject *grad) {
    OWNED *dtype = PyObject_GetAttr(grad, torch_names.dtype);
    PyObject *padded =
        dtype ? torch_empty(gradients->param->layout.padded_numel, dtype, gradients->param->device) : NULL;
    OWNED *part = padded && torch_zero(padded) == 0 ? without_padding(gradients, padded) : NULL;
    if (!part || torch_copy(part, grad) < 0)
        Py_CLEAR(padded);
    return padded;
}

/* Is `grad` the beginning of `padded`? */
static bool lies_in(const struct gradients *gradients, PyObject *grad, PyObject *padded) {
    struct tensor_view inner, outer;
    if (tensor_view_of(grad, &inner) < 0 || tensor_view_of(padded, &outer) < 0) {
        PyErr_Clear();
        return false;
    }
    return inner.data == outer.data && inner.dtype == outer.dtype && tensor_view_is_contiguous(&inner) &&
           tensor_view_numel(&inner) == gradients->param->layout.numel;
}

/* What the hooks have left in `.grad` is the gradient from now on; `padded` is where it lies unless it was
 * replaced. */
static int take_grad(struct gradients *gradients, PyObject *padded) {
    OWNED *grad = torch_get_grad(gradients->param->tensor);
    OWNED *taken = NULL;
    if (!grad)
        return -1;
    if (grad != Py_None) {
        taken = lies_in(gradients, grad, padded) ? Py_NewRef(padded) : padded_copy(gradients, grad);
        if (!taken || torch_set_grad(gradients->param->tensor, Py_None) < 0)
            return -1;
    }
    gradients->hooked = taken != NULL;
    ref_set(gradients_previous(gradients), Py_XNewRef(taken));
    return gradients_set_kind(gradients, GRAD_NONE); /* until it is handed over */
}

/* A hook has raised: `.grad` is what it was. The exception stays set. */
static void show_grad_again(struct gradients *gradients) {
    PyObject *type, *value, *traceback;
    PyErr_Fetch(&type, &value, &traceback);
    PyObject *before = gradients->kind == GRAD_UNSHARDED ? *gradients_previous(gradients) : NULL;
    if (show_grad(gradients, before) < 0)
        PyErr_WriteUnraisable(gradients->param->name);
    PyErr_Restore(type, value, traceback);
}

static int call_hooks(struct gradients *gradients, PyObject *total) {
    PyObject *previous = *gradients_previous(gradients);
    if (show_grad(gradients, previous) < 0)
        return -1;
    PyObject *grad = without_padding(gradients, total);
    if (grad)
        grad = call_gradient_hooks(gradients, grad);
    if (!grad || accumulate(gradients, grad) < 0 || call_accumulated_hooks(gradients) < 0)
        return -1;
    return take_grad(gradients, previous ? previous : total);
}

static int has_any(const struct gradients *gradients, PyObject *attribute) {
    OWNED *hooks = hooks_of(gradients, attribute);
    return !hooks ? -1 : hooks == Py_None ? 0 : PyObject_IsTrue(hooks);
}

/* 1, 0 or -1. Hooks that were found are looked for again: they may have been removed. */
static int has_hooks(struct gradients *gradients) {
    int registered = torch_hooks_registered_since(&gradients->hooks_seen);
    if (registered < 0 || (!registered && !gradients->has_param_hooks))
        return registered;
    int result = has_any(gradients, torch_names._backward_hooks);
    if (!result)
        result = has_any(gradients, torch_names._post_accumulate_grad_hooks);
    gradients->has_param_hooks = result != 0;
    return result;
}

/* In the place of a dict of hooks stands an empty one: without any, autograd would go on with the one
 * before. */
static int set_hooks(const struct gradients *gradients, PyObject *attribute, PyObject *hooks, bool hidden) {
    if (hooks == Py_None)
        return 0;
    OWNED *shown = hidden ? PyObject_CallNoArgs((PyObject *)Py_TYPE(hooks)) : Py_NewRef(hooks);
    return shown ? PyObject_SetAttr(gradients->param->tensor, attribute, shown) : -1;
}

static int set_all_hooks(const struct gradients *gradients, PyObject *both, bool hidden) {
    if (set_hooks(gradients, torch_names._backward_hooks, PyTuple_GetItem(both, 0), hidden) < 0)
        return -1;
    return set_hooks(gradients, torch_names._post_accumulate_grad_hooks, PyTuple_GetItem(both, 1), hidden);
}

int gradients_hide_param_hooks(struct gradients *gradients) {
    int any = gradients->param->use_orig_params || gradients->hidden_hooks ? 0 : has_hooks(gradients);
    if (any <= 0)
        return any;
    OWNED *on_gradient = hooks_of(gradients, torch_names._backward_hooks);
    OWNED *on_accumulated = hooks_of(gradients, torch_names._post_accumulate_grad_hooks);
    if (on_gradient && on_accumulated)
        gradients->hidden_hooks = PyTuple_Pack(2, on_gradient, on_accumulated);
    return gradients->hidden_hooks ? set_all_hooks(gradients, gradients->hidden_hooks, true) : -1;
}

int gradients_show_param_hooks(struct gradients *gradients) {
    OWNED *hidden = gradients->hidden_hooks;
    if (!hidden)
        return 0;
    gradients->hidden_hooks = NULL;
    return set_all_hooks(gradients, hidden, false);
}

/* The flat parameter shows its unsharded data meanwhile. */
int gradients_call_param_hooks(struct gradients *gradients) {
    int any = gradients->pending ? has_hooks(gradients) : 0;
    if (any <= 0)
        return any;
    PyObject *param = gradients->param->tensor;
    OWNED *total = gradients_take_received(gradients);
    if (!total)
        return -1;
    bool is_local = gradients->storage->copy->is_local;
    OWNED *data = is_local ? NULL : torch_data(param);
    int result = is_local ? 0 : data ? torch_set_data(param, gradients->storage->copy->full_data) : -1;
    if (!result) {
        result = call_hooks(gradients, total);
        if (data)
            torch_restore_data(param, data);
    }
    if (result < 0)
        show_grad_again(gradients);
    return result;
}
