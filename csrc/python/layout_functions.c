#include "python/layout_functions.h"

#include <stdbool.h>

#include "layout/boxes.h"
#include "layout/partition.h"

/* Append `item`, taking the reference. 0, or -1 also for a NULL item. */
static int append_new(PyObject *list, PyObject *item) {
    const int result = item ? PyList_Append(list, item) : -1;
    Py_XDECREF(item);
    return result;
}

/* Hand over `list` as a tuple, or NULL when `failed`. */
static PyObject *tuple_or_null(PyObject *list, bool failed) {
    PyObject *tuple = failed ? NULL : PyList_AsTuple(list);
    Py_XDECREF(list);
    return tuple;
}

/* Partitions */

static int read_partition(PyObject *object, void *output) {
    struct partition *partition = output;
    long long numel, step, offset;
    PyObject *fields = PySequence_Tuple(object);
    if (!fields)
        return 0;
    int converted = PyArg_ParseTuple(fields, "LLL;a partition is (numel, step, offset)", &numel, &step, &offset);
    Py_DECREF(fields);
    if (!converted)
        return 0;
    *partition = (struct partition){numel, step, offset};
    if (partition_is_valid(partition))
        return 1;
    PyErr_Format(PyExc_ValueError, "not a partition: numel %lld, step %lld, offset %lld", numel, step, offset);
    return 0;
}

static PyObject *partition_bounds(PyObject *self, PyObject *args) {
    struct partition partition;
    long long rank;
    (void)self;
    if (!PyArg_ParseTuple(args, "O&L:partition_bounds", read_partition, &partition, &rank))
        return NULL;
    const struct partition_range range = partition_of_rank(&partition, rank);
    return Py_BuildValue("(LL)", (long long)range.start, (long long)range.end);
}

static PyObject *partition_overlaps(PyObject *self, PyObject *args) {
    struct partition mine, theirs;
    long long rank;
    (void)self;
    if (!PyArg_ParseTuple(args, "O&O&L:partition_overlaps", read_partition, &mine, read_partition, &theirs, &rank))
        return NULL;
    if (mine.numel != theirs.numel)
        return PyErr_Format(PyExc_ValueError, "partitions of %lld and of %lld elements", (long long)mine.numel,
                            (long long)theirs.numel);
    const struct partition_range own = partition_of_rank(&mine, rank);
    PyObject *overlaps = PyList_New(0);
    bool failed = !overlaps;
    for (int64_t start = own.start; !failed && start < own.end;) {
        const struct partition_range part = partition_next(&theirs, start, own.end);
        failed = append_new(overlaps, Py_BuildValue("(LLL)", (long long)part.rank, (long long)(part.start - own.start),
                                                    (long long)(part.end - part.start))) < 0;
        start = part.end;
    }
    return tuple_or_null(overlaps, failed);
}

/* Exchange plans */

/* What one rank sends and receives: new references, filled tensor by tensor. */
struct plan {
    PyObject *held;     /* numel of this rank's part of each tensor before, in wire elements */
    PyObject *outgoing; /* by peer: (tensor, start in this rank's part, numel) */
    PyObject *incoming; /* by peer: numels */
    PyObject *senders;  /* of each tensor: the peers that its parts come from, in order */
};

static PyObject *new_lists(Py_ssize_t count) {
    PyObject *lists = PyList_New(0);
    for (Py_ssize_t i = 0; lists && i < count; i++) {
        if (append_new(lists, PyList_New(0)) < 0)
            Py_CLEAR(lists);
    }
    return lists;
}

static int plan_outgoing(struct plan *plan, long long tensor, const struct partition *source,
                         const struct partition *target, long long rank, long long scale) {
    const struct partition_range own = partition_of_rank(source, rank);
    int result = append_new(plan->held, PyLong_FromLongLong((own.end - own.start) * scale));
    for (int64_t start = own.start; !result && start < own.end;) {
        const struct partition_range part = partition_next(target, start, own.end);
        PyObject *list = PyList_GetItem(plan->outgoing, (Py_ssize_t)part.rank); /* borrowed */
        result = !list ? -1
                       : append_new(list, Py_BuildValue("(LLL)", tensor, (long long)(part.start - own.start) * scale,
                                                        (long long)(part.end - part.start) * scale));
        start = part.end;
    }
    return result;
}

static int plan_incoming(struct plan *plan, const struct partition *source, const struct partition *target,
                         long long rank, long long scale) {
    const struct partition_range own = partition_of_rank(target, rank);
    PyObject *senders = PyList_New(0);
    int result = senders ? 0 : -1;
    for (int64_t start = own.start; !result && start < own.end;) {
        const struct partition_range part = partition_next(source, start, own.end);
        PyObject *list = PyList_GetItem(plan->incoming, (Py_ssize_t)part.rank); /* borrowed */
        if (!list || append_new(list, PyLong_FromLongLong((part.end - part.start) * scale)) < 0 ||
            append_new(senders, PyLong_FromLongLong(part.rank)) < 0)
            result = -1;
        start = part.end;
    }
    if (result)
        Py_CLEAR(senders);
    return append_new(plan->senders, senders);
}

