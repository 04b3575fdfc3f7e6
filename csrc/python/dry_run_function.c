/* The function dry_run. */
#include "python/dry_run_function.h"

#include "base/memory.h"
#include "runtime/dry_run.h"

/* 0, or -1 with an exception. */
static int read_unit(PyObject *item, int64_t index, struct dry_unit *unit) {
    long long parent, nbytes, reduce_nbytes = 0, node_nbytes = 0;
    int strategy, backward_prefetch, forward_prefetch, has_params, is_trainable;
    int is_segment = 0, is_optional = 0;
    if (!PyArg_ParseTuple(item,
                          "LLiippp|ppLL;a unit is (parent, nbytes, strategy, backward_prefetch, forward_prefetch, "
                          "has_params, is_trainable[, is_segment[, is_optional[, reduce_nbytes[, node_nbytes]]]])",
                          &parent, &nbytes, &strategy, &backward_prefetch, &forward_prefetch, &has_params,
                          &is_trainable, &is_segment, &is_optional, &reduce_nbytes, &node_nbytes))
        return -1;
    if (index ? parent < 0 || parent >= index : parent != -1) {
        PyErr_Format(PyExc_ValueError, "unit %lld is inside unit %lld: outer units come first, and the root is one",
                     (long long)index, parent);
        return -1;
    }
    *unit = (struct dry_unit){parent,
                              nbytes,
                              node_nbytes,
                              (enum sharding_strategy)strategy,
                              (enum backward_prefetch)backward_prefetch,
                              forward_prefetch,
                              has_params,
                              is_trainable,
                              is_segment,
                              is_optional,
                              reduce_nbytes};
    return 0;
}

/* New array of the units in a tuple, or NULL with an exception. */
static struct dry_unit *read_units(PyObject *items) {
    Py_ssize_t count = PyTuple_Size(items);
    struct dry_unit *units = mem_new_array((size_t)count, sizeof *units);
    bool failed = !units || count == 0;
    if (units && failed)
        PyErr_SetString(PyExc_ValueError, "a dry run needs at least the root");
    for (Py_ssize_t i = 0; !failed && i < count; i++)
        failed = read_unit(PyTuple_GetItem(items, i), i, &units[i]) < 0;
    if (!failed)
        return units;
    if (!PyErr_Occurred())
        PyErr_NoMemory();
    mem_free(units);
    return NULL;
}

/* New array of the truth of what is in a tuple, or NULL with an exception. */
static bool *read_bools(PyObject *items) {
    Py_ssize_t count = PyTuple_Size(items);
    bool *values = mem_new_array((size_t)count, sizeof *values);
    for (Py_ssize_t i = 0; values && i < count; i++)
        values[i] = PyTuple_GetItem(items, i) == Py_True;
    return values ? values : (bool *)PyErr_NoMemory();
}

static PyObject *dry_run(PyObject *self, PyObject *args, PyObject *kwargs) {
    static char *names[] = {"units",
                            "sync_gradients",
                            "backward_prefetch_limit",
                            "forward_prefetch_limit",
                            "has_streams",
                            "inputs_require_grad",
                            NULL};
    PyObject *items, *syncs, *result = NULL;
    long long backward_limit, forward_limit;
    int has_streams, inputs_require_grad;
    (void)self;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "O!O!$LLpp", names, &PyTuple_Type, &items, &PyTuple_Type, &syncs,
                                     &backward_limit, &forward_limit, &has_streams, &inputs_require_grad))
        return NULL;
    struct dry_unit *units = read_units(items);
    bool *sync_gradients = units ? read_bools(syncs) : NULL;
    if (sync_gradients) {
        struct dry_tree tree = {units,         PyTuple_Size(items), backward_limit,
                                forward_limit, has_streams,         inputs_require_grad};
        result = dry_run_steps(&tree, sync_gradients, PyTuple_Size(syncs));
    }
    mem_free(units);
    mem_free(sync_gradients);
    return result;
}

static PyMethodDef functions[] = {
    {"dry_run", (PyCFunction)(void (*)(void))dry_run, METH_VARARGS | METH_KEYWORDS, NULL},
    {NULL, NULL, 0, NULL},
};

int dry_run_function_add(PyObject *module) {
    return PyModule_AddFunctions(module, functions);
}
