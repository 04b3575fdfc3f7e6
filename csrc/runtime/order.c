#include "runtime/order.h"

#include "torch/names.h"
#include "torch/tensor.h"

#include "base/check.h"

/* ---- validation ---- */

static void free_validation(struct order_validation *validation) {
    if (!validation)
        return;
    collective_group_fini(&validation->group);
    Py_CLEAR(validation->names);
    Py_CLEAR(validation->own);
    Py_CLEAR(validation->everyone);
    PyMem_Free(validation->first);
    PyMem_Free(validation);
}

struct order_validation *order_validation_new(PyObject *names, PyObject *process_group, PyObject *device) {
    struct order_validation *validation = PyMem_Calloc(1, sizeof *validation);
    if (!validation)
        return (struct order_validation *)PyErr_NoMemory();
    validation->names = Py_NewRef(names);
    int result = collective_group_init(&validation->group, process_group);
    OWNED *dtype = result < 0 ? NULL : ref_find("torch", "int64");
    if (dtype)
        validation->own = torch_empty(1, dtype, device);
    if (validation->own)
        validation->everyone = torch_empty(validation->group.world_size, dtype, device);
    /* an all-gather that outside code has replaced may fill nothing: then all ranks are alike */
    if (validation->everyone && torch_zero(validation->everyone) == 0)
        return validation;
    free_validation(validation);
    return NULL;
}

/* ---- first iteration: across ranks ---- */

/* The names of a unit's parameters, borrowed. */
static PyObject *names_of(const struct order_validation *validation, int64_t index) {
    PyObject *names = index < 0 ? NULL : PyList_GetItem(validation->names, index);
    if (!names)
        PyErr_Clear();
    return names ? names : Py_None;
}

/* list of each rank's value. New reference. */
static PyObject *gather_values(struct order_validation *validation, int64_t value) {
    OWNED *filled = PyObject_CallMethod(validation->own, "fill_", "L", (long long)value);
    PyObject *work =
        filled ? collective_all_gather(&validation->group, validation->everyone, validation->own) : NULL;
    if (!work || collective_wait(work) < 0)
        return NULL;
    return PyObject_CallMethod(validation->everyone, "tolist", NULL);
}

/* The index that each rank is about to gather. Before it upstream sends how many there are, which is 1:
 * whoever counts collectives finds as many. */
static int compare_ranks(struct order_validation *validation, int64_t index) {
    OWNED *counts = gather_values(validation, 1);
    OWNED *indices = counts ? gather_values(validation, index) : NULL;
    if (!indices)
        return -1;
    int64_t first = PyLong_AsLongLong(PyList_GetItem(indices, 0));
    for (int64_t rank = 1; rank < validation->group.world_size && !PyErr_Occurred(); rank++) {
        int64_t other = PyLong_AsLongLong(PyList_GetItem(indices, rank));
        if (other != first)
            PyErr_Format(
                PyExc_RuntimeError,
                "Forward order differs across ranks: rank 0 is all-gathering parameters for %R while rank "
                "%lld is all-gathering parameters for %R. Every rank must run the same units in the same "
                "order.",
                names_of(validation, first), (long long)rank, names_of(validation, other));
    }
    return PyErr_Occurred() ? -1 : 0;
}

/* Room for twice as many. 0, or -1 with MemoryError. */
static int grow(int64_t **indices, int64_t *capacity) {
    int64_t larger = *capacity ? *capacity * 2 : 16;
    int64_t *grown = PyMem_Realloc(*indices, (size_t)larger * sizeof *grown);
    if (!grown) {
        PyErr_NoMemory();
        return -1;
    }
    *indices = grown;
    *capacity = larger;
    return 0;
}