static int plan_tensor(struct plan *plan, PyObject *item, long long tensor, long long rank) {
    struct partition source, target;
    long long scale;
    if (!PyArg_ParseTuple(item, "O&O&L;expected (source, target, scale)", read_partition, &source, read_partition,
                          &target, &scale))
        return -1;
    if (source.numel != target.numel || scale < 1 || source.numel > INT64_MAX / scale) {
        PyErr_Format(PyExc_ValueError, "tensor %lld: partitions of %lld and of %lld elements, scale %lld", tensor,
                     (long long)source.numel, (long long)target.numel, scale);
        return -1;
    }
    return plan_outgoing(plan, tensor, &source, &target, rank, scale) < 0
               ? -1
               : plan_incoming(plan, &source, &target, rank, scale);
}

static PyObject *exchange_plan(PyObject *self, PyObject *args) {
    PyObject *tensors, *item, *result = NULL;
    long long rank, world_size, count = 0;
    (void)self;
    if (!PyArg_ParseTuple(args, "OLL:exchange_plan", &tensors, &rank, &world_size))
        return NULL;
    struct plan plan = {PyList_New(0), new_lists((Py_ssize_t)world_size), new_lists((Py_ssize_t)world_size),
                        PyList_New(0)};
    PyObject *iterator = PyObject_GetIter(tensors);
    bool failed = !iterator || !plan.held || !plan.outgoing || !plan.incoming || !plan.senders;
    while (!failed && (item = PyIter_Next(iterator))) {
        failed = plan_tensor(&plan, item, count++, rank) < 0;
        Py_DECREF(item);
    }
    if (!failed && !PyErr_Occurred())
        result = PyTuple_Pack(4, plan.held, plan.outgoing, plan.incoming, plan.senders);
    Py_XDECREF(plan.held);
    Py_XDECREF(plan.outgoing);
    Py_XDECREF(plan.incoming);
    Py_XDECREF(plan.senders);
    Py_XDECREF(iterator);
    return result;
}

/* Boxes */

/* The sizes, each >= 0, and their product. The number of dimensions, or -1. */
static int read_shape(PyObject *sequence, int64_t *shape, int64_t *numel) {
    PyObject *sizes = PySequence_Tuple(sequence);
    if (!sizes)
        return -1;
    const Py_ssize_t ndim = PyTuple_Size(sizes);
    bool failed = ndim > BOXES_MAX_DIM;
    *numel = 1;
    if (failed)
        PyErr_Format(PyExc_ValueError, "a shape of %zd dimensions; at most %d are supported", ndim, BOXES_MAX_DIM);
    for (Py_ssize_t dim = 0; !failed && dim < ndim; dim++) {
        shape[dim] = PyLong_AsLongLong(PyTuple_GetItem(sizes, dim));
        failed = shape[dim] < 0 || (shape[dim] > 0 && *numel > INT64_MAX / shape[dim]);
        if (failed && !PyErr_Occurred())
            PyErr_Format(PyExc_ValueError, "not a shape of at most 2**63 - 1 elements: %R", sizes);
        *numel *= failed ? 1 : shape[dim];
    }
    Py_DECREF(sizes);
    return failed ? -1 : (int)ndim;
}

static PyObject *sizes_tuple(const int64_t *sizes, int ndim) {
    PyObject *list = PyList_New(0);
    bool failed = !list;
    for (int dim = 0; !failed && dim < ndim; dim++)
        failed = append_new(list, PyLong_FromLongLong(sizes[dim])) < 0;
    return tuple_or_null(list, failed);
}

static PyObject *flat_range_boxes(PyObject *self, PyObject *args) {
    PyObject *sequence;
    long long start, end;
    int64_t shape[BOXES_MAX_DIM], numel;
    (void)self;
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
        failed =
            append_new(boxes, Py_BuildValue("(NN)", sizes_tuple(box.offsets, ndim), sizes_tuple(box.sizes, ndim))) < 0;
    }
    return tuple_or_null(boxes, failed);
}

static PyMethodDef functions[] = {
    {"partition_bounds", partition_bounds, METH_VARARGS,
     "partition_bounds(partition, rank, /)\n--\n\nThe (start, end) that a rank holds, (0, 0) for nothing."},
    {"partition_overlaps", partition_overlaps, METH_VARARGS,
     "partition_overlaps(mine, theirs, rank, /)\n--\n\n"
     "For what `rank` holds under `mine`: (rank under `theirs`, offset in what is held, numel) in order."},
    {"exchange_plan", exchange_plan, METH_VARARGS,
     "exchange_plan(tensors, rank, world_size, /)\n--\n\n"
     "What a rank sends and receives to bring tensors, each (source, target, scale), from one partition to another."},
    {"flat_range_boxes", flat_range_boxes, METH_VARARGS,
     "flat_range_boxes(shape, start, end, /)\n--\n\n"
     "The boxes (offsets, sizes) of a contiguous tensor that hold its elements [start, end), in that order."},
    {NULL, NULL, 0, NULL},
};

int layout_functions_add(PyObject *module) {
    return PyModule_AddFunctions(module, functions);
}
