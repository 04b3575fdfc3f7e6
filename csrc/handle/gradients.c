/* Gradients on their way in: from the node of a unit to the input of the reduction, or to a full-size sum
 * under no_sync.
 *
 * [Note: order of addition] Sums follow torch's FSDP1 bit for bit. Contributions of one backward meet first,
 * in order of arrival (autograd's input buffer), and then are added to what earlier backwards left in .grad.
 * With low-precision parameters each forward there has its own AccumulateGrad node, so each contribution is
 * added to .grad by itself. */
#include "handle/gradients.h"
#include "handle/unit_error.h"
#include "torch/names.h"
#include "torch/tensor.h"

/* ---- life ---- */

void gradients_bind(struct gradients *gradients, const struct flat_param *param,
                    const struct storage *storage) {
    gradients->param = param;
    gradients->storage = storage;
}

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
    int64_t end = 0, pieces = 0;
    for (int64_t i = 0; i < gradients->param->num_params; i++) {
        const struct layout_shard_range *range = &gradients->param->layout.shard_ranges[i];
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
    return end < gradients->param->layout.shard_numel
               ? ref_append(gradients->shard_sizes,
                            PyLong_FromLongLong(gradients->param->layout.shard_numel - end))
               : 0;
}

/* torch refuses a gradient of another dtype unless the leaf says that any will do. */
static int allow_low_precision_grads(struct gradients *gradients) {
    if (!gradients->param->keep_low_precision_grads ||
        !gradients->storage->copies[PRECISION_COMPUTE].low_precision)
        return 0;
    if (PyObject_SetAttr(gradients->param->tensor, torch_names.grad_dtype, Py_None) < 0)
        return -1;
    for (int64_t i = 0; gradients->param->params && i < gradients->param->num_params; i++)
        if (PyObject_SetAttr(PyList_GetItem(gradients->param->params, i), torch_names.grad_dtype, Py_None) <
            0)
            return -1;
    return 0;
}

int gradients_lazy_init(struct gradients *gradients) {
    if (init_sources(gradients) < 0 || init_shard_pieces(gradients) < 0 ||
        gradients_init_shown(gradients) < 0)
        return -1;
    return allow_low_precision_grads(gradients);
}

/* ---- receiving ---- */

/* A second contribution has come: the first one is added up. See [Note: order of addition]. */
static int settle_pending(struct gradients *gradients) {
    if (gradients->storage->copy->low_precision && gradients_call_param_hooks(gradients) < 0)
        return -1;
    if (!gradients->pending)
        return 0;
    PyObject *previous = *gradients_previous(gradients);
    if (gradients->storage->copy->low_precision && previous)
        return gradients_add_pending(gradients, previous);
    if (gradients->sum)
        return gradients_add_pending(gradients, gradients->sum);
    gradients->sum = torch_empty_like(gradients->storage->copy->gradient_like);
    return gradients->sum ? gradients_pack_pending(gradients, gradients->sum, 1.0) : -1;
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
        unit_error(
            PyExc_RuntimeError, param->layout.rank, param->name,
            "torch.autograd.grad() cannot return the gradient of its flat parameter, "
            "of which each of %lld ranks holds a part: call backward(), or backward(inputs=...), and read "
            ".grad. Schedules that take the gradients of inputs and weights apart need FSDP units with a "
            "group of one rank",
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

int gradients_receive_zeros(struct gradients *gradients, PyObject *args) {
    if (gradients->pending || !has_gradient(args, gradients->param->num_params))
        return 0;
    return receive_none(gradients);
}

int gradients_receive_nothing(struct gradients *gradients) {
    if (gradients->pending || gradients->sum || *gradients_previous(gradients))
        return 0;
    return receive_none(gradients);
}

/* ---- towards the reduction ---- */

/* reduce_input = cast(total) / predivide; the total itself where the dtypes agree. Steals `total`. */
static int divide_total(struct gradients *gradients, PyObject *total) {
    const struct precision_copy *copy = gradients->storage->copy;
    struct tensor_view from;
    PyObject *input = NULL;
    if (tensor_view_of(total, &from) == 0)
        input =
            from.dtype == copy->reduce_kind ? Py_NewRef(total) : torch_empty_like(copy->reduce_input_like);
    int result = input ? gradients_apply(gradients, gradients->storage->kernels->cast_divide, input, total,
                                         gradients->predivide, "pre-division of gradients")
                       : -1;
    if (result < 0)
        Py_CLEAR(input);
    else
        ref_set(&gradients->reduce_input, input);
    Py_DECREF(total);
    return result;
}

int gradients_take_reduce_input(struct gradients *gradients) {
    ref_set(&gradients->reduce_input, torch_empty_like(gradients->storage->copy->reduce_input_like));
    return gradients->reduce_input ? 0 : -1;
}

int64_t gradients_reduce_input_nbytes(const struct gradients *gradients) {
    if (gradients->comm_hook.function && !gradients->comm_hook.native)
        return 0;
    return gradients->param->layout.padded_numel * dtype_nbytes(gradients->storage->copy->reduce_kind);
}

bool gradients_pack_directly(const struct gradients *gradients) {
    return gradients->param->sharded && !gradients->unsharded && !gradients->sum;
}

int gradients_pack_beside(struct gradients *gradients, PyObject **packed) {
    if (gradients_read_comm_hook(gradients) < 0)
        return -1;
    gradients->unreduced = gradients->hooked = false;
    if (!gradients->reduce_input && gradients_take_reduce_input(gradients) < 0)
        return -1;
    if (gradients_pack_pending(gradients, gradients->reduce_input, gradients->predivide) < 0)
        return -1;
    *packed = gradients->pending;
    gradients->pending = NULL;
    return 0;
}

int gradients_pack(struct gradients *gradients) {
    PyObject **previous = gradients_previous(gradients), *total;
    if (gradients_read_comm_hook(gradients) < 0)
        return -1;
    gradients->unreduced = gradients->hooked = false;
    if (*previous) {
        if (gradients->pending && gradients_add_received(gradients, *previous) < 0)
            return -1;
        if (gradients_hide_unsharded(gradients) < 0)
            return -1;
        total = *previous;
        *previous = NULL;
    } else if (gradients->sum) {
        total = gradients_take_received(gradients);
    } else { /* as in the usual step: one contribution is copied, cast and pre-divided in one pass */
        int result = gradients->reduce_input ? 0 : gradients_take_reduce_input(gradients);
        if (!result)
            result = gradients_pack_pending(gradients, gradients->reduce_input, gradients->predivide);
        Py_CLEAR(gradients->pending);
        return result;
    }
    return total ? divide_total(gradients, total) : -1;
}

/* ---- no_sync ---- */

int gradients_accumulate_unsharded(struct gradients *gradients) {
    PyObject **total = gradients_previous(gradients);
    gradients->unreduced = true;
    gradients->hooked = false;
    if (!*total)
        return (*total = gradients_take_received(gradients)) ? 0 : -1;
    return gradients->pending ? gradients_add_received(gradients, *total) : 0;
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
