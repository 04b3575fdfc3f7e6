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
#include "runtime/optional.h"
#include "runtime/order.h"
#include "runtime/schedule.h"
#include "runtime/trace.h"

enum backward_prefetch { PREFETCH_NONE, PREFETCH_BACKWARD_PRE, PREFETCH_BACKWARD_POST }; /* torch's values */

/* Whether the unit, with or without parameters, is in use. */
enum unit_phase {
    PHASE_IDLE,
    PHASE_IN_STEP, /* amid its forward, or its backward has begun */
    PHASE_SUMMON_FULL_PARAMS,
    UNIT_PHASES
};

struct runtime;

static const int64_t FOR_NEXT_FORWARD = INT64_MAX; /* that the unit runs in */

/* One FullyShardedDataParallel instance. */
struct unit {
    PyObject *object;        /* borrowed; the Python object that this struct lives in */
    PyObject *module_ref;    /* owned; weak reference to the instance, which owns the unit; its _lazy_init
                              * builds the runtime, its end detaches the views */
    PyObject *module_end;    /* owned; a hook that does not own the unit: that reference's callback */
    PyObject *handle_object; /* owned; or NULL when the instance manages no parameters */
    struct handle *handle;   /* borrowed from handle_object */
    /* [Note: segments] Parameters of different dtypes, or frozen ones beside others, cannot lie in one flat
     * parameter. Then a unit has several: its own, and one for each of its segments. A segment is a struct
     * unit too, with a handle and a place among the runtime's units, so that whatever goes over those finds
     * it; but its unit gathers, shows and frees it. They share the unit's node: where a gradient comes to any
     * part, all that are trained are reduced, in one order on all ranks. */
    struct unit *leader;       /* borrowed; of a segment: the unit that it is part of, else NULL */
    struct unit *next_segment; /* borrowed; the unit's first, then one another's; NULL at the end */
    PyObject *segments;        /* owned; tuple of Unit objects, or NULL */
    PyObject *runtime_object;  /* owned; NULL before lazy init */
    struct runtime *runtime;   /* borrowed from runtime_object */
    PyObject *name;            /* owned; str */

    PyObject *param_dtype; /* owned; inputs are cast to it, or NULL */
    bool cast_forward_inputs, cast_root_forward_inputs;
    enum backward_prefetch backward_prefetch;
    bool forward_prefetch, limit_all_gathers;
    bool full_precision_in_eval; /* FSDP_USE_FULL_PREC_IN_EVAL */

    bool is_root;
    bool sync_gradients;
    bool stepping;         /* of a part: its optimizers step in this backward, and nobody has waited */
    enum unit_phase phase; /* written by unit_set_phase() */

    /* [Note: one node per unit] Each forward applies one autograd function to `anchor`, an empty leaf; its
     * outputs are the unit's cached views and its backward receives all their gradients at once. It returns
     * no gradient for the anchor, yet autograd runs the anchor's accumulation node once per backward, after
     * every contribution: the post-backward moment. */
    PyObject *anchor;      /* owned */
    PyObject *anchor_node; /* owned; keeps the accumulation node, and the hook on it, alive */
    PyObject *anchor_hook; /* owned; a hook that does not own the unit */
    bool views_attached;   /* the views carry history of an earlier forward */
    bool in_node;          /* of a part: its own do, as it was trained in the last one */
    uint64_t frozen;       /* of a part: which of its parameters were not; 0: all were */
    /* owned; the views had no hooks yet when torch's hook of this number was registered */
    PyObject *hooks_seen;

    PyObject *reshard_hook; /* owned; removable, on the inputs of a frozen unit; NULL when there is none */
    bool ran_pre_backward, needs_pre_backward_unshard;
    /* [Note: checkpoints inside a unit], in backward.c */
    int64_t graph_task; /* autograd's number of the backward that it is in */
    bool recomputed;    /* its last forward ran within that */
    bool may_nest, nested, anchor_comes;
    bool named;                       /* of a part: by backward(inputs=...), in which its node has run */
    bool cut_off, left_out;           /* see [Note: units without a gradient] in no_gradient.c */
    bool had_gradient;                /* one has come to its outputs in some backward */
    bool evaluating;                  /* with full_precision_in_eval: the wrapped module is in eval mode */
    enum precision graph_precision;   /* of the last forward that a backward can follow */
    int32_t name_index;               /* index of the unit's name in progress.c, -1: none */
    struct order_place place;         /* in the order of units */
    bool prefetched;                  /* of a part: and not used yet */
    struct unshard_mark last_unshard; /* its last all-gather */
    /* the forward, as num_forwards counts: see [Note: stale parameters] in reshard.c */
    int64_t unsharded_for;
    /* true if the graph of a create_graph backward reads its unsharded parameters: they stay gathered */
    bool graph_reads;
    /* that of its last forward, where the views stay: compared, never followed */
    const void *backward_hook;
    struct optional optional; /* need it not run on every rank, or is it around units that need not? */
};

struct unit_spec {
    PyObject *module, *handle_object /* or NULL */, *name, *param_dtype /* or None */;
    PyObject *segments; /* tuple of Unit objects, of units that have no segments themselves */
    struct handle *handle;
    int cast_forward_inputs, cast_root_forward_inputs, forward_prefetch, limit_all_gathers; /* truths */
    int full_precision_in_eval;                                                             /* so is this */
    int backward_prefetch;
};