int order_validate(struct order *order, const struct order_place *place) {
    struct order_validation *validation = order->validation;
    if (order->iteration > 0) {
        int64_t at = validation->position++;
        int64_t expected = at < validation->count ? validation->first[at] : -1;
        if (validation->warned || validation->deviates || place->unit == expected)
            return 0;
        validation->deviates = true;
        OWNED *came = expected < 0 ? PyUnicode_FromString("no more")
                                   : PyUnicode_FromFormat("%R next", names_of(validation, expected));
        if (!came)
            return -1;
        return PyErr_WarnFormat(
            PyExc_UserWarning, 1,
            "Forward order differs from that of the first iteration on rank %lld. Collectives are unchecked "
            "and may give incorrect results or hang.\nIn the first iteration came %U, but %R was run",
            (long long)validation->group.rank, came, names_of(validation, place->unit));
    }
    if (compare_ranks(validation, place->unit) < 0 ||
        (validation->count == validation->capacity && grow(&validation->first, &validation->capacity) < 0))
        return -1;
    validation->first[validation->count++] = place->unit;
    return 0;
}

/* ---- the order: its life ---- */

int order_init(struct order *order, int64_t num_units) {
    order->num_units = num_units;
    order->capacity = num_units + 1;
    order->pre = PyMem_Calloc((size_t)order->capacity, sizeof *order->pre);
    order->post = PyMem_Calloc((size_t)order->capacity, sizeof *order->post);
    order_set_limits(order, 1, 1);
    if (order->pre && order->post)
        return 0;
    PyErr_NoMemory();
    return -1;
}

void order_fini(struct order *order) {
    order_set_validation(order, NULL);
    PyMem_Free(order->pre);
    PyMem_Free(order->post);
    order->pre = order->post = NULL;
}

void order_set_limits(struct order *order, int64_t backward, int64_t forward) {
    order->backward_prefetch_limit = backward;
    order->forward_prefetch_limit = forward;
}

void order_set_validation(struct order *order, struct order_validation *validation) {
    free_validation(order->validation);
    order->validation = validation;
}

void order_forget_forwards(struct order *order) {
    order->num_post = 0;
}

void order_next_iteration(struct order *order) {
    order->iteration++;
    order_forget_forwards(order);
    if (order->validation) {
        order->validation->position = 0;
        order->validation->warned = order->validation->warned || order->validation->deviates;
        order->validation->deviates = false;
    }
    CHECKED(order_check(order));
}

/* ---- recorded ---- */

void order_record_pre_forward(struct order *order, struct order_place *place) {
    if (order->iteration > 0 || place->pre_forward >= 0)
        return;
    place->pre_forward = order->num_pre;
    order->pre[order->num_pre++] = place->unit;
}

int order_record_post_forward(struct order *order, struct order_place *place) {
    if (place->post_forward > 0)
        return 0; /* the unit at index 0 is recorded again, as upstream does (D-111) */
    if (order->num_post == order->capacity && grow(&order->post, &order->capacity) < 0)
        return -1;
    place->post_forward = order->num_post;
    order->post[order->num_post++] = place->unit;
    return 0;
}

/* ---- neighbours ---- */

int64_t order_after(const struct order *order, const struct order_place *place, int64_t distance) {
    int64_t there = place->pre_forward + distance;
    return place->pre_forward >= 0 && there < order->num_pre ? order->pre[there] : -1;
}

int64_t order_before(const struct order *order, const struct order_place *place, int64_t distance) {
    int64_t there = place->post_forward - distance;
    return there >= 0 ? order->post[there] : -1;
}

/* ---- the invariant ---- */

static bool are_units(const struct order *order, const int64_t *units, int64_t count) {
    for (int64_t i = 0; i < count; i++)
        if (units[i] < 0 || units[i] >= order->num_units)
            return false;
    return true;
}

static bool is_at(const int64_t *units, int64_t count, int64_t place, int64_t unit) {
    return place == -1 || (place >= 0 && place < count && units[place] == unit);
}

void order_check(const struct order *order) {
    INVARIANT(order->num_pre <= order->num_units && order->num_post <= order->capacity);
    INVARIANT(are_units(order, order->pre, order->num_pre));
    INVARIANT(are_units(order, order->post, order->num_post));
    INVARIANT(order->backward_prefetch_limit >= 0 && order->forward_prefetch_limit >= 0);
}

void order_check_place(const struct order *order, const struct order_place *place) {
    INVARIANT(is_at(order->pre, order->num_pre, place->pre_forward, place->unit));
    INVARIANT(is_at(order->post, order->num_post, place->post_forward, place->unit));
}
