/* A root and its units: order of events in a step, which docs/architecture.md lists.
 *
 * Invariant: outside of a step every unit and handle is IDLE, nothing is in flight, the post-forward order is
 * empty, and every handle is SHARDED unless its strategy keeps it unsharded. A unit belongs to at most one
 * runtime. Runtime and units own references to each other: a cycle of Python objects, which the garbage
 * collector frees. */
#ifndef FSDP_RUNTIME_RUNTIME_H
#define FSDP_RUNTIME_RUNTIME_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stdbool.h>
#include <stdint.h>

#include "handle/handle.h"
#include "runtime/schedule.h"
#include "runtime/unit.h"

/* Leaves that a backward reaches: all of them, or only the inputs of backward(inputs=...). */
enum backward_reach { REACH_UNKNOWN, REACH_ALL, REACH_INPUTS_ONLY };

/* Order in which units run, as indices of the runtime's units; order.c. Each recorded unit knows its place
 * in an order. */
struct order {
    int64_t *pre;  /* owned array; pre-forward order of the first iteration */
    int64_t *post; /* owned array; post-forward order of this iteration */
    int64_t num_units, num_pre, num_post;
    int64_t capacity; /* capacity of `post`: a unit can be recorded twice */
    int64_t iteration;
    int64_t backward_prefetch_limit, forward_prefetch_limit; /* number of units to prefetch */
    PyObject *validate; /* owned; called with a unit's index and the iteration; NULL without validation */
};

struct runtime {
    PyObject *object;       /* borrowed */
    PyObject *unit_objects; /* owned; tuple */
    struct unit **units;    /* owned array of borrowed pointers; units[0] is the root */
    int64_t num_units;
    struct order order;
    bool callback_queued;
    int64_t num_forwards; /* number of outermost forwards so far, without those inside a backward */
    /* true if a backward under no_sync has kept some unit unsharded for the next forward */
    bool keeps_unsharded;
    int64_t num_writes; /* number of visible writes to parameters at that time */
    /* number of units in their forward; if > 0, a backward is nested in a forward and covers part of the
     * model */
    int64_t num_in_forward;
    bool create_graph;  /* true if the last backward ran with create_graph=True */
    int64_t graph_task; /* id of autograd's graph task in which the callback was queued */
    bool has_edges;     /* true if the nodes of the units have edges to flat parameters */
    /* identity of the DistributedDataParallel around the root's last forward, or NULL; never dereferenced */
    const void *ddp;
    enum backward_reach reach; /* see [Note: flat parameters in the graph] in backward.c */
    bool ended_backward;       /* true if a backward has ended since the root's forward began */
    bool warned_no_gradient;   /* true after the warning about units without a gradient */
    /* true if callbacks.check_backward is to be called at the end of the next backward */
    bool checks_next_backward;
    bool grad_enabled;               /* true if gradients were enabled when the root's last forward began */
    const void *final_hook;          /* identity of the last queued callback; never dereferenced */
    unsigned long resetting;         /* thread in runtime_reset, or 0 */
    unsigned long forward_thread;    /* thread of the last forward outside of a backward */
    unsigned long state_dict_thread; /* thread in a state dict call, or 0 */
    /* true while an interpreter's pending call is scheduled by runtime_schedule_recovery() */
    bool recovery_scheduled;
    struct schedule schedule;
    struct unit *reducing; /* borrowed; unit whose reduction is in flight, or NULL */
};

