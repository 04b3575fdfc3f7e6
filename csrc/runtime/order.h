/* Order in which units run, as indices of the runtime's units.
 *
 * Invariants: `pre` is the pre-forward order of the first iteration, and stays; `post` is the post-forward
 * order of this iteration. Each recorded unit knows its place in an order; the place is -1 if not
 * recorded. */
#ifndef FSDP_RUNTIME_ORDER_H
#define FSDP_RUNTIME_ORDER_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stdbool.h>
#include <stdint.h>

/* Orders of a root. */
struct order {
    int64_t *pre, *post; /* owned arrays of indices */
    int64_t num_units, num_pre, num_post;
    int64_t capacity; /* capacity of `post`: a unit can be recorded twice */
    int64_t iteration;
    /* number of units to prefetch */
    int64_t backward_prefetch_limit, forward_prefetch_limit;
    PyObject *validate; /* owned; called with a unit's index and the iteration; NULL without validation */
};

/* Places of a unit. */
struct order_place {
    int64_t unit; /* index of the unit */
    int64_t pre_forward, post_forward;
};

/* Return 0, or -1 with MemoryError. Call order_fini in either case. */
int order_init(struct order *order, int64_t num_units);
void order_fini(struct order *order);
void order_check(const struct order *order); /* assert the invariant under FSDP_C_CHECK */
/* Assert a unit's invariant under FSDP_C_CHECK. */
void order_check_place(const struct order *order, const struct order_place *place);
void order_set_limits(struct order *order, int64_t backward, int64_t forward);
void order_set_validation(struct order *order, PyObject *validate);
void order_next_iteration(struct order *order);
void order_clear_forwards(struct order *order); /* clear `post` */

static inline void order_place_init(struct order_place *place, int64_t unit) {
    place->unit = unit;
    place->pre_forward = place->post_forward = -1;
}

static inline void order_place_end_step(struct order_place *place) {
    place->post_forward = -1;
}

void order_record_pre_forward(struct order *order, struct order_place *place);
int order_record_post_forward(struct order *order, struct order_place *place); /* 0, or -1 with MemoryError */

/* Return the unit `distance` places after this one in the first iteration, or before this one in this
 * iteration; -1 if there is none. */
int64_t order_after(const struct order *order, const struct order_place *place, int64_t distance);
int64_t order_before(const struct order *order, const struct order_place *place, int64_t distance);

#endif
