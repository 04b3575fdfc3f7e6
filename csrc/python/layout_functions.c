/* Module functions over layout/: partitions, exchange plans and boxes, for state dicts and checkpoints. */
#include "python/types.h"

#include <stdbool.h>

#include "base/memory.h"
#include "layout/boxes.h"
#include "layout/exchange.h"
#include "layout/partition.h"
#include "torch/ref.h"

/* Return `list`, which is stolen, as a tuple; NULL when `list` is NULL or `failed`. */
static PyObject *tuple_or_null(PyObject *list, bool failed) {
    PyObject *tuple = failed || !list ? NULL : PyList_AsTuple(list);
    Py_XDECREF(list);
    return tuple;
}

/* ---- partitions ---- */

static int read_partition(PyObject *object, void *output) {
    struct partition *partition = output;
    long long numel, step, offset;
    OWNED *fields = PySequence_Tuple(object);
    if (!fields ||
        !PyArg_ParseTuple(fields, "LLL;a partition is (numel, step, offset)", &numel, &step, &offset))
        return 0;
    *partition = (struct partition){numel, step, offset};
    if (partition_is_valid(partition))
        return 1;
    PyErr_Format(
        PyExc_ValueError,
        "not a partition: numel %lld, step %lld, offset %lld. numel and offset must be >= 0, step >= 1, "
        "and their sum must fit into 64 bits.",
        numel, step, offset);
    return 0;
}

static PyObject *partition_bounds(PyObject *self, PyObject *args) {
    struct partition partition;
    long long rank;
    if (!PyArg_ParseTuple(args, "O&L:partition_bounds", read_partition, &partition, &rank))
        return NULL;
    const struct partition_range range = partition_of_rank(&partition, rank);
    return Py_BuildValue("(LL)", (long long)range.start, (long long)range.end);
}

static PyObject *partition_overlaps(PyObject *self, PyObject *args) {
    struct partition mine, theirs;
    long long rank;
    if (!PyArg_ParseTuple(args, "O&O&L:partition_overlaps", read_partition, &mine, read_partition, &theirs,
                          &rank))
        return NULL;
    if (mine.numel != theirs.numel)
        return PyErr_Format(PyExc_ValueError,
                            "the partitions must have the same numel, but have %lld and %lld elements",
                            (long long)mine.numel, (long long)theirs.numel);
    const struct partition_range own = partition_of_rank(&mine, rank);
    PyObject *overlaps = PyList_New(0);
    bool failed = !overlaps;
    for (int64_t start = own.start; !failed && start < own.end;) {
        const struct partition_range part = partition_next(&theirs, start, own.end);
        failed = ref_append(overlaps,
                            Py_BuildValue("(LLL)", (long long)part.rank, (long long)(part.start - own.start),
                                          (long long)(part.end - part.start))) < 0;
        start = part.end;
    }
    return tuple_or_null(overlaps, failed);
}

/* ---- exchange plans ---- */

static PyObject *int_list(const int64_t *values, size_t count) {
    PyObject *list = PyList_New(0);
    bool failed = !list;
    for (size_t i = 0; !failed && i < count; i++)
        failed = ref_append(list, PyLong_FromLongLong(values[i])) < 0;
    if (failed)
        Py_CLEAR(list);
    return list;
}

/* Return (source, start, nbytes) of each range as one flat list, for an int[] argument of an op. */
static PyObject *range_list(const struct exchange_ranges *ranges) {
    _Static_assert(sizeof *ranges->items == 3 * sizeof(int64_t), "a range is three numbers");
    return int_list((const int64_t *)ranges->items, 3 * ranges->count);
}

static int read_exchange_tensor(PyObject *item, struct exchange_tensor *tensor) {
    long long element_nbytes;
    if (!PyArg_ParseTuple(item, "O&O&L;expected (source, target, element_nbytes)", read_partition,
                          &tensor->source, read_partition, &tensor->target, &element_nbytes))
        return -1;
    tensor->element_nbytes = element_nbytes;
    return 0;
}

static PyObject *plan_of(const struct exchange_tensor *tensors, size_t count, long long rank,
                         long long world_size, bool gathered) {
    struct exchange plan;
    const enum status status = exchange_init(&plan, tensors, count, rank, world_size, gathered);
    if (status == STATUS_NO_MEMORY)
        return PyErr_NoMemory();
    if (status)
        return PyErr_Format(
            PyExc_ValueError,
            "no exchange plan for rank %lld of %lld: source and target have different numels, a "
            "size is out of range, or some elements are beyond the last rank",
            rank, world_size);
    PyObject *result =
        Py_BuildValue("(NNNNNNN)", int_list(plan.source_nbytes, count), int_list(plan.target_nbytes, count),
                      range_list(&plan.sent), int_list(plan.sent_nbytes, (size_t)world_size),
                      int_list(plan.received_nbytes, (size_t)world_size), range_list(&plan.parts),
                      int_list(plan.part_counts, count));
    exchange_free(&plan);
    return result;
}

