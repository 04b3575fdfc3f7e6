/* Gradients that autograd itself adds to `.grad` amid a backward.
 *
 * [Note: terms beside the units] A loss may have terms of the parameters as they are between steps:
 * sum(p.square().sum() for p in model.parameters()). Where such a term was made before the forward, its
 * gradient comes after the unit's own has been packed, and autograd sets or adds to `.grad`. It is of the
 * shard, and nobody reduces it, as nobody does where the term was made after the forward and the gradient was
 * there before the backward came to the unit.
 *
 * What parameters show of earlier backwards is hidden meanwhile, as a reduction on another stream adds to
 * it. */
#include "handle/gradients.h"
#include "torch/names.h"
#include "torch/tensor.h"

static bool is_part_of(PyObject *grad, const struct tensor_view *whole) {
    struct tensor_view view;
    if (tensor_view_of(grad, &view) < 0) {
        PyErr_Clear();
        return false;
    }
    uintptr_t nbytes = (uintptr_t)(tensor_view_numel(whole) * dtype_nbytes(whole->dtype));
    return (uintptr_t)view.data - (uintptr_t)whole->data < nbytes;
}

int gradients_hide(struct gradients *gradients, PyObject *whole_grad, bool aside) {
    struct tensor_view whole;
    if (!gradients->param->use_orig_params)
        return 0;
    ref_set(&gradients->hidden, PyList_New(0));
    if (!gradients->hidden || tensor_view_of(whole_grad, &whole) < 0)
        return -1;
    for (int64_t i = 0; i < gradients->param->num_params; i++) {
        PyObject *param = PyList_GetItem(gradients->param->params, i);
        OWNED *grad = torch_get_grad(param);
        bool hides = grad && grad != Py_None && is_part_of(grad, &whole);
        if (!grad ||
            PyList_Append(gradients->hidden, !hides  ? Py_None
                                             : aside ? grad
                                                     : Py_True) < 0 ||
            (hides && torch_set_grad(param, Py_None) < 0))
            return -1;
    }
    return 0;
}

int gradients_show_again(struct gradients *gradients) {
    OWNED *hidden = gradients->hidden;
    gradients->hidden = NULL;
    int result = 0;
    for (Py_ssize_t i = 0; hidden && !result && i < PyList_Size(hidden); i++)
        if (torch_is_tensor(PyList_GetItem(hidden, i)))
            result = torch_set_foreign_grad(PyList_GetItem(gradients->param->params, i),
                                            PyList_GetItem(hidden, i));
    return result;
}

static int add(const struct gradients *gradients, PyObject **shard, PyObject *late, int64_t index) {
    if (!*shard && !(*shard = torch_zeros_like(gradients->storage->shard_like)))
        return -1;
    OWNED *part = index < 0 ? Py_NewRef(*shard) : gradients_part(gradients, *shard, index);
    OWNED *there = part ? PyObject_CallMethod(late, "to", "O", part) : NULL; /* its device and dtype */
    return ref_done(there ? PyObject_CallMethod(part, "add_", "O", there) : NULL);
}

int gradients_add_late(struct gradients *gradients, PyObject **shard) {
    const struct flat_param *param = gradients->param;
    int64_t begin = param->use_orig_params ? 0 : -1; /* the flat parameter */
    int64_t end = param->use_orig_params ? param->num_params : 0;
    int result = 0;
    for (int64_t i = begin; !result && i < end; i++) {
        if (i >= 0 && gradients_offset(gradients, i) < 0)
            continue;
        OWNED *late = torch_get_grad(i < 0 ? param->tensor : PyList_GetItem(param->params, i));
        if (late != Py_None)
            result = !late ? -1 : shard ? add(gradients, shard, late, i) : 1;
    }
    return result;
}
