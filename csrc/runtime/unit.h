/* One FullyShardedDataParallel instance: its forward and backward, and the state that the forward leaves for
 * the backward.
 *
 * Invariant: outside of a step the phase is IDLE or SUMMON_FULL_PARAMS, the handle is IDLE too, and no flag
 * of a step is set. A unit without a runtime has not run lazy init, or its root was freed. */
#ifndef FSDP_RUNTIME_UNIT_H
#define FSDP_RUNTIME_UNIT_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stdbool.h>
#include <stdint.h>

#include "handle/handle.h"
#include "runtime/schedule.h"
#include "runtime/trace.h"

/* Phase of a unit, with or without parameters. */
enum unit_phase {
    PHASE_IDLE,
    /* during its forward, and from its pre-backward to the end of the backward */
    PHASE_IN_STEP,
    PHASE_SUMMON_FULL_PARAMS,
    UNIT_PHASES
};

struct runtime;

static const int64_t FOR_NEXT_FORWARD = INT64_MAX; /* the next forward in which the unit runs */

/* State of the unsharded parameters beyond param_state. */
struct unit_unsharded {
    struct unshard_mark mark; /* end of the last all-gather of all flat parameters */
    /* value of runtime.num_forwards that the parameters are unsharded for: see [Note: stale parameters] in
     * reshard.c */
    int64_t for_forward;
    bool prefetched;     /* true if this flat parameter was prefetched and is unused */
    bool saved_by_graph; /* true if a create_graph backward has saved the parameters: keep them unsharded */
    /* precision of this flat parameter in the last forward that a backward can follow */
    enum precision graph_precision;
};

/* State of nested backwards: [Note: checkpoints inside a unit] in backward.c. */
struct unit_nesting {
    int64_t graph_task;      /* id of autograd's graph task for the backward of the unit */
    bool recomputed;         /* true if the last forward was a recomputation inside a backward */
    bool can_nest;           /* true if inputs are hooked, and autograd queried for anchor_will_run */
    bool nested;             /* true if a backward nested in this one was seen */
    bool anchor_will_run;    /* true if this backward runs the unit's anchor */
    bool awaits_input_grads; /* true if the post-backward follows the gradients of the unit's inputs */
};

/* Places of a unit in the orders of its runtime; -1 if not recorded. */
struct order_place {
    int64_t unit; /* index of the unit */
    int64_t pre_forward, post_forward;
};

/* Autograd node of a unit; node.c. */
struct unit_node {
    PyObject *anchor; /* owned */
    /* owned; the anchor's AccumulateGrad node, which keeps anchor_hook registered */
    PyObject *accumulation_node;
    PyObject *anchor_hook;     /* owned; calls unit_post_backward, does not own the unit */
    PyObject *hooks_seen;      /* owned; id of torch's latest hook when the views had none */
    bool views_attached;       /* true if the views carry the history of a forward */
    bool trained_last_forward; /* true if this flat parameter's own views carry history */
    /* hash of the parameters that were frozen in that forward; 0 if all were trained */
    uint64_t frozen_params;
};

/* State of optional units; optional.c. All zeros if nothing is optional. Segments ([Note: segments]) share
 * their unit's. */
struct optional {
    struct unit *enclosing; /* borrowed, from the same runtime; NULL unless the unit is optional */
    struct unit *next;      /* borrowed; next optional unit with parameters inside the same enclosing unit */
    /* true if some parameter required a gradient in the last forward of the enclosing unit with gradients
     * enabled */
    bool trainable;
    /* true if a backward under no_sync has passed this flat parameter since its last reduction */
    bool unreduced;

    struct unit *first; /* borrowed; first optional unit inside this one */
    bool open;          /* true while the optional units inside are unsharded and may run */
    bool reached;       /* true from the pre-backward until the optional units inside are reduced */
};

/* [Note: segments] Parameters of different dtypes, or frozen and trained ones, cannot share a flat parameter.
 * Such a unit has several: its own, and one for each of its segments. A segment is also a struct unit, with a
 * handle and an index in the runtime, so that loops over units include it; but its unit (`leader`) unshards,
 * exposes and reshards it. Segments share the unit's autograd node: when any of them receives a gradient, all
 * trained ones are reduced, in the same order on all ranks. A variable or argument `part` is the struct unit
 * of one flat parameter: a unit or a segment. */
struct unit {
    PyObject *object;            /* borrowed; the Python object that contains this struct */
    PyObject *module_ref;        /* owned; weak reference to the instance, which owns the unit */
    PyObject *module_end;        /* owned; callback of module_ref, does not own the unit */
    PyObject *handle_object;     /* owned; NULL without parameters */
    struct handle *handle;       /* borrowed from handle_object */
    PyObject *runtime_object;    /* owned; NULL before lazy init */
    struct runtime *runtime;     /* borrowed from runtime_object */
    PyObject *name;              /* owned; str */
    int32_t name_index;          /* index of the name in progress.c, or -1 */
    PyObject *param_dtype;       /* owned; dtype that inputs are cast to, or NULL */
    struct unit_options options; /* the constructor's */

