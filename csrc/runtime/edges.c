/* [Note: flat parameters in the graph]
 * Where a program may look for them, within DistributedDataParallel and where pipelines are there, a unit's node has an edge to each of
 * its flat parameters, without use_orig_params and not in low precision: backward(inputs=...), torch.autograd.grad() and whoever walks
 * over graphs find them by it. Elsewhere there is none, as autograd would run a further node for each unit. In a backward to all
 * leaves nothing goes along them: what is received is reduced at the anchor. A backward to named leaves comes to no anchor:
 *   backward(inputs=...)   what has come for the parts that are named is reduced when the backward ends.
 *   autograd.grad(...)     is handed the gradient itself, of this rank's batch. A shard cannot have it: that is refused. */
#include "runtime/runtime.h"
#include "torch/names.h"

/* Nobody asks for more than the first node of a backward that has its callback: the others are in the same one. 1, 0 or -1. */
static int reaches_anchor(struct unit *unit) {
    struct runtime *runtime = unit->runtime;
    if (!runtime->has_edges || (runtime->callback_queued && runtime->reach == REACH_ALL))
        return 1;
    int reaches = torch_will_execute(unit->anchor_node);
    if (reaches > 0 && runtime->callback_queued)
        runtime_set_reach(runtime, REACH_ALL);
    return reaches;
}

int unit_reaches_anchor(struct unit *unit) {
    return unit->handle->param.use_orig_params ? 1 : reaches_anchor(unit);
}

/* Original parameters are in no graph: a schedule that takes the gradients of inputs first, and then those of the weights, finds none of
 * these. To take those of inputs alone is no mistake. */
int unit_check_named(struct unit *unit) {
    if (!unit->anchor_node || !unit->handle->param.use_orig_params)
        return 0;
    int reaches = reaches_anchor(unit);
    if (reaches)
        return reaches < 0 ? -1 : 0;
    return PyErr_WarnFormat(
        PyExc_UserWarning, 1,
        "rank %lld, unit %S: a backward to named tensors has passed through it, which gives its parameters no gradient "
        "with use_orig_params=True. Schedules that take the gradients of inputs and weights apart need "
        "use_orig_params=False",
        unit_rank(unit), unit->name);
}

/* New reference to the accumulation node of the part with this index, None where it was frozen in the forward, or NULL. */
static PyObject *flat_param_node(PyObject *context, Py_ssize_t index) {
    PyObject *edges = PyObject_GetAttrString(context, "next_functions"); /* the anchor's is the first */
    bool is_there = edges && PySequence_Size(edges) > 1 + index;
    PyObject *edge = is_there ? PySequence_GetItem(edges, 1 + index) : NULL;
    PyObject *node = edge ? PySequence_GetItem(edge, 0) : NULL;
    if (edges && !is_there)
        node = Py_NewRef(Py_None); /* of a forward from before there were any */
    Py_XDECREF(edges);
    Py_XDECREF(edge);
    return node;
}

int unit_edge_use(PyObject *context, Py_ssize_t index) {
    PyObject *node = flat_param_node(context, index);
    if (!node)
        return -1;
    int executes = node == Py_None ? 0 : torch_will_execute(node);
    Py_DECREF(node);
    if (executes >= 0)
        return executes ? EDGE_ACCUMULATES : EDGE_UNUSED;
    if (!PyErr_ExceptionMatches(PyExc_RuntimeError)) /* by which it tells of a leaf that autograd.grad() asks for */
        return -1;
    PyErr_Clear();
    return EDGE_CAPTURED;
}

int unit_receives_named(struct unit *unit) {
    if (runtime_queue_final_callback(unit->runtime) < 0)
        return -1;
    runtime_set_reach(unit->runtime, REACH_NAMED);
    unit->named = true;
    return 0;
}
