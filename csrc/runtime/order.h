/* In which order units run (D-110 to D-116). Units are known by their index in the runtime: integers alone.
 *
 * Invariants: `pre` is that of the first iteration and stays; `post` is that of this one. A unit that is in
 * an order knows its place there, and the place is -1 where it is in none. */
#ifndef FSDP_RUNTIME_ORDER_H
#define FSDP_RUNTIME_ORDER_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stdbool.h>
#include <stdint.h>

/* One root's. */
struct order {
    int64_t *pre, *post; /* owned arrays of indices */
    int64_t num_units, num_pre, num_post;
    int64_t capacity; /* of `post`: a unit can be recorded again */
    int64_t iteration;
    /* units that are prefetched */
    int64_t backward_prefetch_limit, forward_prefetch_limit;
    PyObject *validate; /* owned; called with a unit's index and the iteration; NULL unless validated */
};

/* One unit's. */
struct order_place {
    int64_t unit; /* its index */
    int64_t pre_forward, post_forward;
};

/* 0, or -1 with MemoryError; order_fini follows in any case */
int order_init(struct order *order, int64_t num_units);
void order_fini(struct order *order);
void order_check(const struct order *order); /* the invariant, where FSDP_C_CHECK is defined; */
void order_check_place(const struct order *order, const struct order_place *place); /* for one unit */
void order_set_limits(struct order *order, int64_t backward, int64_t forward);
void order_set_validation(struct order *order, PyObject *validate);
void order_next_iteration(struct order *order);
void order_clear_forwards(struct order *order); /* of this iteration */

static inline void order_place_init(struct order_place *place, int64_t unit) {
    place->unit = unit;
    place->pre_forward = place->post_forward = -1;
}

static inline void order_place_end_step(struct order_place *place) {
    place->post_forward = -1;
}

void order_record_pre_forward(struct order *order, struct order_place *place);
int order_record_post_forward(struct order *order, struct order_place *place); /* 0, or -1 with MemoryError */

/* The unit whose forward came `distance` places after this one in the first iteration, or before this one in
 * this iteration; -1 where there is none. */
int64_t order_after(const struct order *order, const struct order_place *place, int64_t distance);
int64_t order_before(const struct order *order, const struct order_place *place, int64_t distance);

#endif
