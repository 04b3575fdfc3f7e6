#include "torch/freed_views.h"

#include "torch/py_torch.h"

static PyTypeObject *freed_type; /* owned; NULL until freed_views_bind() */

int freed_views_bind(PyObject *type) {
    if (!PyType_Check(type) ||
        !PyType_IsSubtype((PyTypeObject *)type, (PyTypeObject *)torch_names.tensor_type))
        return RAISED(PyExc_TypeError, "expected a class of tensors, got %R", type);
    freed_type = (PyTypeObject *)Py_NewRef(type); /* the former class is leaked: views may still have it */
    return 0;
}

int freed_views_init(struct freed_views *views, PyObject *tuple) {
    views->type = freed_type;
    Py_ssize_t count = freed_type ? PyTuple_Size(tuple) : 0;
    views->tensors = PyMem_Calloc((size_t)count + 1, sizeof *views->tensors);
    if (!views->tensors) {
        PyErr_NoMemory();
        return -1;
    }
    for (; views->count < count; views->count++) {
        PyObject *view = PyTuple_GetItem(tuple, views->count);
        views->tensors[views->count] = Py_None;
        if (!Py_IS_TYPE(view, (PyTypeObject *)torch_names.tensor_type))
            continue;
        if (PyObject_SetAttrString(view, "__class__", (PyObject *)views->type) < 0)
            return -1;
        Py_INCREF(torch_names.tensor_type);
        views->tensors[views->count] = view;
    }
    return 0;
}

void freed_views_fini(struct freed_views *views) {
    for (int64_t i = 0; i < views->count; i++)
        if (views->tensors[i] != Py_None)
            Py_DECREF(Py_IS_TYPE(views->tensors[i], views->type) ? torch_names.tensor_type
                                                                 : (PyObject *)views->type);
    PyMem_Free(views->tensors);
    *views = (struct freed_views){0};
}

void freed_views_set(const struct freed_views *views, bool freed) {
    PyTypeObject *plain_type = (PyTypeObject *)torch_names.tensor_type;
    PyTypeObject *from = freed ? plain_type : views->type, *to = freed ? views->type : plain_type;
    for (int64_t i = 0; i < views->count; i++)
        if (Py_IS_TYPE(views->tensors[i], from))
            Py_SET_TYPE(views->tensors[i], to);
}

int64_t freed_views_find(const struct freed_views *views, const PyObject *tensor) {
    for (int64_t i = 0; i < views->count; i++)
        if (views->tensors[i] == tensor)
            return i;
    return -1;
}
