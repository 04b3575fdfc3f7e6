/* What the module is made of: the Python types over the structs of the layers below, and functions over
 * layout/. Each
 * `*_type_create` gives a new heap type, or NULL; each `*_of` the struct inside an object, borrowed while
 * that lives, or NULL with TypeError. */
#ifndef FSDP_PYTHON_TYPES_H
#define FSDP_PYTHON_TYPES_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include "layout/layout.h"
#include "runtime/runtime.h"

/* Python passes what a function does not ask for: itself, or no arguments. */
#pragma GCC diagnostic ignored "-Wunused-parameter"

PyObject *layout_type_create(PyObject *module);
PyObject *handle_type_create(PyObject *module);
PyObject *unit_type_create(PyObject *module);
PyObject *runtime_type_create(PyObject *module);

const struct flat_layout *layout_of(PyObject *object);
struct handle *handle_of(PyObject *object);
struct unit *unit_of(PyObject *object);

int layout_functions_add(PyObject *module); /* partitions, exchange plans and boxes. 0 or -1 */

/* What the collector asks of a type, by the verbs of the struct `inside` its objects. */
#define OBJECT_LIFE(visit_struct, fini_struct)                                                               \
    static int object_traverse(PyObject *self, visitproc visit, void *arg) {                                 \
        Py_VISIT(Py_TYPE(self));                                                                             \
        return visit_struct(inside(self), visit, arg);                                                       \
    }                                                                                                        \
    static int object_clear(PyObject *self) {                                                                \
        fini_struct(inside(self));                                                                           \
        return 0;                                                                                            \
    }                                                                                                        \
    static void object_dealloc(PyObject *self) {                                                             \
        PyTypeObject *type = Py_TYPE(self);                                                                  \
        PyObject_GC_UnTrack(self);                                                                           \
        fini_struct(inside(self));                                                                           \
        ((freefunc)PyType_GetSlot(type, Py_tp_free))(self);                                                  \
        Py_DECREF(type);                                                                                     \
    }

/* A method without arguments that is one verb of the struct that `here` has for the object, or NULL. */
#define METHOD(name, here, verb)                                                                             \
    static PyObject *name(PyObject *self, PyObject *unused) {                                                \
        __typeof__(here(self)) target = here(self);                                                          \
        return none_or_error(target ? verb(target) : -1);                                                    \
    }

/* 0 -> None, -1 -> NULL: the end of a method that returns nothing. */
static inline PyObject *none_or_error(int result) {
    return result < 0 ? NULL : Py_NewRef(Py_None);
}

#endif
