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

#include "collective/collective.h"

/* One root's. */
struct order {
    int64_t *pre, *post; /* owned arrays of indices */
    int64_t num_units, num_pre, num_post;
    int64_t capacity; /* of `post`: a unit can be recorded again */
    int64_t iteration;
    /* units that are prefetched */
    int64_t backward_prefetch_limit, forward_prefetch_limit;
    struct order_validation *validation; /* owned; NULL unless the order is validated */
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
/* steals it; NULL: none */
void order_set_validation(struct order *order, struct order_validation *validation);
void order_next_iteration(struct order *order);
void order_forget_forwards(struct order *order); /* of this iteration */

static inline void order_place_init(struct order_place *place, int64_t unit) {
    place->unit = unit;
    place->pre_forward = place->post_forward = -1;
}

static inline void order_place_end_step(struct order_place *place) {
    place->post_forward = -1;
}

/* With a validation, where the unit is about to be gathered: RuntimeError where other ranks gather another
 * one. Collective in the first iteration. 0 or -1 */
int order_validate(struct order *order, const struct order_place *place);
void order_record_pre_forward(struct order *order, struct order_place *place);
int order_record_post_forward(struct order *order, struct order_place *place); /* 0, or -1 with MemoryError */

/* The unit whose forward came `distance` places after this one in the first iteration, or before this one in
 * this iteration; -1 where there is none. */
int64_t order_after(const struct order *order, const struct order_place *place, int64_t distance);
int64_t order_before(const struct order *order, const struct order_place *place, int64_t distance);

/* ---- Validation of the execution order, under TORCH_DISTRIBUTED_DEBUG=DETAIL only (D-115) ----
 *
 * In the first iteration every unit that is about to be gathered is compared across ranks before its
 * all-gather, which would hang or mix up parameters. The order of that iteration is kept, and a later one
 * that deviates from it is warned of once. */

struct order_validation {
    struct collective_group group;
    PyObject *names;          /* owned; list, per unit of the runtime the names of its parameters */
    PyObject *own, *everyone; /* owned; integer tensors of one element and of one per rank */
    /* owned; indices of units in the order of the first iteration, repeated uses included */
    int64_t *first;
    int64_t count, capacity; /* of `first` */
    int64_t position;        /* in this iteration */
    bool deviates, warned;   /* in this iteration; ever */
};

/* New, or NULL with an exception. `device` holds the tensors that are compared. */
struct order_validation *order_validation_new(PyObject *names, PyObject *process_group, PyObject *device);

#endif
