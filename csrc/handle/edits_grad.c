/* Gradients that the user zeroed or replaced since the last step. */
#include "handle/edits.h"
#include "torch/names.h"
#include "torch/tensor.h"

/* What the user did to one gradient goes into the flat gradient: None is zero there, another tensor's values are copied. */
static int collect_param_grad(struct edits *edits, PyObject *flat_grad, const struct tensor_view *flat, int64_t param,
                              PyObject *grad) {
    int64_t offset = gradients_offset(edits->gradients, param);
    struct tensor_view view;
    if (offset < 0)
        return 0;
    if (grad != Py_None) {
        if (tensor_view_of(grad, &view) < 0)
            return gradients_refuse(edits->gradients, param);
        if ((const char *)view.data == (const char *)flat->data + offset * dtype_nbytes(flat->dtype))
            return 0;
    }
    if (grad == Py_None && gradients_note_hidden(edits->gradients, param) < 0)
        return -1;
    if (edits_warn_writeback(edits, param, "Gradient", grad) < 0 ||
        gradients_forget_reduced(edits->gradients, param) < 0)
        return -1;
    PyObject *part = gradients_part(edits->gradients, flat_grad, param), *done = NULL;
    if (part)
        done =
            grad == Py_None ? PyObject_CallMethod(part, "zero_", NULL) : PyObject_CallMethod(part, "copy_", "O", grad);
    int result = done ? 0 : -1;
    if (!result && grad != Py_None) /* what comes to .grad from now on is not there yet */
        result = torch_set_foreign_grad(PyList_GetItem(edits->param->params, param), part);
    Py_XDECREF(part);
    Py_XDECREF(done);
    return result;
}

/* 1 when some original parameter has a gradient, 0 when none has, -1 on error. */
static int any_param_grad(struct edits *edits) {
    for (int64_t i = 0; i < edits->param->num_params; i++) {
        if (gradients_offset(edits->gradients, i) < 0)
            continue;
        PyObject *grad = torch_get_grad(PyList_GetItem(edits->param->params, i));
        if (!grad)
            return -1;
        bool some = grad != Py_None;
        Py_DECREF(grad);
        if (some)
            return 1;
    }
    return 0;
}

static int collect_all(struct edits *edits) {
    struct tensor_view view;
    PyObject *flat_grad = gradients_flat_or_zeros(edits->gradients);
    int result = flat_grad ? tensor_view_of(flat_grad, &view) : -1;
    for (int64_t i = 0; !result && i < edits->param->num_params; i++) {
        PyObject *grad = torch_get_grad(PyList_GetItem(edits->param->params, i));
        result = grad ? collect_param_grad(edits, flat_grad, &view, i, grad) : -1;
        Py_XDECREF(grad);
    }
    Py_XDECREF(flat_grad);
    return result;
}

int edits_collect_grads(struct edits *edits) {
    if (edits->gradients->in_backward)
        return 0;
    if (!edits->param->use_orig_params) {
        PyObject *grad = torch_get_grad(edits->param->tensor);
        if (!grad)
            return -1;
        Py_DECREF(grad);
        return grad == Py_None ? gradients_drop_shown(edits->gradients) : 0;
    }
    int some = any_param_grad(edits);
    if (some < 0)
        return -1;
    return some ? collect_all(edits) : gradients_drop_shown(edits->gradients);
}
