/* Gradients on their way in: from the node of a unit to the input of the reduction, or to a full-size sum under no_sync.
 *
 * [Note: order of addition] Sums follow torch's FSDP1 bit for bit. Contributions of one backward meet first, in order of
 * arrival (autograd's input buffer), and then are added to what earlier backwards left in .grad. With low-precision parameters
 * each forward there has its own AccumulateGrad node, so each contribution is added to .grad by itself. */
#include "handle/handle.h"
#include "torch/names.h"
#include "torch/tensor.h"

/* ---- receiving ---- */

int handle_refuse_gradient(struct handle *handle, int64_t param) {
    PyObject *fqn = handle_fqn(handle, param);
    PyErr_Format(PyExc_RuntimeError,
                 "rank %lld, unit %S: cannot use the gradient of %S: dense strided gradients on %S are supported. "
                 "Sparse gradients "
                 "(nn.Embedding(sparse=True)) need an unsharded module: pass it in ignored_modules.",
                 (long long)handle->layout.rank, handle->name, fqn, handle->device);
    Py_DECREF(fqn);
    return -1;
}

/* Point the sources at the latest contribution. */
static int fill_sources(struct handle *handle) {
    for (int64_t i = 0; i < handle->num_params; i++) {
        PyObject *grad = PyTuple_GetItem(handle->gradients.pending, i + 1);
        struct tensor_view *view = &handle->sources[i].view;
        if (grad == Py_None) {
            view->data = NULL;
            continue;
        }
        if (tensor_view_of(grad, view) < 0)
            return handle_refuse_gradient(handle, i);
    }
    return 0;
}

static int pack_pending(struct handle *handle, PyObject *output, double divisor) {
    struct tensor_view view;
    if (fill_sources(handle) < 0 || tensor_view_of(output, &view) < 0)
        return -1;
    return tensor_check(handle->kernels->pack(view.data, view.dtype, tensor_view_numel(&view), handle->sources,
                                              handle->num_params, divisor, handle_stream(handle)),
                        "packing of gradients");
}

static int add_pending(struct handle *handle, PyObject *output) {
    struct tensor_view view;
    if (fill_sources(handle) < 0 || tensor_view_of(output, &view) < 0)
        return -1;
    return tensor_check(
        handle->kernels->pack_add(view.data, view.dtype, handle->sources, handle->num_params, handle_stream(handle)),
        "accumulation of gradients");
}

static int add_tensor(struct handle *handle, PyObject *output, PyObject *input) {
    struct tensor_view to, from;
    if (tensor_view_of(output, &to) < 0 || tensor_view_of(input, &from) < 0)
        return -1;
    return tensor_check(handle->kernels->accumulate(to.data, to.dtype, from.data, from.dtype, tensor_view_numel(&to),
                                                    1.0, handle_stream(handle)),
                        "accumulation of gradients");
}

/* What earlier backwards left and this one adds to, borrowed or NULL. */
static PyObject *previous_gradient(struct handle *handle) {
    return handle->sharded ? handle->gradients.unsharded : handle->gradients.saved_shard;
}

/* A second contribution has come: the first one is added up. See [Note: order of addition]. */
static int settle_pending(struct handle *handle) {
    struct gradients *gradients = &handle->gradients;
    if (handle->form->low_precision && handle_call_param_hooks(handle) < 0)
        return -1;
    if (!gradients->pending)
        return 0;
    PyObject *previous = previous_gradient(handle);
    if (handle->form->low_precision && previous)
        return add_pending(handle, previous);
    if (gradients->sum)
        return add_pending(handle, gradients->sum);
    gradients->sum = torch_empty_like(handle->form->gradient_like.tensor);
    return gradients->sum ? pack_pending(handle, gradients->sum, 1.0) : -1;
}

static bool has_gradient(PyObject *args, int64_t num_params) {
    for (int64_t i = 0; i < num_params; i++)
        if (PyTuple_GetItem(args, i + 1) != Py_None)
            return true;
    return false;
}

bool handle_has_new_gradients(const struct handle *handle) {
    return handle->gradients.pending || handle->gradients.hooked;
}

int handle_receive(struct handle *handle, PyObject *args) {
    if (!has_gradient(args, handle->num_params))
        return 0;
    if (handle->gradients.pending && settle_pending(handle) < 0)
        return -1;
    ref_set(&handle->gradients.pending, Py_NewRef(args));
    return 0;
}