    struct unit *leader; /* borrowed; unit of a segment, else NULL */
    /* borrowed; a unit's first segment, or a segment's next one; NULL at the end */
    struct unit *next_segment;
    PyObject *segments; /* owned; tuple of Unit objects, or NULL */

    bool is_root;          /* true for the first unit of a runtime */
    bool sync_gradients;   /* false under no_sync */
    enum unit_phase phase; /* written by unit_set_phase() */
    struct order_place place;
    struct optional optional;
    struct unit_unsharded unsharded;
    bool evaluating; /* true if the wrapped module is in eval mode; used with full_precision_in_eval */

    struct unit_node node;
    PyObject *remove_input_hooks; /* owned; function that removes the hooks on the unit's inputs; or NULL */
    /* identity of the last forward's backward hook, if views stay exposed; never dereferenced */
    const void *backward_hook;
    bool needs_pre_backward_unshard; /* true if a backward is expected that reads the parameters */
    bool ran_pre_backward;           /* true if that backward has begun */
    bool inputs_only; /* true if this flat parameter's node has run in a backward(inputs=...) */
    /* true if this flat parameter's optimizers step on another stream that COMPUTE has not waited for */
    bool stepping;
    struct unit_nesting nesting;
    bool had_gradient;     /* true if a backward has reached the unit's outputs or parameters */
    bool expects_gradient; /* true if the unit ran in training mode since the root's forward began */
};

/* Arguments of unit_init. References are borrowed for the call. */
struct unit_spec {
    PyObject *module, *handle_object /* or NULL */, *name;
    PyObject *segments; /* tuple of Unit objects, which have no segments themselves */
    struct handle *handle;
    struct config config;
};

/* Return the leader of a segment, or the unit itself. */
static inline struct unit *unit_of_part(struct unit *part) {
    return part->leader ? part->leader : part;
}

/* Iterate over the flat parameters of a unit: its own, then its segments'. */
#define FOR_EACH_FLAT_PARAM(part, first) for (struct unit *part = (first); part; part = part->next_segment)

/* ---- unit.c. Return 0, or -1 with an exception, unless noted ---- */

int unit_init(struct unit *unit, PyObject *object, const struct unit_spec *spec);
int unit_clear(struct unit *unit);
/* Append a segment; see [Note: segments]. */
void unit_add_segment(struct unit *unit, struct unit *segment);
int unit_visit(struct unit *unit, visitproc visit, void *arg);
int unit_end_step(struct unit *unit); /* clear all flags of a step, and become IDLE */
int unit_remove_input_hooks(struct unit *unit);
void unit_set_sync_gradients(struct unit *unit, bool sync);
/* Return the instance, or NULL without an exception if it was freed. New reference. */
PyObject *unit_module(const struct unit *unit);
int unit_is_training(const struct unit *unit); /* 1 if the wrapped module is in training mode, 0 or -1 */

/* Write the phase; the only function that does. Return 0, or -1 with RuntimeError that names both phases. */
int unit_set_phase(struct unit *unit, enum unit_phase phase);
int unit_set_training_state(struct unit *unit, enum training_state state); /* sets all flat parameters */
/* Return the unit's handle, or the first one of its runtime, or NULL. */
const struct handle *unit_handle_or_first(const struct unit *unit);
long long unit_rank(const struct unit *unit); /* rank for messages, or -1 without any handle */
/* Set an exception as flat_param_error does, for a unit that may have no parameters. Return -1. */
int unit_error(PyObject *type, int64_t rank, PyObject *unit, const char *format, ...);
/* Add rank, unit and phase to the error of a collective, raised by its enqueue or later. Return -1. */
int unit_explain_failure(struct unit *unit, enum traced part, bool enqueued);

/* ---- forward.c. Return 0, or -1 with an exception, unless noted ---- */

/* Run the instance's forward, from root pre-forward to post-forward. New reference, or NULL with the unit
 * IDLE. */
PyObject *unit_forward(struct unit *unit, PyObject *wrapped, PyObject *args, PyObject *kwargs);
/* Unshard the unit and the optional units inside, and prefetch the next units in the order. The unit may have
 * no parameters. */
int unit_unshard_for_forward(struct unit *unit);
/* Attach the exposed views to a new autograd node if the unit is trainable. */
int unit_register_post_backward_hook(struct unit *unit);
/* Hook the tensors of *output. A backward can follow if there is one that requires a gradient. */
int unit_register_pre_backward_hooks(struct unit *unit, PyObject **output);
/* Return true if this flat parameter's views are exposed since its last forward. Excludes units unsharded by
 * a user call of `_unshard()`. runtime.c */
bool unit_exposes_views(struct unit *part);

/* ---- backward.c, called by hooks. Return 0, or -1 with an exception, which autograd raises ---- */