/* Iterate over all units of a runtime, including segments; the root is the first. */
#define FOR_EACH_UNIT(unit, runtime)                                                                         \
    for (struct unit * unit, **unit##_at = (runtime)->units;                                                 \
         unit##_at < (runtime)->units + (runtime)->num_units && (unit = *unit##_at); unit##_at++)

/* ---- runtime.c. Return 0, or -1 with an exception, unless noted ---- */

/* References are borrowed. */
int runtime_init(struct runtime *runtime, PyObject *object, PyObject *unit_objects, struct unit **units);
int runtime_clear(struct runtime *runtime);
/* Return the units of an idle runtime to their state before lazy init. Gradients stay. */
int runtime_release(struct runtime *runtime);
int runtime_visit(struct runtime *runtime, visitproc visit, void *arg);
/* Assert the invariant between steps, under FSDP_C_CHECK. */
void runtime_check(const struct runtime *runtime);

int runtime_pre_forward(struct runtime *runtime); /* begin a step of the root */
/* Begin a step of one unit; no-op inside a root's step. */
int runtime_begin_step_alone(struct runtime *runtime);
int runtime_collect_user_grads(struct runtime *runtime);
void runtime_enter_forward(struct runtime *runtime); /* count one more unit in its forward */
void runtime_leave_forward(struct runtime *runtime);
/* Prepare for a script that iterates over all parameters and may write to exposed views: see [Note: snapshots
 * of views] in storage.h. */
int runtime_begin_walk(struct runtime *runtime);

/* Raise RuntimeError if another thread is in a step or a state dict call; check_state_dict_thread only checks
 * the latter. */
int runtime_check_thread(const struct runtime *runtime);
int runtime_check_state_dict_thread(const struct runtime *runtime);
/* Raise RuntimeError if another thread is in a forward of the unit that is called again. */
int runtime_check_forward_thread(const struct runtime *runtime);
/* Begin a state dict call. Return 1, or 0 if nested in another one of this thread, or -1. */
int runtime_begin_state_dict(struct runtime *runtime);
void runtime_end_state_dict(struct runtime *runtime);

/* ---- order.c ---- */

/* Return 0, or -1 with MemoryError. Call order_fini in either case. */
int order_init(struct order *order, int64_t num_units);
void order_fini(struct order *order);
void order_set_limits(struct order *order, int64_t backward, int64_t forward);
void order_set_validation(struct order *order, PyObject *validate);
void order_next_iteration(struct order *order);

/* ---- prefetch.c. Return 0, or -1 with an exception ---- */

int runtime_reserve(struct runtime *runtime); /* reserve memory for unsharded parameters, once */

/* ---- reshard.c. Return 0, or -1 with an exception ---- */

/* Reshard stale units when the root's forward begins: see [Note: stale parameters]. */
int runtime_reshard_stale(struct runtime *runtime);
/* Reshard units that were prefetched for this forward and did not run. */
int runtime_reshard_unused(struct runtime *runtime);
int runtime_reshard_units(struct runtime *runtime); /* reshard units at the end of a backward */
int runtime_record_kept(struct runtime *runtime);   /* record writes at the end of a backward under no_sync */
/* Mark kept units as stale after a visible write, when a forward begins. */
int runtime_check_kept(struct runtime *runtime);

/* ---- reduce.c. Return 0, or -1 with an exception ---- */

/* Finish the previous reduction, then pack and enqueue the gradients of a flat parameter, zeros if it has
 * none. */
int runtime_reduce_part(struct unit *part);
int runtime_finish_reduction(struct runtime *runtime); /* finish the reduction in flight, if any */

/* ---- backward.c. Return 0, or -1 with an exception ---- */

int runtime_queue_final_callback(struct runtime *runtime);
int runtime_final_callback(void *runtime); /* a hook_function */

/* ---- recover.c. Return 0, or -1 with an exception ---- */

/* Reset all units to IDLE and SHARDED after an exception in a step, and drop the step's gradients. */
int runtime_reset(struct runtime *runtime);
int runtime_reset_after_failed_backward(struct runtime *runtime); /* call before a forward */
/* Wait until autograd's thread has released a failed backward, before reading parameters. */
int runtime_wait_failed_backward(const struct runtime *runtime);
/* Restore stashed gradients from a pending call if this backward raises, so that an optimizer sees them.
 * Called in a backward that stashes gradients. */
void runtime_schedule_recovery(struct runtime *runtime);

#endif
