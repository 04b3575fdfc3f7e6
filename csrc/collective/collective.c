#include "collective/collective.h"

#include <stdbool.h>
#include <string.h>

#include "torch/names.h"
#include "torch/trace.h"

/* One collective of torch.distributed under one of its public names, newest name first. */
struct public_name {
    const char *name;
    PyObject *interned; /* owned */
    PyObject *original; /* owned; NULL where this torch does not have the name */
};

static struct public_name gather_names[] = {{"all_gather_single", NULL, NULL}, {"all_gather_into_tensor", NULL, NULL}};
static struct public_name scatter_names[] = {{"reduce_scatter_single", NULL, NULL},
                                             {"reduce_scatter_tensor", NULL, NULL}};
static struct public_name reduce_names[] = {{"all_reduce", NULL, NULL}};
static PyObject *public_functions; /* owned; the dict of torch.distributed */

/* Owned for ever. Nobody asks for a handle to wait for later: so NCCL runs on the stream that is current, and keeps no tensor. */
static PyObject *gather_options, *scatter_options, *reduce_options;

static int names_find(struct public_name *names, size_t count) {
    for (size_t i = 0; i < count; i++) {
        if (!(names[i].interned = PyUnicode_InternFromString(names[i].name)))
            return -1;
        names[i].original = Py_XNewRef(PyDict_GetItemWithError(public_functions, names[i].interned));
        if (!names[i].original && PyErr_Occurred())
            return -1;
    }
    return 0;
}

/* New reference. Sums are the default. */
static PyObject *make_options(PyObject *module, const char *name) {
    PyObject *options = PyObject_CallMethod(module, name, NULL);
    if (options && PyObject_SetAttrString(options, "asyncOp", Py_False) < 0)
        Py_CLEAR(options);
    return options;
}

static int init_options(void) {
    PyObject *module = PyImport_ImportModule("torch._C._distributed_c10d");
    if (!module)
        return -1;
    gather_options = make_options(module, "AllgatherOptions");
    scatter_options = gather_options ? make_options(module, "ReduceScatterOptions") : NULL;
    reduce_options = scatter_options ? make_options(module, "AllreduceOptions") : NULL;
    Py_DECREF(module);
    return reduce_options ? 0 : -1;
}

int collective_init(void) {
    if (public_functions)
        return 0;
    PyObject *module = PyImport_ImportModule("torch.distributed");
    if (!module)
        return -1;
    public_functions = Py_NewRef(PyModule_GetDict(module));
    Py_DECREF(module);
    if (init_options() < 0 || names_find(gather_names, 2) < 0 || names_find(scatter_names, 2) < 0 ||
        names_find(reduce_names, 1) < 0)
        return -1;
    return 0;
}

/* The function that stands under a public name and is not the one torch put there, borrowed; NULL when nothing was replaced. */
static PyObject *replacement(const struct public_name *names, size_t count) {
    for (size_t i = 0; i < count; i++) {
        PyObject *now = PyDict_GetItemWithError(public_functions, names[i].interned);
        if (now != names[i].original && now)
            return now;
    }
    return NULL;
}

int collective_group_init(struct collective_group *group, PyObject *process_group) {
    memset(group, 0, sizeof *group);
    PyObject *size = PyObject_CallMethod(process_group, "size", NULL);
    PyObject *rank = size ? PyObject_CallMethod(process_group, "rank", NULL) : NULL;
    if (!rank)
        goto fail;
    group->world_size = PyLong_AsLongLong(size);
    group->rank = PyLong_AsLongLong(rank);
    if (PyErr_Occurred())
        goto fail;
    group->group = Py_NewRef(process_group);
    group->gather_group = Py_NewRef(process_group);
    group->scatter_group = Py_NewRef(process_group);
    if (!(group->all_gather = PyObject_GetAttrString(process_group, "_allgather_base")))
        goto fail;
    if (!(group->reduce_scatter = PyObject_GetAttrString(process_group, "_reduce_scatter_base")))
        goto fail;
    if (!(group->all_reduce = PyObject_GetAttrString(process_group, "allreduce")))
        goto fail;
    Py_DECREF(size);
    Py_DECREF(rank);
    return 0;
fail:
    Py_XDECREF(size);
    Py_XDECREF(rank);
    collective_group_fini(group);
    return -1;
}

void collective_group_fini(struct collective_group *group) {
    Py_CLEAR(group->group);
    Py_CLEAR(group->gather_group);
    Py_CLEAR(group->scatter_group);
    Py_CLEAR(group->all_gather);
    Py_CLEAR(group->reduce_scatter);
    Py_CLEAR(group->all_reduce);
}

int collective_fake_all_gather(struct collective_group *group, PyObject *fake) {
    ref_set(&group->gather_group, Py_NewRef(fake));
    ref_set(&group->all_gather, PyObject_GetAttrString(fake, "_allgather_base"));
    return group->all_gather ? 0 : -1;
}

int collective_fake_reduce_scatter(struct collective_group *group, PyObject *fake) {
    ref_set(&group->scatter_group, Py_NewRef(fake));
    ref_set(&group->reduce_scatter, PyObject_GetAttrString(fake, "_reduce_scatter_base"));
    return group->reduce_scatter ? 0 : -1;
}

static PyObject *call_replacement(PyObject *function, PyObject *group, PyObject *output, PyObject *input) {
    PyObject *args = input ? PyTuple_Pack(2, output, input) : PyTuple_Pack(1, output);
    PyObject *kwargs = Py_BuildValue("{sO}", "group", group);
    PyObject *work = args && kwargs ? PyObject_Call(function, args, kwargs) : NULL;
    Py_XDECREF(args);
    Py_XDECREF(kwargs);
    return work;
}

PyObject *collective_all_gather(const struct collective_group *group, PyObject *output, PyObject *input) {
    PyObject *function = replacement(gather_names, 2);
    trace_read(input);
    trace_write(output);
    if (function)
        return call_replacement(function, group->gather_group, output, input);
    return PyObject_CallFunctionObjArgs(group->all_gather, output, input, gather_options, NULL);
}

PyObject *collective_reduce_scatter(const struct collective_group *group, PyObject *output, PyObject *input) {
    PyObject *function = replacement(scatter_names, 2);
    trace_read(input);
    trace_write(output);
    if (function)
        return call_replacement(function, group->scatter_group, output, input);
    return PyObject_CallFunctionObjArgs(group->reduce_scatter, output, input, scatter_options, NULL);
}

PyObject *collective_all_reduce(const struct collective_group *group, PyObject *tensor) {
    PyObject *function = replacement(reduce_names, 1);
    trace_write(tensor);
    if (function)
        return call_replacement(function, group->group, tensor, NULL);
    PyObject *tensors = PyList_New(1), *work = NULL;
    if (tensors && PyList_SetItem(tensors, 0, Py_NewRef(tensor)) == 0)
        work = PyObject_CallFunctionObjArgs(group->all_reduce, tensors, reduce_options, NULL);
    Py_XDECREF(tensors);
    return work;
}

int collective_wait(PyObject *work) {
    if (work == Py_None) {
        Py_DECREF(work);
        return 0;
    }
    PyObject *done = PyObject_CallMethodObjArgs(work, torch_names.wait, NULL);
    Py_DECREF(work);
    Py_XDECREF(done);
    return done ? 0 : -1;
}