static PyObject *exchange_plan(PyObject *self, PyObject *args) {
    PyObject *sequence, *result = NULL;
    long long rank, world_size;
    int gathered;
    if (!PyArg_ParseTuple(args, "OLLp:exchange_plan", &sequence, &rank, &world_size, &gathered))
        return NULL;
    OWNED *items = PySequence_Tuple(sequence);
    const Py_ssize_t count = items ? PyTuple_Size(items) : 0;
    struct exchange_tensor *tensors = items ? mem_new_array((size_t)count, sizeof *tensors) : NULL;
    bool failed = !tensors;
    for (Py_ssize_t i = 0; !failed && i < count; i++)
        failed = read_exchange_tensor(PyTuple_GetItem(items, i), &tensors[i]) < 0;
    if (!failed)
        result = plan_of(tensors, (size_t)count, rank, world_size, gathered);
    else if (!PyErr_Occurred())
        PyErr_NoMemory();
    mem_free(tensors);
    return result;
}

/* ---- boxes ---- */

/* Read sizes, each >= 0, and their product. Return the number of dimensions, or -1. */
static int read_shape(PyObject *sequence, int64_t *shape, int64_t *numel) {
    OWNED *sizes = PySequence_Tuple(sequence);
    if (!sizes)
        return -1;
    const Py_ssize_t ndim = PyTuple_Size(sizes);
    bool failed = ndim > BOXES_MAX_DIM;
    *numel = 1;
    if (failed)
        PyErr_Format(PyExc_ValueError, "the shape has %zd dimensions, but at most %d are supported", ndim,
                     BOXES_MAX_DIM);
    for (Py_ssize_t dim = 0; !failed && dim < ndim; dim++) {
        shape[dim] = PyLong_AsLongLong(PyTuple_GetItem(sizes, dim));
        failed = shape[dim] < 0 || (shape[dim] > 0 && *numel > INT64_MAX / shape[dim]);
        if (failed && !PyErr_Occurred())
            PyErr_Format(PyExc_ValueError, "not a shape of at most 2**63 - 1 elements: %R", sizes);
        *numel *= failed ? 1 : shape[dim];
    }
    return failed ? -1 : (int)ndim;
}

static PyObject *sizes_tuple(const int64_t *sizes, int ndim) {
    return tuple_or_null(int_list(sizes, (size_t)ndim), false);
}

static PyObject *flat_range_boxes(PyObject *self, PyObject *args) {
    PyObject *sequence;
    long long start, end;
    int64_t shape[BOXES_MAX_DIM], numel;
    if (!PyArg_ParseTuple(args, "OLL:flat_range_boxes", &sequence, &start, &end))
        return NULL;
    const int ndim = read_shape(sequence, shape, &numel);
    if (ndim < 0)
        return NULL;
    if (start < 0 || start > end || end > numel)
        return PyErr_Format(PyExc_ValueError, "[%lld, %lld) is not a range of %lld elements", start, end,
                            (long long)numel);
    PyObject *boxes = PyList_New(0);
    bool failed = !boxes;
    while (!failed && start < end) {
        struct box box;
        start += box_at(shape, ndim, start, end, &box);
        failed = ref_append(boxes, Py_BuildValue("(NN)", sizes_tuple(box.offsets, ndim),
                                                 sizes_tuple(box.sizes, ndim))) < 0;
    }
    return tuple_or_null(boxes, failed);
}

static PyMethodDef functions[] = {
    {"partition_bounds", partition_bounds, METH_VARARGS,
     "partition_bounds(partition, rank, /)\n--\n\nReturn the range (start, end) of a rank, (0, 0) if empty."},
    {"partition_overlaps", partition_overlaps, METH_VARARGS,
     "partition_overlaps(mine, theirs, rank, /)\n--\n\n"
     "Return (rank under `theirs`, offset in the piece, numel) for each part of `rank`'s piece under "
     "`mine`."},
    {"exchange_plan", exchange_plan, METH_VARARGS,
     "exchange_plan(tensors, rank, world_size, gathered, /)\n--\n\n"
     "Return the plan of a rank that moves tensors, each (source, target, element_nbytes), from the source "
     "to "
     "the target partition."},
    {"flat_range_boxes", flat_range_boxes, METH_VARARGS,
     "flat_range_boxes(shape, start, end, /)\n--\n\n"
     "Return the boxes (offsets, sizes) of the elements [start, end) of a contiguous tensor, in that order."},
    {NULL, NULL, 0, NULL},
};

int layout_functions_add(PyObject *module) {
    return PyModule_AddFunctions(module, functions);
}