PyObject *handle_take_received(struct handle *handle) {
    struct gradients *gradients = &handle->gradients;
    PyObject *total = gradients->sum ? Py_NewRef(gradients->sum) : torch_empty_like(handle->form->gradient_like.tensor);
    int result = -1;
    if (total)
        result = gradients->sum ? add_pending(handle, total) : pack_pending(handle, total, 1.0);
    if (result < 0) {
        Py_XDECREF(total);
        return NULL;
    }
    Py_CLEAR(gradients->sum);
    Py_CLEAR(gradients->pending);
    return total;
}

/* Everything received in this backward is added to `target`, and released. */
static int add_received(struct handle *handle, PyObject *target) {
    struct gradients *gradients = &handle->gradients;
    int result;
    if (gradients->sum) {
        result = add_pending(handle, gradients->sum) < 0 ? -1 : add_tensor(handle, target, gradients->sum);
    } else {
        result = add_pending(handle, target);
    }
    Py_CLEAR(gradients->sum);
    Py_CLEAR(gradients->pending);
    return result;
}

/* ---- towards the reduction ---- */

/* reduce_input = cast(total) / predivide; the total itself where the dtypes agree. Steals `total`. */
static int divide_total(struct handle *handle, PyObject *total) {
    struct tensor_view from, to;
    PyObject *input = total;
    if (tensor_view_of(total, &from) < 0)
        goto fail;
    if (from.dtype != handle->form->reduce_kind)
        input = torch_empty_like(handle->form->reduce_input_like.tensor);
    if (!input || tensor_view_of(input, &to) < 0)
        goto fail;
    if (tensor_check(handle->kernels->cast_divide(to.data, to.dtype, from.data, from.dtype, handle->layout.padded_numel,
                                                  handle->predivide, handle_stream(handle)),
                     "pre-division of gradients") < 0)
        goto fail;
    if (input != total)
        Py_DECREF(total);
    ref_set(&handle->gradients.reduce_input, input);
    return 0;
fail:
    if (input != total)
        Py_XDECREF(input);
    Py_DECREF(total);
    return -1;
}

/* The one pass of the usual step: a single contribution is copied, cast and pre-divided at once. */
static int pack_directly(struct handle *handle) {
    PyObject *input = torch_empty_like(handle->form->reduce_input_like.tensor);
    if (!input || pack_pending(handle, input, handle->predivide) < 0) {
        Py_XDECREF(input);
        return -1;
    }
    ref_set(&handle->gradients.reduce_input, input);
    Py_CLEAR(handle->gradients.pending);
    return 0;
}

int handle_pack(struct handle *handle) {
    struct gradients *gradients = &handle->gradients;
    PyObject **previous = handle->sharded ? &gradients->unsharded : &gradients->saved_shard, *total;
    if (handle_read_comm_hook(handle) < 0)
        return -1;
    gradients->unreduced = gradients->hooked = false;
    if (!*previous && !gradients->sum)
        return pack_directly(handle);
    if (*previous) {
        if (gradients->pending && add_received(handle, *previous) < 0)
            return -1;
        total = *previous;
        *previous = NULL;
    } else {
        total = handle_take_received(handle);
    }
    return total ? divide_total(handle, total) : -1;
}

/* ---- no_sync ---- */

int handle_accumulate_unsharded(struct handle *handle) {
    struct gradients *gradients = &handle->gradients;
    PyObject **total = handle->sharded ? &gradients->unsharded : &gradients->saved_shard;
    gradients->unreduced = true;
    gradients->hooked = false;
    if (!*total)
        return (*total = handle_take_received(handle)) ? 0 : -1;
    return gradients->pending ? add_received(handle, *total) : 0;
}

void handle_drop_gradients(struct handle *handle) {
    struct gradients *gradients = &handle->gradients;
    Py_CLEAR(gradients->pending);
    Py_CLEAR(gradients->sum);
    Py_CLEAR(gradients->saved_shard);
    Py_CLEAR(gradients->offloaded);
    Py_CLEAR(gradients->reduce_input);
    Py_CLEAR(gradients->reduce_output);
    Py_CLEAR(gradients->work);
    gradients->in_backward = gradients->hooked = false;
}
