/* A unit in autograd's graph.
 *
 * [Note: one node per unit] Each forward applies one autograd function to `anchor`, an empty leaf; its
 * outputs are the unit's cached views and its backward receives all their gradients at once. It returns
 * no gradient for the anchor, yet autograd runs the anchor's accumulation node once per backward, after
 * every contribution: the post-backward moment.
 *
 * Invariant: while `views_attached`, the views of the parts that were trained in the last forward carry its
 * history; those of others carry none. */
#ifndef FSDP_RUNTIME_NODE_H
#define FSDP_RUNTIME_NODE_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stdbool.h>
#include <stdint.h>

struct unit;

struct unit_node {
    PyObject *anchor;            /* owned */
    PyObject *accumulation_node; /* owned; the anchor's, which keeps the hook on it alive */
    PyObject *anchor_hook;       /* owned; the post-backward, a hook that does not own the unit */
    PyObject *hooks_seen;        /* owned; number of torch's latest hook when the views had none */
    bool views_attached;         /* the views carry the history of an earlier forward */
    bool trained_last_forward;   /* of a part: its own views do */
    uint64_t frozen_params;      /* of a part: which of its parameters were not trained then; 0: all were */
};

int node_init(void); /* the autograd function, for all units; once per process. 0 or -1 */
void node_fini(struct unit *unit);
void node_drop_anchor(struct unit *unit); /* and its node and hook */
/* The views belong to a new node; its anchor is made on the first call. 0 or -1 */
int node_attach_views(struct unit *unit);
int node_detach_part(struct unit *part);  /* its views have no history. 0 or -1 */
int node_detach_views(struct unit *unit); /* nor those of any part. 0 or -1 */

#endif
