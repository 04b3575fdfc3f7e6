/* Validation of the execution order, under TORCH_DISTRIBUTED_DEBUG=DETAIL only (D-115).
 *
 * In the first iteration every unit that is about to be gathered is compared across ranks before its all-gather, which would
 * hang or mix up parameters. The order of that iteration is kept, and a later one that deviates from it is warned of once. */
#ifndef FSDP_RUNTIME_ORDER_VALIDATION_H
#define FSDP_RUNTIME_ORDER_VALIDATION_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stdbool.h>
#include <stdint.h>

#include "collective/collective.h"

struct order_validation {
    struct collective_group group;
    PyObject *names;          /* owned; list, per unit of the runtime the names of its parameters */
    PyObject *own, *everyone; /* owned; integer tensors of one element and of one per rank */
    int64_t *first;           /* owned; indices of units in the order of the first iteration, repeated uses included */
    int64_t count, capacity;  /* of `first` */
    int64_t position;         /* in this iteration */
    bool deviates, warned;    /* in this iteration; ever */
};

/* New, or NULL with an exception. `device` holds the tensors that are compared. */
struct order_validation *order_validation_new(PyObject *names, PyObject *process_group, PyObject *device);
void order_validation_free(struct order_validation *validation); /* NULL is fine */

/* `unit`, an index, is about to be gathered. RuntimeError where other ranks gather another one: collective in the first iteration. */
int order_validation_pre_forward(struct order_validation *validation, int64_t unit, bool first_iteration);
void order_validation_next_iteration(struct order_validation *validation);

#endif
