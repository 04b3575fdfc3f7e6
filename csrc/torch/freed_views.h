/* Views of a storage that comes and goes. While it is freed they are of a class that refuses, by the names of
 * parameter and unit, whatever needs their values: fsdp_c/sharding/freed_views.py.
 *
 * The tensors stay the same objects, for modules and for whoever has kept them from a forward, and are plain
 * ones while the storage is there: operators cost what they do without. A class is set as by assigning
 * `__class__` the first time, which checks that both have one layout; then by a store.
 *
 * Invariant: each of the tensors counts as a reference to both classes, whichever it is of. A class that was
 * bound is never freed. */
#ifndef FSDP_TORCH_FREED_VIEWS_H
#define FSDP_TORCH_FREED_VIEWS_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stdbool.h>
#include <stdint.h>

struct freed_views {
    PyObject **tensors; /* owned array of borrowed views; None for one that is no plain tensor */
    PyTypeObject *type; /* borrowed; their class while they are freed */
    int64_t count;
};

/* The class of those that are made from now on. 0 or -1 */
int freed_views_bind(PyObject *type);

/* `views`: a tuple that outlives them. They are freed. 0 or -1 */
int freed_views_init(struct freed_views *views, PyObject *tuple);
void freed_views_fini(struct freed_views *views); /* their classes stay as they are */
void freed_views_set(const struct freed_views *views, bool freed);
/* the index of `tensor`, or -1 */
int64_t freed_views_find(const struct freed_views *views, const PyObject *tensor);

#endif
