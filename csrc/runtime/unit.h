/* One FullyShardedDataParallel instance: its forward, its backward, and what they leave for each other.
 *
 * Invariant: outside of a step the phase is IDLE or SUMMON_FULL_PARAMS, the handle is IDLE too, and no flag
 * of a step is set. A unit without a runtime has not seen lazy init, or its root has gone. */
#ifndef FSDP_RUNTIME_UNIT_H
#define FSDP_RUNTIME_UNIT_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stdbool.h>
#include <stdint.h>

#include "handle/handle.h"
#include "runtime/no_gradient.h"
#include "runtime/node.h"
#include "runtime/optional.h"
#include "runtime/order.h"
#include "runtime/schedule.h"
#include "runtime/trace.h"

/* Whether the unit, with or without parameters, is in use. */
enum unit_phase {
    PHASE_IDLE,
    PHASE_IN_STEP, /* amid its forward, or its backward has begun */
    PHASE_SUMMON_FULL_PARAMS,
    UNIT_PHASES
};

struct runtime;

static const int64_t FOR_NEXT_FORWARD = INT64_MAX; /* that the unit runs in */

/* The unsharded parameters, beside what the storage says of them. */
struct unit_unsharded {
    struct unshard_mark mark; /* end of the last all-gather, of all parts */
    /* number of the forward that they are for, as runtime.num_forwards counts: see [Note: stale parameters] in
     * reshard.c */
    int64_t for_forward;
    bool prefetched;                /* of a part: gathered ahead, and not used yet */
    bool saved_by_graph;            /* needed by the graph of a create_graph backward: they stay gathered */
    enum precision graph_precision; /* of a part: that of the last forward that a backward can follow */
};

/* Backwards within the unit's own: [Note: checkpoints inside a unit] in backward.c. */
struct unit_nesting {
    int64_t graph_task;   /* autograd's number of the backward that the unit is in */
    bool recomputed;      /* the last forward ran within that */
    bool can_nest;        /* autograd is to be asked where the backward goes */
    bool nested;          /* another backward within this one was seen */
    bool anchor_will_run; /* the backward goes to the unit's anchor */
};

/* [Note: segments] Parameters of different dtypes, or frozen ones beside others, cannot lie in one flat parameter.
 * Then a unit has several: its own, and one for each of its segments. A segment is a struct unit too, with a handle
 * and a place among the runtime's units, so that whatever goes over those finds it; but its unit gathers, shows and
 * frees it. They share the unit's node: where a gradient comes to any part, all that are trained are reduced, in one
 * order on all ranks. */
struct unit {
    PyObject *object;            /* borrowed; the Python object that this struct lives in */
    PyObject *module_ref;        /* owned; weak reference to the instance, which owns the unit */
    PyObject *module_end;        /* owned; callback of that reference, a hook that does not own the unit */
    PyObject *handle_object;     /* owned; or NULL without parameters */
    struct handle *handle;       /* borrowed from handle_object */
    PyObject *runtime_object;    /* owned; NULL before lazy init */
    struct runtime *runtime;     /* borrowed from runtime_object */
    PyObject *name;              /* owned; str */
    int32_t name_index;          /* index of the name in progress.c, or -1 */
    PyObject *param_dtype;       /* owned; dtype that inputs are cast to, or NULL */
    struct unit_options options; /* the constructor's */

    struct unit *leader;       /* borrowed; the unit that a segment is part of, else NULL */
    struct unit *next_segment; /* borrowed; the unit's first, then one another's; NULL at the end */
    PyObject *segments;        /* owned; tuple of Unit objects, or NULL */

    bool is_root;                    /* the first of its runtime */
    bool sync_gradients;             /* outside of no_sync */
    enum unit_phase phase;           /* written by unit_set_phase() */
    struct order_place place;        /* in the order of units */
    struct optional optional;        /* the enclosing unit, or the units inside that a rank need not run */
    struct unit_unsharded unsharded; /* the parameters while they are gathered */
    bool evaluating;                 /* the wrapped module is in eval mode, with full_precision_in_eval */

    struct unit_node node;     /* in autograd's graph */
    PyObject *reshard_hook;    /* owned; removable, on the inputs of a frozen unit; or NULL */
    const void *backward_hook; /* of the last forward's outputs, where views stay: compared, never followed */
    bool needs_pre_backward_unshard; /* a backward is expected, which will read the parameters */
    bool ran_pre_backward;           /* that has begun */
    bool inputs_only;                /* of a part: its node has run in a backward(inputs=...) */
    bool stepping;                   /* of a part: its optimizers step, and nobody has waited */
    struct unit_nesting nesting;     /* in backwards */
    struct no_gradient no_gradient;  /* warnings where none comes */
};

/* References are borrowed for the call of unit_init. */
struct unit_spec {
    PyObject *module, *handle_object /* or NULL */, *name;
    PyObject *segments; /* tuple of Unit objects, of units that have no segments themselves */
    struct handle *handle;
    struct config config;
};

/* The unit that a flat parameter is of: the segment's leader, or the unit itself. */
static inline struct unit *unit_of_part(struct unit *part) {
    return part->leader ? part->leader : part;
}

/* The flat parameters of a unit: its own, then those of its segments. */
#define FOR_EACH_FLAT_PARAM(part, first) for (struct unit *part = (first); part; part = part->next_segment)

/* ---- unit.c. 0 or -1, where nothing else is said ---- */

