/* Execution order and prefetch (D-110 to D-116). */
#include "runtime/runtime.h"

/* ---- of a root ---- */

int order_init(struct order *order, int64_t num_units) {
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
    order_set_check(order, NULL);
    PyMem_Free(order->pre);
    PyMem_Free(order->post);
    order->pre = order->post = NULL;
}

void order_set_limits(struct order *order, int64_t backward, int64_t forward) {
    order->backward_prefetch_limit = backward;
    order->forward_prefetch_limit = forward;
}

void order_set_check(struct order *order, struct order_check *check) {
    order_check_free(order->check);
    order->check = check;
}

void order_forget_forwards(struct order *order) {
    order->num_post = 0;
}

void order_next_iteration(struct order *order) {
    order->iteration++;
    order_forget_forwards(order);
    if (order->check)
        order_check_next_iteration(order->check);
}

/* ---- recorded ---- */

int order_record_pre_forward(struct unit *unit) {
    struct order *order = &unit->runtime->order;
    if (order->check && order_check_pre_forward(order->check, unit) < 0)
        return -1;
    if (order->iteration > 0 || unit->place.pre_forward >= 0)
        return 0;
    unit->place.pre_forward = order->num_pre;
    order->pre[order->num_pre++] = unit;
    return 0;
}

static int grow(struct order *order) {
    int64_t capacity = order->capacity * 2;
    struct unit **post = PyMem_Realloc(order->post, (size_t)capacity * sizeof *post);
    if (!post) {
        PyErr_NoMemory();
        return -1;
    }
    order->post = post;
    order->capacity = capacity;
    return 0;
}

int order_record_post_forward(struct unit *unit) {
    struct order *order = &unit->runtime->order;
    if (unit->place.post_forward > 0)
        return 0; /* the unit at index 0 is recorded again, as upstream does (D-111) */
    if (order->num_post == order->capacity && grow(order) < 0)
        return -1;
    unit->place.post_forward = order->num_post;
    order->post[order->num_post++] = unit;
    return 0;
}

/* ---- gathered ahead ---- */

static bool can_prefetch(const struct unit *unit) {
    return !unit->place.prefetched && unit->handle->storage.param_state == PARAM_SHARDED;
}

static struct unit *next_forward(const struct unit *unit) {
    const struct order *order = &unit->runtime->order;
    int64_t here = unit->place.pre_forward, last = here + order->forward_prefetch_limit;
    if (!unit->forward_prefetch || here < 0)
        return NULL;
    for (int64_t next = here + 1; next <= last && next < order->num_pre; next++)
        if (can_prefetch(order->pre[next]))
            return order->pre[next];
    return NULL;
}

static struct unit *next_backward(const struct unit *unit) {
    const struct order *order = &unit->runtime->order;
    int64_t here = unit->place.post_forward, last = here - order->backward_prefetch_limit;
    for (int64_t next = here - 1; next >= last && next >= 0; next--) {
        struct unit *candidate = order->post[next];
        if (candidate->needs_pre_backward_unshard && can_prefetch(candidate))
            return candidate;
    }
    return NULL;
}

struct unit *order_next(const struct unit *unit, enum training_state state) {
    if (state == USE_FORWARD)
        return next_forward(unit);
    if (state == USE_BACKWARD_PRE && unit->backward_prefetch == PREFETCH_BACKWARD_PRE)
        return next_backward(unit);
    if (state == USE_BACKWARD_POST && unit->backward_prefetch == PREFETCH_BACKWARD_POST)
        return next_backward(unit);
    return NULL;
}

int order_gather_ahead(struct unit *candidate, enum training_state state) {
    if (!can_prefetch(candidate))
        return 0;
    int chosen = state == USE_FORWARD ? unit_precision_for_forward(candidate) : unit_precision_for_backward(candidate);
    if (chosen < 0 || schedule_unshard(candidate) < 0)
        return -1;
    order_place_set_prefetched(&candidate->place, true);
    return 0;
}

int order_prefetch(struct unit *unit, enum training_state state) {
    for (struct unit *next; (next = order_next(unit, state)) != NULL;)
        if (order_gather_ahead(next, state) < 0)
            return -1;
    return 0;
}
