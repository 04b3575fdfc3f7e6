/* The Python types over the structs of the layers below, and the functions over layout/.
 *
 *   Python object   | PyObject_HEAD | struct handle, unit, runtime or flat_layout |
 *                                   ^ returned by handle_of(), unit_of(), layout_of()
 *
 * Each `*_type_create` returns a new heap type, or NULL. Each `*_of` returns the struct in an object,
 * borrowed while the object lives; NULL with TypeError. */
#ifndef FSDP_PYTHON_TYPES_H
#define FSDP_PYTHON_TYPES_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include "layout/layout.h"
#include "runtime/runtime.h"

PyObject *layout_type_create(PyObject *module);
PyObject *handle_type_create(PyObject *module);
PyObject *unit_type_create(PyObject *module);
PyObject *runtime_type_create(PyObject *module);

const struct flat_layout *layout_of(PyObject *object);
struct handle *handle_of(PyObject *object);
struct unit *unit_of(PyObject *object);

int layout_functions_add(PyObject *module); /* Add the functions over partitions, plans and boxes. 0 or -1. */

/* Free the memory of an object whose struct has ended: the end of tp_dealloc. */
static inline void object_free(PyObject *self) {
    PyTypeObject *type = Py_TYPE(self);
    ((freefunc)PyType_GetSlot(type, Py_tp_free))(self);
    Py_DECREF(type);
}

/* Define the spec of a type from the static names `object_init`, `object_traverse`, `object_clear`,
 * `object_dealloc`, `methods`, `members` and `attributes` of the file, and further slots, each followed by a
 * comma. */
#define OBJECT_SPEC(struct_object, full_name, more_flags, doc, ...)                                          \
    static PyType_Slot slots[] = {{Py_tp_init, object_init},   {Py_tp_traverse, object_traverse},            \
                                  {Py_tp_clear, object_clear}, {Py_tp_dealloc, object_dealloc},              \
                                  {Py_tp_methods, methods},    {Py_tp_members, members},                     \
                                  {Py_tp_getset, attributes},  {Py_tp_doc, doc},                             \
                                  __VA_ARGS__{0, NULL}};                                                     \
    static PyType_Spec type_spec = {.name = full_name,                                                       \
                                    .basicsize = sizeof(struct_object),                                      \
                                    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | (more_flags),         \
                                    .slots = slots}

/* Define a read-only attribute: name, type of structmember.h, field of the object's struct. */
#define READ_ONLY(name, type, struct_object, field)                                                          \
    {name, type, offsetof(struct_object, field), READONLY, NULL}

/* Return None for 0 and NULL for -1, the result of a method without a value. */
static inline PyObject *none_or_error(int result) {
    return result < 0 ? NULL : Py_NewRef(Py_None);
}

#endif
