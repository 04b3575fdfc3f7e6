/* One root and its units: what runs when in a step.
 *
 *   forward(unit):   [lazy init] root pre-forward -> pre-forward (unshard, views) -> the module -> post-forward (reshard, hooks)
 *   backward:        pre-backward hook on the outputs (unshard, prefetch) -> the unit's node receives all gradients ->
 *                    the anchor's hook, once all contributions are there: pack, reshard, reduce -> final callback
 *
 * Invariant: outside of a step every handle is IDLE, and SHARDED unless its strategy keeps it gathered. A unit belongs to one
 * runtime at most. A runtime owns its units; a unit knows its runtime through an owned reference too: the cycle is one of
 * Python objects and is collected. */
#ifndef FSDP_RUNTIME_RUNTIME_H
#define FSDP_RUNTIME_RUNTIME_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stdbool.h>
#include <stdint.h>

#include "handle/handle.h"
#include "runtime/ledger.h"
#include "runtime/order_check.h"
#include "runtime/schedule.h"

enum backward_prefetch { PREFETCH_NONE, PREFETCH_BACKWARD_PRE, PREFETCH_BACKWARD_POST }; /* torch's values */

struct runtime;

/* One FullyShardedDataParallel instance. */
struct unit {
    PyObject *object;         /* borrowed; the Python object that this struct lives in */
    PyObject *module_ref;     /* owned; weak reference to the instance, which owns the unit; its _lazy_init
                             * builds the runtime, its end detaches the views */
    PyObject *handle_object;  /* owned; or NULL when the instance manages no parameters */
    struct handle *handle;    /* borrowed from handle_object */
    PyObject *runtime_object; /* owned; NULL before lazy init */
    struct runtime *runtime;  /* borrowed from runtime_object */
    PyObject *name;           /* owned; str */

    PyObject *param_dtype; /* owned; inputs are cast to it, or NULL */
    bool cast_forward_inputs, cast_root_forward_inputs;
    enum backward_prefetch backward_prefetch;
    bool forward_prefetch, limit_all_gathers;
    bool full_precision_in_eval; /* FSDP_USE_FULL_PREC_IN_EVAL */

    bool is_root;
    bool sync_gradients;
    enum training_state training_state; /* IDLE, FORWARD (forward or backward) or SUMMON_FULL_PARAMS */

    /* [Note: one node per unit] Each forward applies one autograd function to `anchor`, a scalar leaf; its outputs are the
     * unit's cached views and its backward receives all their gradients at once. It returns no gradient for the anchor, yet
     * autograd runs the anchor's accumulation node once per backward, after every contribution: the post-backward moment. */
    PyObject *anchor;      /* owned */
    PyObject *anchor_node; /* owned; keeps the accumulation node, and the hook on it, alive */
    PyObject *anchor_hook; /* owned; a hook that does not own the unit */
    bool views_attached;   /* the views carry history of an earlier forward */
    PyObject *hooks_seen;  /* owned; the views had no hooks yet when torch's hook of this number was registered */

    PyObject *reshard_hook; /* owned; removable, on the inputs of a frozen unit; NULL when there is none */
    int64_t pre_forward_index, post_forward_index; /* place in the runtime's orders, -1 when not recorded */
    bool ran_pre_backward, needs_pre_backward_unshard, prefetched;
    bool cut_off, left_out;         /* see [Note: units without a gradient] in cut_off.c */
    bool evaluating;                /* with full_precision_in_eval: the wrapped module is in eval mode */
    enum precision graph_precision; /* of the last forward that a backward can follow */
    int32_t ledger_index;           /* of its name in the ledger, -1: none */
    stream_event gathered;          /* owned; end of this unit's last all-gather */
    bool gather_pending;            /* computation has not waited for `gathered` */
    int64_t stepped_in; /* the last step in whose backward the unit's optimizers stepped, as the schedule counts */
};

struct unit_spec {
    PyObject *module, *handle_object /* or NULL */, *name, *param_dtype /* or None */;
    struct handle *handle;
    bool cast_forward_inputs, cast_root_forward_inputs, forward_prefetch, limit_all_gathers;
    bool full_precision_in_eval;
    int backward_prefetch;
};

int unit_init(struct unit *unit, PyObject *object, const struct unit_spec *spec); /* 0 or -1 */
int unit_clear(struct unit *unit);
int unit_visit(struct unit *unit, visitproc visit, void *arg);

/* unit.c: the only writer of the unit's state. 0, or -1 with RuntimeError naming both states. */
int unit_set_training_state(struct unit *unit, enum training_state state);

/* unit.c: the instance's forward, from root pre-forward to post-forward. New reference, or NULL with everything idle again. */
PyObject *unit_forward(struct unit *unit, PyObject *wrapped, PyObject *args, PyObject *kwargs);

