/* The views of a storage that is freed between uses. While it is freed, the views have a class that raises on
 * each access to their values and names parameter and unit: fsdp_c/sharding/param_views.py.
 *
 * The tensor objects stay the same, for modules and for user code that keeps them after a forward. While the
 * storage is allocated, the views are plain tensors, and operators run at full speed. The first change of
 * class assigns `__class__`, which checks that the layouts of both classes agree; later ones store ob_type.
 *
 * Invariant: each tensor counts as a reference to both classes at any time. A bound class is never freed. */
#ifndef FSDP_TORCH_FREED_VIEWS_H
#define FSDP_TORCH_FREED_VIEWS_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stdbool.h>
#include <stdint.h>

struct freed_views {
    PyObject *
        *tensors; /* owned array of borrowed views; None in place of a view that is not a plain tensor */
    PyTypeObject *type; /* borrowed; class of the views while they are freed */
    int64_t count;
};

/* Set the class of freed views for all later freed_views_init() calls. 0 or -1. */
int freed_views_bind(PyObject *type);

/* Initialise from the views in `tuple`, which outlives `views`, and set their class to the freed one. 0 or
 * -1. */
int freed_views_init(struct freed_views *views, PyObject *tuple);
void freed_views_fini(struct freed_views *views); /* Release the references; the classes stay. */
/* Set the class of all views: the freed one, or torch.Tensor. */
void freed_views_set(const struct freed_views *views, bool freed);
/* Return the index of `tensor`, or -1. */
int64_t freed_views_find(const struct freed_views *views, const PyObject *tensor);

#endif