int unit_init(struct unit *unit, PyObject *object, const struct unit_spec *spec);
int unit_clear(struct unit *unit);
/* which comes after those that it has; see [Note: segments] */
void unit_add_segment(struct unit *unit, struct unit *segment);
int unit_visit(struct unit *unit, visitproc visit, void *arg);
/* Lazy init: the unit belongs to a root, as the one at `index` of its units. */
int unit_bind(struct unit *unit, struct runtime *runtime, int64_t index);
void unit_unbind(struct unit *unit);
int unit_end_step(struct unit *unit);           /* no flag of a step is set, and it is IDLE */
int unit_remove_input_hooks(struct unit *unit); /* of a frozen unit, whose forward has hooked them */
void unit_set_sync_gradients(struct unit *unit, bool sync);
PyObject *
unit_module(const struct unit *unit); /* new reference, or NULL without an exception: it was deleted */
int unit_is_training(const struct unit *unit); /* is the wrapped module in training mode? 1, 0 or -1 */

/* The only writer of the phase. 0, or -1 with RuntimeError naming both phases. */
int unit_set_phase(struct unit *unit, enum unit_phase phase);
int unit_set_training_state(struct unit *unit, enum training_state state); /* of all its parts */
/* its own, else the first of its runtime, or NULL */
const struct handle *unit_handle_or_first(const struct unit *unit);
long long unit_rank(const struct unit *unit); /* for messages; -1 where there are no parameters */
/* as flat_param_error, of a unit that may have no parameters */
int unit_error(PyObject *type, int64_t rank, PyObject *unit, const char *format, ...);
/* A collective of the unit has raised while it was enqueued, or later: that is said in its error. -1. */
int unit_explain_failure(struct unit *unit, enum traced part, bool enqueued);

/* ---- forward.c. 0 or -1, where nothing else is said ---- */

/* The instance's forward, from root pre-forward to post-forward. New reference, or NULL with everything idle
 * again. */
PyObject *unit_forward(struct unit *unit, PyObject *wrapped, PyObject *args, PyObject *kwargs);
/* The unit, the optional ones that belong to it, and by prefetching what comes after it in the order. It may
 * have no parameters. */
int unit_unshard_for_forward(struct unit *unit);
/* The gathered views belong to a new node, if gradients come. */
int unit_register_post_backward_hook(struct unit *unit);
/* Where a tensor of *output is hooked, a backward can follow. */
int unit_register_pre_backward_hooks(struct unit *unit, PyObject **output);
void unit_expect_backward(struct unit *unit, bool expected);
/* Does its last forward leave the views for its backward (C-091)? Of a part. runtime.c */
bool unit_exposes_views(struct unit *part);

/* ---- backward.c, called by hooks. 0 or -1 with an exception, which autograd raises ---- */

int unit_pre_backward(void *unit);
int unit_unshard_for_backward(struct unit *unit); /* as unit_unshard_for_forward */
int unit_post_backward(void *unit);
int unit_reshard_only(void *unit);                 /* a frozen unit whose inputs have their gradients */
int unit_refuse_backward(const struct unit *unit); /* it has no runtime any more: -1 with an exception */
/* does the backward come to the anchor, where it has come to the unit's node? 1, 0 or -1 */
int unit_reaches_anchor(struct unit *unit);
int unit_receive_inputs_only(struct unit *part); /* its node has run, and its anchor's hook will not come */

/* ---- unshard.c. 0 or -1 ---- */

int unit_unshard(
    struct unit *unit); /* enqueue its all-gathers, after the limiter; no-ops where it is gathered */
int unit_wait_unshard(struct unit *unit); /* computation waits for them */
int unit_unshard_and_wait(struct unit *unit);
int unit_unshard_part(struct unit *part);               /* after the limiter: for the table of operations */
int unit_reshard(struct unit *part, bool free_storage); /* one part, after its all-gather */
/* In which precision it is gathered next: follows the mode of the wrapped module where asked for. */
int unit_precision_for_forward(struct unit *unit);
void unit_record_precision(struct unit *unit);      /* of a forward that a backward can follow */
int unit_precision_for_backward(struct unit *unit); /* that of its forward */

/* ---- reshard.c: when parameters are freed. 0 or -1 ---- */

int unit_reshard_after_forward(struct unit *unit);
int unit_post_backward_reshard(struct unit *unit); /* and prefetch */
int unit_reshard_stale(struct unit *unit);         /* but not amid a backward */
void unit_mark_used(struct unit *unit); /* what is gathered is for the forward that is on its way */
/* A backward within a forward ends for the units that it passed through, and those gathered for it in vain.
 * The others are amid their forward, or wait for the backward of the whole. */
bool unit_ends_with_backward(const struct unit *unit);

/* ---- prefetch.c. 0 or -1, where nothing else is said ---- */

/* The unit to prefetch while `unit` is in `state`, or NULL. */
struct unit *unit_next_to_prefetch(const struct unit *unit, enum training_state state);
void unit_set_prefetched(struct unit *unit, bool prefetched);
int unit_prefetch(struct unit *candidate, enum training_state state);     /* unless it is gathered already */
int unit_prefetch_next(struct unit *unit, enum training_state state);     /* by the table of operations: */
int unit_prefetch_in_order(struct unit *unit, enum training_state state); /* as order.h says, */
int unit_prefetch_chosen(struct unit *unit, enum training_state state);   /* or as outside code does */
/* on the user's word; the module shows the whole parameters */
int unit_prefetch_by_user(struct unit *unit);

/* ---- reduce.c, recover.c ---- */

int unit_await_step(struct unit *part);       /* its optimizers have stepped. 0 or -1 */
void unit_abandon_forward(struct unit *unit); /* it has raised; the exception stays */

#endif
