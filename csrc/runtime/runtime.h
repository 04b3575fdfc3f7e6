/* One root and its units: what runs when in a step.
 *
 *   forward(unit):  [lazy init] root pre-forward -> pre-forward (unshard, views) -> the module
 *                   -> post-forward (reshard, hooks)
 *   backward:       pre-backward hook on the outputs (unshard, prefetch) -> the unit's node receives all
 *                   gradients -> the anchor's hook, once all contributions are there: reshard, pack, reduce
 *                   -> final callback
 *
 * Invariant: outside of a step every unit and handle is IDLE, nothing is in flight, no unit is in the order
 * of this iteration, and every handle is SHARDED unless its strategy keeps it gathered. A unit belongs to one
 * runtime at most. A runtime owns its units; a unit knows its runtime through an owned reference too: the
 * cycle is one of Python objects and is collected. */
#ifndef FSDP_RUNTIME_RUNTIME_H
#define FSDP_RUNTIME_RUNTIME_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stdbool.h>
#include <stdint.h>

#include "handle/handle.h"
#include "runtime/order.h"
#include "runtime/schedule.h"
#include "runtime/unit.h"

struct operations;

/* Where the backward goes that the callback was queued in. */
enum backward_reach { REACH_UNKNOWN, REACH_ALL, REACH_INPUTS_ONLY };

struct runtime {
    PyObject *object;       /* borrowed */
    PyObject *unit_objects; /* owned; tuple */
    struct unit **units;    /* owned array of borrowed pointers; units[0] is the root */
    int64_t num_units;
    const struct operations *operations; /* borrowed */
    struct order order;
    bool callback_queued;
    int64_t num_forwards; /* that have begun while no other was on its way, nor a backward */
    bool keeps_unsharded; /* a backward under no_sync has left some unit gathered for the next forward, */
    int64_t num_writes;   /* when the user had written so often to parameters */
    /* units amid their forward: a backward then is one of part of the model, within it, */
    int64_t num_in_forward;
    bool create_graph;  /* the last backward ran with create_graph=True */
    int64_t graph_task; /* autograd's number of the backward that the callback was queued in */
    bool has_edges;     /* its units' nodes have edges to flat parameters, */
    /* the DistributedDataParallel around the root's last forward, or NULL: compared, never followed */
    const void *ddp;
    enum backward_reach reach; /* see [Note: flat parameters in the graph] in backward.c */
    struct no_gradient_warning no_gradient;
    bool checks_next_backward;       /* callbacks.check_backward looks at the next backward that ends */
    bool grad_enabled;               /* the root's last forward began with gradients enabled */
    const void *final_hook;          /* what was queued last: compared, never followed */
    unsigned long resetting;         /* the thread that does so now, or 0 */
    unsigned long forward_thread;    /* in which the last forward began outside of a backward */
    unsigned long state_dict_thread; /* the thread that is amid a state dict, or 0 */
    /* a pending call of the interpreter's is to come: runtime_schedule_recovery() */
    bool recovery_scheduled;
    struct schedule schedule;
    struct unit *reducing; /* the unit whose reduction is in flight, at most one, or NULL */
};

/* All units of a runtime, segments among them: the root is the first. */
#define FOR_EACH_UNIT(unit, runtime)                                                                         \
    for (struct unit * unit, **unit##_at = (runtime)->units;                                                 \
         unit##_at < (runtime)->units + (runtime)->num_units && (unit = *unit##_at); unit##_at++)

/* ---- runtime.c. 0 or -1, where nothing else is said ---- */

/* steals nothing */
int runtime_init(struct runtime *runtime, PyObject *object, PyObject *unit_objects, struct unit **units);
int runtime_clear(struct runtime *runtime);
/* of an idle runtime: the units are as before lazy init, gradients stay */
int runtime_release(struct runtime *runtime);
int runtime_visit(struct runtime *runtime, visitproc visit, void *arg);
void runtime_check(
    const struct runtime *runtime); /* the invariant between steps, where FSDP_C_CHECK is defined */

int runtime_pre_forward(struct runtime *runtime);      /* of its root: a step begins */
int runtime_begin_step_alone(struct runtime *runtime); /* unless its root is in a step */
int runtime_collect_user_grads(struct runtime *runtime);
void runtime_enter_forward(struct runtime *runtime); /* one more unit is amid its forward */
void runtime_leave_forward(struct runtime *runtime);
/* A script walks over all parameters, and may write to what modules show: see [Note: snapshots of views] in
 * storage.h. */
int runtime_begin_walk(struct runtime *runtime);

/* whether this thread may use the tree now, or begin a step */
int runtime_check_thread(const struct runtime *runtime);
int runtime_check_state_dict_thread(const struct runtime *runtime);
/* amid the forward of a unit that is called again */
int runtime_check_forward_thread(const struct runtime *runtime);
/* a state dict begins: 1, or 0 within another one of this thread */
int runtime_begin_state_dict(struct runtime *runtime);
void runtime_end_state_dict(struct runtime *runtime); /* it ends */

/* ---- prefetch.c. 0 or -1 ---- */

int runtime_reserve(struct runtime *runtime); /* memory for what its steps gather, once */

/* ---- reshard.c. 0 or -1 ---- */

int runtime_reshard_stale(
    struct runtime *runtime); /* the root's forward begins: see [Note: stale parameters] */
int runtime_reshard_unused(
    struct runtime *runtime); /* it ends: what was prefetched for units that it has not run */
int runtime_reshard_units(struct runtime *runtime); /* what a backward that ends has left gathered */
int runtime_record_kept(struct runtime *runtime);   /* a backward has ended */
int runtime_check_kept(struct runtime *runtime);    /* a forward begins: is what that has left still good? */

/* ---- reduce.c. 0 or -1 ---- */

/* after the reduction before: gradients that have come, or zeros, are packed and on their way from now on */
int runtime_reduce_part(struct unit *part);
int runtime_finish_reduction(struct runtime *runtime); /* of the part on its way, if there is one */
int runtime_reduce_no_sync_grads(struct unit *part); /* what no_sync left, where the backward did not pass */

/* ---- backward.c. 0 or -1 ---- */

int runtime_queue_final_callback(struct runtime *runtime);
int runtime_final_callback(void *runtime); /* a hook_function */
void runtime_set_reach(struct runtime *runtime, enum backward_reach reach);

/* ---- recover.c. 0 or -1 ---- */

/* after an exception in a step: IDLE, SHARDED, no gradient of that step */
int runtime_reset(struct runtime *runtime);
int runtime_reset_after_failed_backward(struct runtime *runtime); /* before any forward */
int runtime_await_failed_backward(const struct runtime *runtime); /* before somebody looks at parameters */
/* amid a backward that hides gradients: before the script goes on */
void runtime_schedule_recovery(struct runtime *runtime);

#endif
