/* Order in which units run. */
#include "runtime/runtime.h"

#include "torch/ref.h"

/* ---- init and fini ---- */

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
    Py_CLEAR(order->validate);
    PyMem_Free(order->pre);
    PyMem_Free(order->post);
    order->pre = order->post = NULL;
}

void order_set_limits(struct order *order, int64_t backward, int64_t forward) {
    order->backward_prefetch_limit = backward;
    order->forward_prefetch_limit = forward;
}

void order_set_validation(struct order *order, PyObject *validate) {
    ref_set(&order->validate, Py_NewRef(validate));
}

void order_next_iteration(struct order *order) {
    order->iteration++;
    order->num_post = 0;
}

/* ---- record ---- */

void order_record_pre_forward(struct order *order, struct order_place *place) {
    if (order->iteration > 0 || place->pre_forward >= 0)
        return;
    place->pre_forward = order->num_pre;
    order->pre[order->num_pre++] = place->unit;
}

/* Double the capacity. Return 0, or -1 with MemoryError. */
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

int order_record_post_forward(struct order *order, struct order_place *place) {
    if (place->post_forward > 0)
        return 0; /* the unit at index 0 is recorded again, as in FSDP1 */
    if (order->num_post == order->capacity && grow(&order->post, &order->capacity) < 0)
        return -1;
    place->post_forward = order->num_post;
    order->post[order->num_post++] = place->unit;
    return 0;
}
