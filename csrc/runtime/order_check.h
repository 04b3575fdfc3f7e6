/* Validation of the execution order, under TORCH_DISTRIBUTED_DEBUG=DETAIL only (D-115).
 *
 * In the first iteration every unit that is about to be gathered is compared across ranks before its all-gather, which would
 * hang or mix up parameters. The order of that iteration is kept, and a later one that deviates from it is warned of once. */
#ifndef FSDP_RUNTIME_ORDER_CHECK_H
#define FSDP_RUNTIME_ORDER_CHECK_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stdbool.h>
#include <stdint.h>

#include "collective/collective.h"

struct order_check {
    struct collective_group group;
    PyObject *names;          /* owned; list, per unit of the runtime the names of its parameters */
    PyObject *own, *everyone; /* owned; integer tensors of one element and of one per rank */
    int64_t *first;           /* owned; indices of units in the order of the first iteration, repeated uses included */
    int64_t count, capacity;  /* of `first` */
    int64_t position;         /* in this iteration */
    bool deviates, warned;    /* in this iteration; ever */
};

struct unit;

/* New, or NULL with an exception. `device` holds the tensors that are compared. */
struct order_check *order_check_new(PyObject *names, PyObject *process_group, PyObject *device);
void order_check_free(struct order_check *check); /* NULL is fine */

/* `unit` is about to be gathered. RuntimeError where other ranks gather another one: collective in the first iteration. */
int order_check_pre_forward(struct order_check *check, struct unit *unit);
void order_check_next_iteration(struct order_check *check);

#endif