int unit_pre_backward(void *unit);
int unit_pre_backward_of_base(void *unit);
int unit_unshard_for_backward(struct unit *unit); /* like unit_unshard_for_forward */
int unit_post_backward(void *unit);
int unit_post_backward_of_parts(void *unit);       /* after the gradients of the unit's inputs */
int unit_reshard_only(void *unit);                 /* a frozen unit, after the gradients of its inputs */
int unit_refuse_backward(const struct unit *unit); /* raise an error for a unit without a runtime */
/* Return 1 if the backward at the unit's node also runs the anchor, 0 if not, -1 with an exception. */
int unit_reaches_anchor(struct unit *unit);
/* Mark a flat parameter whose node has run in a backward that does not run its anchor's hook. */
int unit_receive_inputs_only(struct unit *part);

/* ---- unshard.c. Return 0, or -1 with an exception ---- */

/* Wait for the rate limiter and enqueue the all-gathers. No-op for flat parameters that are unsharded. */
int unit_unshard(struct unit *unit);
int unit_wait_unshard(struct unit *unit); /* make COMPUTE wait for the all-gathers */
int unit_unshard_and_wait(struct unit *unit);
int unit_unshard_part(struct unit *part);               /* enqueue one all-gather, after the limiter */
int unit_reshard(struct unit *part, bool free_storage); /* reshard one flat parameter */
/* Select the unit's precision after the wrapped module's mode, under FSDP_USE_FULL_PREC_IN_EVAL. */
int unit_precision_for_forward(struct unit *unit);
void unit_record_precision(struct unit *unit);      /* call after a forward that a backward can follow */
int unit_precision_for_backward(struct unit *unit); /* precision of the unit's forward */

/* ---- reshard.c: time of reshards. Return 0, or -1 with an exception ---- */

int unit_reshard_after_forward(struct unit *unit);
int unit_post_backward_reshard(struct unit *unit); /* reshard, then prefetch */
int unit_reshard_stale(struct unit *unit);         /* no-op in a backward */
/* Return true if the unit's step ends with this backward. A backward nested in a forward ends only units that
 * it passed through, and units prefetched for it; the others are in their forward, or wait for the outer
 * backward. */
bool unit_ends_with_backward(const struct unit *unit);

/* ---- prefetch.c. Return 0, or -1 with an exception, unless noted ---- */

/* Return the unit to prefetch while `unit` is in `state`, or NULL. */
struct unit *unit_next_to_prefetch(const struct unit *unit, enum training_state state);
void unit_set_prefetched(struct unit *unit, bool prefetched);
/* Prefetch the next units in the order, or those that a replacement of _get_handle_to_prefetch returns. */
int unit_prefetch_next(struct unit *unit, enum training_state state);
/* Wait, without streams, for units prefetched in the unit's backward: call when that ends. */
int unit_wait_prefetched(const struct unit *unit);
/* Unshard at a user's request, and expose the views. */
int unit_prefetch_by_user(struct unit *unit);

/* ---- node.c ---- */

int node_init(void);                      /* create the autograd function, once per process. 0 or -1 */
void node_drop_anchor(struct unit *unit); /* drop the node and the hook as well */
/* Attach the views to a new node. The first call creates the anchor. Return 0 or -1. */
int node_attach_views(struct unit *unit);
int node_detach_part(struct unit *part);  /* drop the history of its views. 0 or -1 */
int node_detach_views(struct unit *unit); /* drop the history of all views. 0 or -1 */

/* ---- optional.c ---- */

/* Insert `unit` at the head of the list of `enclosing`. */
void optional_add(struct unit *unit, struct unit *enclosing);

/* Begin or end a forward or backward of the enclosing unit; reshard.c has the ends. Return 0 or -1. */
int optional_begin_forward(struct unit *enclosing);
int optional_end_forward(struct unit *enclosing);
int optional_begin_backward(struct unit *enclosing);
int optional_end_backward(struct unit *enclosing);
/* reduce.c: reduce the gradients of the optional units inside, zeros for missing ones. reduce_all also covers
 * enclosing units without gradients. Return 0 or -1. */
int optional_reduce(struct unit *enclosing);
int optional_reduce_all(struct runtime *runtime);
void optional_abandon(struct unit *enclosing); /* call after a failed forward; clears exceptions */
void optional_reset(struct unit *enclosing);   /* close after an exception in a step */

/* Check that an optional unit may run, or may receive a gradient. Return 0, or -1 with RuntimeError. */
int optional_check(const struct unit *unit, bool in_backward);

/* ---- order.c ---- */

struct order;
void order_record_pre_forward(struct order *order, struct order_place *place);
int order_record_post_forward(struct order *order, struct order_place *place); /* 0, or -1 with MemoryError */

/* ---- reduce.c, recover.c ---- */

int unit_wait_step(struct unit *part);        /* make COMPUTE wait for its optimizers. 0 or -1 */
void unit_abandon_forward(struct unit *unit); /* the forward raised; keeps the exception */

#endif
