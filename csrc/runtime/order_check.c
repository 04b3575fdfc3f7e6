#include "runtime/order_check.h"

#include "runtime/runtime.h"
#include "torch/names.h"

/* ---- life ---- */

static int init_tensors(struct order_check *check, PyObject *device) {
    PyObject *torch = PyImport_ImportModule("torch");
    PyObject *dtype = torch ? PyObject_GetAttrString(torch, "int64") : NULL;
    if (dtype)
        check->own = torch_empty(1, dtype, device);
    if (check->own)
        check->everyone = torch_empty(check->group.world_size, dtype, device);
    Py_XDECREF(torch);
    Py_XDECREF(dtype);
    return check->everyone ? 0 : -1;
}

struct order_check *order_check_new(PyObject *names, PyObject *process_group, PyObject *device) {
    struct order_check *check = PyMem_Calloc(1, sizeof *check);
    if (!check)
        return (struct order_check *)PyErr_NoMemory();
    check->names = Py_NewRef(names);
    if (collective_group_init(&check->group, process_group) == 0 && init_tensors(check, device) == 0)
        return check;
    order_check_free(check);
    return NULL;
}

void order_check_free(struct order_check *check) {
    if (!check)
        return;
    collective_group_fini(&check->group);
    Py_CLEAR(check->names);
    Py_CLEAR(check->own);
    Py_CLEAR(check->everyone);
    PyMem_Free(check->first);
    PyMem_Free(check);
}

/* ---- first iteration: across ranks ---- */

/* The names of a unit's parameters, borrowed. */
static PyObject *names_of(const struct order_check *check, int64_t index) {
    PyObject *names = index < 0 ? NULL : PyList_GetItem(check->names, index);
    if (!names)
        PyErr_Clear();
    return names ? names : Py_None;
}

/* list of the index that each rank is about to gather. New reference. */
static PyObject *gather_indices(struct order_check *check, int64_t index) {
    PyObject *filled = PyObject_CallMethod(check->own, "fill_", "L", (long long)index);
    PyObject *work = filled ? collective_all_gather(&check->group, check->everyone, check->own) : NULL;
    Py_XDECREF(filled);
    if (!work || collective_wait(work) < 0)
        return NULL;
    return PyObject_CallMethod(check->everyone, "tolist", NULL);
}

static int compare_ranks(struct order_check *check, int64_t index) {
    PyObject *indices = gather_indices(check, index);
    if (!indices)
        return -1;
    int64_t first = PyLong_AsLongLong(PyList_GetItem(indices, 0));
    for (int64_t rank = 1; rank < check->group.world_size && !PyErr_Occurred(); rank++) {
        int64_t other = PyLong_AsLongLong(PyList_GetItem(indices, rank));
        if (other != first)
            PyErr_Format(
                PyExc_RuntimeError,
                "Forward order differs across ranks: rank 0 is all-gathering parameters for %R while rank "
                "%lld is all-gathering parameters for %R. Every rank must run the same units in the same order.",
                names_of(check, first), (long long)rank, names_of(check, other));
    }
    Py_DECREF(indices);
    return PyErr_Occurred() ? -1 : 0;
}

static int append(struct order_check *check, int64_t index) {
    if (check->count == check->capacity) {
        int64_t capacity = check->capacity ? check->capacity * 2 : 16;
        int64_t *first = PyMem_Realloc(check->first, (size_t)capacity * sizeof *first);
        if (!first) {
            PyErr_NoMemory();
            return -1;
        }
        check->first = first;
        check->capacity = capacity;
    }
    check->first[check->count++] = index;
    return 0;
}

/* ---- later iterations: against the first ---- */

static int warn(struct order_check *check, int64_t index, int64_t expected) {
    static const char *const beginning =
        "Forward order differs from that of the first iteration on rank %lld. Collectives are unchecked and may give "
        "incorrect results or hang.\nIn the first iteration came ";
    PyObject *text = PyUnicode_FromFormat(beginning, (long long)check->group.rank), *rest = NULL;
    if (text)
        rest = expected < 0 ? PyUnicode_FromFormat("%Uno more", text)
                            : PyUnicode_FromFormat("%U%R next", text, names_of(check, expected));
    int result = rest ? PyErr_WarnFormat(PyExc_UserWarning, 1, "%U, but %R was run", rest, names_of(check, index)) : -1;
    Py_XDECREF(text);
    Py_XDECREF(rest);
    return result;
}

static int compare_iterations(struct order_check *check, int64_t index) {
    int64_t expected = check->position < check->count ? check->first[check->position] : -1;
    check->position++;
    if (check->warned || check->deviates || index == expected)
        return 0;
    check->deviates = true;
    return warn(check, index, expected);
}

/* ---- entry points ---- */

static int64_t index_of(const struct unit *unit) {
    int64_t index = 0;
    while (unit->runtime->units[index] != unit)
        index++;
    return index;
}

int order_check_pre_forward(struct order_check *check, struct unit *unit) {
    int training = unit_is_training(unit); /* nothing marks the end of an iteration in evaluation */
    if (training <= 0)
        return training;
    int64_t index = index_of(unit);
    if (unit->runtime->order.iteration > 0)
        return compare_iterations(check, index);
    return compare_ranks(check, index) < 0 ? -1 : append(check, index);
}

void order_check_next_iteration(struct order_check *check) {
    check->position = 0;
    check->warned = check->warned || check->deviates;
    check->deviates = false;
}