/* unit.c: what a forward registers for the backward. 0 or -1. */
int unit_register_post_backward_hook(
    struct unit *unit); /* the gathered views belong to a new node, if gradients come */
int unit_register_pre_backward_hooks(struct unit *unit, PyObject *output);

/* precision.c: in which precision the unit is gathered next. 0 or -1. */
int precision_for_forward(struct unit *unit);  /* follows the mode of the wrapped module, where that was asked for */
int precision_for_backward(struct unit *unit); /* that of its forward */
int unit_is_training(const struct unit *unit); /* is the wrapped module in training mode? 1, 0 or -1 */

/* cut_off.c: units with trainable parameters to which no gradient comes. 0 or -1. */
int unit_note_cut_off(struct unit *unit);      /* no output of this forward requires a gradient */
int unit_note_checkpointed(struct unit *unit); /* a forward without gradients has ended; perhaps a checkpoint's */
/* At the end of a backward: new list of the names of those that it could not reach, None where there is none, or NULL. Those that
 * it left out are noted. */
PyObject *runtime_take_cut_off(struct runtime *runtime);
int runtime_tell_of_cut_off(struct runtime *runtime, PyObject *names); /* warn, once */
int runtime_tell_of_left_out(struct runtime *runtime);                 /* warn, once: the next forward begins */

/* backward.c: called by the hooks. 0 or -1 with an exception, which autograd raises. */
int unit_pre_backward(struct unit *unit);
int unit_post_backward(struct unit *unit);
int unit_post_backward_reshard(struct unit *unit); /* after its gradients were packed: free, and prefetch */
int unit_reshard_only(struct unit *unit);          /* a frozen unit whose inputs have their gradients */

/* node.c: the autograd function of [Note: one node per unit]. */
int node_init(void);
int unit_attach_views(struct unit *unit); /* the views belong to a new node; its anchor is made on the first call */
int unit_detach_views(struct unit *unit); /* the views have no history */

struct runtime {
    PyObject *object;       /* borrowed */
    PyObject *unit_objects; /* owned; tuple */
    struct unit **units;    /* owned array of borrowed pointers; units[0] is the root */
    int64_t num_units;
    struct unit **pre_order, **post_order; /* owned; order of the forwards of the first and of this iteration */
    int64_t num_pre, num_post;
    int64_t capacity; /* of post_order: a unit can be recorded again */
    int64_t iteration;
    int64_t backward_prefetch_limit, forward_prefetch_limit; /* units that are gathered ahead of the current one */
    struct order_check *order_check;                         /* owned; NULL unless the order is validated */
    bool callback_queued;
    int64_t num_in_forward; /* units amid their forward: a backward then is one of part of the model, within it */
    bool any_cut_off, any_left_out, told_of_no_gradient;
    bool trains;             /* the root's last forward began with gradients enabled */
    const void *final_hook;  /* what was queued last: compared, never followed */
    unsigned long resetting; /* the thread that does so now, or 0 */
    struct schedule schedule;
    struct unit *reducing; /* the unit whose reduction is in flight, at most one, or NULL */
};

int runtime_init(struct runtime *runtime, PyObject *object, PyObject *unit_objects,
                 struct unit **units); /* steals nothing */
int runtime_clear(struct runtime *runtime);
int runtime_release(
    struct runtime *runtime); /* of an idle runtime: the units are as before lazy init, gradients stay */
int runtime_visit(struct runtime *runtime, visitproc visit, void *arg);

int runtime_reset_after_failed_backward(struct runtime *runtime); /* before any forward */
int runtime_await_failed_backward(const struct runtime *runtime); /* before somebody looks at parameters. 0 or -1 */
int runtime_root_pre_forward(struct runtime *runtime);
int runtime_queue_final_callback(struct runtime *runtime);
int runtime_final_callback(struct runtime *runtime);
int runtime_finish_reduction(struct runtime *runtime); /* of the unit in flight, if there is one */
int runtime_reset(struct runtime *runtime); /* after an exception in a step: IDLE, SHARDED, no gradient of that step */
int runtime_collect_user_grads(struct runtime *runtime);
void runtime_detach_views(struct runtime *runtime); /* the root has gone */

/* order.c */
int unit_unshard(struct unit *unit); /* gather ahead, on the user's word; the module shows the whole parameters */
int unit_wait_unsharded(struct unit *unit); /* computation may use them */
int begin_step_alone(struct unit *unit); /* outside of the root's forward the script has called this unit by itself */
int order_record_pre_forward(struct unit *unit); /* and validate, where that was asked for */
int order_record_post_forward(struct unit *unit);
/* The unit to gather ahead while `unit` is in `state`, or NULL. */
struct unit *order_next(const struct unit *unit, enum training_state state);
int order_prefetch_forward(struct unit *unit);
int order_prefetch_backward(struct unit *unit);
void order_next_iteration(struct runtime *runtime);

#endif