/* The unit that a flat parameter is of: the segment's leader, or the unit itself. */
static inline struct unit *unit_of_part(struct unit *part) {
    return part->leader ? part->leader : part;
}

/* The flat parameters of a unit: its own, then those of its segments. */
#define FOR_PARTS(part, first) for (struct unit *part = (first); part; part = part->next_segment)

/* ---- unit.c. 0 or -1, where nothing else is said ---- */

int unit_init(struct unit *unit, PyObject *object, const struct unit_spec *spec);
int unit_clear(struct unit *unit);
void unit_drop_anchor(struct unit *unit); /* and its node and hook */
/* which comes after those that it has; see [Note: segments] */
void unit_lead(struct unit *unit, struct unit *segment);
int unit_visit(struct unit *unit, visitproc visit, void *arg);
/* Lazy init: the unit belongs to a root, as the one at `index` of its units. */
int unit_bind(struct unit *unit, struct runtime *runtime, int64_t index);
void unit_unbind(struct unit *unit);
int unit_end_step(struct unit *unit);       /* no flag of a step is set, and it is IDLE */
int unit_unwatch_inputs(struct unit *unit); /* of a frozen unit, whose forward has hooked them */
int unit_detach_part(struct unit *part);    /* its views have no history */
int unit_detach_views(struct unit *unit);   /* nor those of any part */
void unit_set_sync_gradients(struct unit *unit, bool sync);
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
bool unit_shows_views(struct unit *part);

/* ---- backward.c, called by hooks. 0 or -1 with an exception, which autograd raises ---- */

int unit_pre_backward(void *unit);
int unit_unshard_for_backward(struct unit *unit); /* as unit_unshard_for_forward */
int unit_post_backward(void *unit);
int unit_reshard_only(void *unit);                 /* a frozen unit whose inputs have their gradients */
int unit_refuse_backward(const struct unit *unit); /* it has no runtime any more: -1 with an exception */
/* does the backward come to the anchor, where it has come to the unit's node? 1, 0 or -1 */
int unit_reaches_anchor(struct unit *unit);

/* ---- node.c: the autograd function of [Note: one node per unit]. 0 or -1 ---- */

/* The views belong to a new node; its anchor is made on the first call. */
int unit_attach_views(struct unit *unit);

/* ---- unshard.c. 0 or -1 ---- */

int unit_unshard(
    struct unit *unit); /* enqueue its all-gathers, after the limiter; no-ops where it is gathered */
int unit_wait_unshard(struct unit *unit); /* computation waits for them */
int unit_unshard_and_wait(struct unit *unit);
int unit_unshard_part(struct unit *part);               /* after the limiter: for the table of operations */
int unit_reshard(struct unit *part, bool free_storage); /* one part, after its all-gather */
/* In which precision it is gathered next: follows the mode of the wrapped module where asked for. */
int unit_precision_for_forward(struct unit *unit);
void unit_note_precision(struct unit *unit);        /* of a forward that a backward can follow */
int unit_precision_for_backward(struct unit *unit); /* that of its forward */

/* ---- reshard.c: when parameters are freed. 0 or -1 ---- */

int unit_reshard_after_forward(struct unit *unit);
int unit_post_backward_reshard(struct unit *unit); /* and prefetch */
int unit_reshard_optional(
    struct unit *enclosing);               /* its backward is over for the optional units that belong to it */
int unit_reshard_stale(struct unit *unit); /* but not amid a backward */
void unit_note_used(struct unit *unit);    /* what is gathered is for the forward that is on its way */
/* A backward within a forward ends for the units that it passed through, and those gathered for it in vain.
 * The others are amid their forward, or wait for the backward of the whole. */
bool unit_ends_with_backward(const struct unit *unit);

/* ---- prefetch.c. 0 or -1, where nothing else is said ---- */

/* The unit to prefetch while `unit` is in `state`, or NULL. */
struct unit *unit_next(const struct unit *unit, enum training_state state);
void unit_set_prefetched(struct unit *unit, bool prefetched);
int unit_prefetch(struct unit *candidate, enum training_state state);     /* unless it is gathered already */
int unit_prefetch_next(struct unit *unit, enum training_state state);     /* by the table of operations: */
int unit_prefetch_in_order(struct unit *unit, enum training_state state); /* as order.h says, */
int unit_prefetch_chosen(struct unit *unit, enum training_state state);   /* or as outside code does */
/* on the user's word; the module shows the whole parameters */
int unit_prefetch_by_user(struct unit *unit);

/* ---- reduce.c, no_gradient.c, recover.c ---- */

int unit_await_step(struct unit *part); /* its optimizers have stepped. 0 or -1 */
/* a unit with trainable parameters, of whose forward no output requires a gradient. 0 or -1 */
int unit_note_cut_off(struct unit *unit);
/* a forward without gradients has ended; perhaps a checkpoint's. 0 or -1 */
int unit_note_checkpointed(struct unit *unit);
void unit_abandon_forward(struct unit *unit); /* it has raised; the exception stays */

#endif
