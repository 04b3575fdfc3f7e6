/* Autograd node of a unit.
 *
 * [Note: one node per unit] Each forward applies one autograd function to `anchor`, an empty leaf. The
 * function's outputs are the unit's cached views, so its backward receives the gradients of all of them at
 * once. Autograd runs the anchor's accumulation node once per backward, after every contribution, although
 * the function returns no gradient for the anchor. The post-backward is a hook on that node.
 *
 * Invariant: while `views_attached`, the views of each flat parameter that was trained in the last forward
 * carry that forward's history. Views of other flat parameters carry none. */
#ifndef FSDP_RUNTIME_NODE_H
#define FSDP_RUNTIME_NODE_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stdbool.h>
#include <stdint.h>

struct unit;

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

int node_init(void);                      /* create the autograd function, once per process. 0 or -1 */
void node_drop_anchor(struct unit *unit); /* drop the node and the hook as well */
/* Attach the views to a new node. The first call creates the anchor. Return 0 or -1. */
int node_attach_views(struct unit *unit);
int node_detach_part(struct unit *part);  /* drop the history of its views. 0 or -1 */
int node_detach_views(struct unit *unit); /* drop the history of all views. 0 or -1 */

#endif
