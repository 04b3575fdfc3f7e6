/* Autograd node of a unit.
 *
 * [Note: one node per unit] Each forward applies one autograd function to `anchor`, an empty leaf. The
 * function's outputs are the unit's cached views, so its backward receives the gradients of all of them at
 * once. Autograd runs the anchor's accumulation node once per backward, after every contribution, although
 * the function returns no gradient for the anchor. The post-backward is a hook on that node.
 *
 * Invariant: while `views_attached`, the views of each flat parameter that was trained in the last forward
 * carry that forward's history. Views of other flat parameters carry none. */
#include "runtime/callbacks.h"
#include "runtime/runtime.h"
#include "torch/py_torch.h"

/* owned, immortal; C apply() of the function class: torch's Python wrapper around it adds 3 us */
static PyObject *apply;

/* ---- forward and backward of the function ---- */

/* Append the views of frozen parameters to `*frozen`, a list or NULL. `*set_hash` is a hash of their
 * indices. */
static int collect_frozen_views(const struct unit *part, PyObject **frozen, uint64_t *set_hash) {
    const struct flat_param *param = &part->handle->param;
    for (int64_t i = 0; param->use_orig_params && i < param->num_params; i++) {
        int trains = torch_requires_grad(PyList_GetItem(param->params, i));
        if (trains > 0)
            continue;
        *set_hash = *set_hash * 31 + (uint64_t)i + 1;
        if (trains < 0 || (!*frozen && !(*frozen = PyList_New(0))) ||
            PyList_Append(*frozen, PyTuple_GetItem(part->handle->storage.copy->views, i)) < 0)
            return -1;
    }
    return 0;
}

/* Collect the frozen views, and replace all views if the set has changed. Autograd would drop the history of
 * a view that is frozen now, while another graph may still read the old view with its history. */
static int update_frozen_views(struct unit *part, PyObject **frozen) {
    Py_ssize_t before = *frozen ? PyList_Size(*frozen) : 0;
    uint64_t set_hash = 0;
    if (collect_frozen_views(part, frozen, &set_hash) < 0)
        return -1;
    bool same_set = set_hash == part->node.frozen_params;
    part->node.frozen_params = set_hash;
    if (same_set || !unit_of_part(part)->node.views_attached)
        return 0;
    if ((*frozen && PyList_SetSlice(*frozen, before, PyList_Size(*frozen), NULL) < 0) ||
        node_detach_part(part) < 0)
        return -1;
    part->node.trained_last_forward = true;
    return collect_frozen_views(part, frozen, &set_hash);
}

/* forward(context, anchor, token, flat parameters) -> views of the trained flat parameters. Views of frozen
 * parameters among them are non-differentiable.
 *
 * [Note: flat parameters in a node] A flat parameter without any trainable parameter is left out of its
 * unit's node. The set may change before the backward, so a unit with segments saves the set in the context,
 * one byte per flat parameter. */
static PyObject *node_forward(PyObject *self, PyObject *args) {
    PyObject *context = PyTuple_GetItem(args, 0), *token = PyTuple_GetItem(args, 2);
    (void)self;
    if (!context || !token)
        return NULL;
    struct unit *unit = hook_target(token);
    if (PyObject_SetAttr(context, torch_names.unit, token) < 0 ||
        PyObject_SetAttr(context, torch_names.materialize_grads, Py_False) < 0)
        return NULL;
    Py_ssize_t count = 0;
    OWNED *frozen = NULL;
    OWNED *views = NULL;
    FOR_EACH_FLAT_PARAM(part, unit) {
        int trains = unit->next_segment ? flat_param_is_trainable(&part->handle->param) : 1;
        /* a flat parameter that was trained before and is frozen now */
        if (trains < 0 || (!trains && part->node.trained_last_forward && node_detach_part(part) < 0))
            return NULL;
        part->node.trained_last_forward = trains;
        count++;
        if (!trains)
            continue;
        if (update_frozen_views(part, &frozen) < 0)
            return NULL;
        PyObject *own = part->handle->storage.copy->views;
        ref_set(&views, views ? PySequence_Concat(views, own) : Py_NewRef(own));
        if (!views)
            return NULL;
    }
    if (unit->next_segment) {
        OWNED *trained_flags = PyBytes_FromStringAndSize(NULL, count);
        char *trained = trained_flags ? PyBytes_AsString(trained_flags) : NULL;
        FOR_EACH_FLAT_PARAM(part, trained ? unit : NULL)
            *trained++ = part->node.trained_last_forward;
        if (!trained_flags || PyObject_SetAttr(context, torch_names.parts, trained_flags) < 0)
            return NULL;
    }
    OWNED *excluded = frozen ? PyList_AsTuple(frozen) : NULL;
    if (frozen && (!excluded || PyObject_SetAttr(context, torch_names.non_differentiable, excluded) < 0))
        return NULL;
    return Py_XNewRef(views);
}

/* `args`: one ignored value, then the gradients of the flat parameter's views. */
static int receive_flat_param(struct unit *part, PyObject *args, bool *was_summed) {
    const struct flat_param *param = &part->handle->param;
    struct grads *grads = &part->handle->grads;
    int trains = param->use_orig_params ? 1 : torch_requires_grad(param->tensor);
    if (trains <= 0)
        return trains; /* frozen since the forward */
    *was_summed = *was_summed || grads_have_received(grads);
    if (part->runtime->has_edges && grads_stash_param_hooks(grads) < 0)
        return -1;
    return grads_receive(grads, args) < 0 ? unit_explain_failure(part, TRACED_SUM, false) : 0;
}

/* One call of the node's backward. */
struct node_call {
    PyObject *context, *args; /* borrowed */
    PyObject *input_grads;    /* owned; tuple of results: for the anchor, the token and each flat parameter */
    bool reaches_all_leaves;  /* true if the backward reaches all leaves of its graph */
    bool was_summed;          /* true if some flat parameter had received a gradient before */
};

/* Use of an edge to a flat parameter: see [Note: flat parameters in the graph] in backward.c. */
enum edge_use { EDGE_UNUSED, EDGE_ACCUMULATES, EDGE_CAPTURED };

/* Return the use of the edge to the flat parameter with this index, or -1. */
static int edge_use(PyObject *context, Py_ssize_t index) {
    OWNED *edges = PyObject_GetAttrString(context, "next_functions"); /* the first edge is the anchor's */
    if (edges && PySequence_Size(edges) <= 1 + index)
        return EDGE_UNUSED; /* the forward ran before edges were enabled */
    OWNED *edge = edges ? PySequence_GetItem(edges, 1 + index) : NULL;
    OWNED *node = edge ? PySequence_GetItem(edge, 0) : NULL; /* None if frozen in the forward */
    if (!node)
        return -1;
    int executes = node == Py_None ? 0 : torch_will_execute(node);
    if (executes >= 0)
        return executes ? EDGE_ACCUMULATES : EDGE_UNUSED;
    /* autograd raises this error for a leaf that autograd.grad() captures */
    if (!PyErr_ExceptionMatches(PyExc_RuntimeError))
        return -1;
    PyErr_Clear();
    return EDGE_CAPTURED;
}

/* Route the gradients of one flat parameter: receive them, or return them to autograd.grad(). */
static int route_flat_param_gradients(struct unit *part, PyObject *own, struct node_call *call,
                                      Py_ssize_t index) {
    if (call->reaches_all_leaves)
        return receive_flat_param(part, own, &call->was_summed);
    int use = edge_use(call->context, index);
    if (use == EDGE_ACCUMULATES)
        return unit_receive_inputs_only(part) < 0 ? -1 : receive_flat_param(part, own, &call->was_summed);
    if (use != EDGE_CAPTURED)
        return use; /* EDGE_UNUSED, or -1 */
    PyObject *grad = grads_flat_of(&part->handle->grads, own);
    return grad ? PyTuple_SetItem(call->input_grads, 2 + index, grad) : -1;
}

static int receive_gradients(struct unit *unit, struct node_call *call) {
    PyObject *args = call->args;
    /* Double backward through this node is not supported: raise an error instead of returning zeros. Grad
     * mode is on only under create_graph. */
    for (Py_ssize_t i = 1; torch_grad_enabled() && i < PyTuple_Size(args); i++) {
        PyObject *grad = PyTuple_GetItem(args, i);
        int requires_grad = grad == Py_None ? 0 : torch_requires_grad(grad);
        if (requires_grad == 0)
            continue;
        if (requires_grad > 0)
            PyErr_Format(PyExc_RuntimeError,
                         "FSDP does not support gradients of gradients (rank %lld, unit %S): call backward() "
                         "without create_graph=True. Gradients of inputs may be differentiated: compute them "
                         "with torch.autograd.grad(..., inputs, create_graph=True).",
                         (long long)unit->handle->param.layout.rank, unit->name);
        return -1;
    }
    /* follow the stream of the gradients; the anchor's hook runs later */
    if (stream_follow(&unit->runtime->schedule.streams) < 0)
        return -1;
    int reaches_all_leaves = unit->handle->param.use_orig_params ? 1 : unit_reaches_anchor(unit);
    Py_ssize_t count = 2; /* results for the anchor and the token */
    FOR_EACH_FLAT_PARAM(part, unit->runtime->has_edges ? unit : NULL)
        count++;
    call->reaches_all_leaves = reaches_all_leaves;
    call->input_grads = reaches_all_leaves < 0 ? NULL : PyTuple_New(count);
    for (Py_ssize_t i = 0; call->input_grads && i < count; i++)
        PyTuple_SetItem(call->input_grads, i, Py_NewRef(Py_None));
    if (!call->input_grads)
        return -1;
    if (!unit->next_segment) {
        if (route_flat_param_gradients(unit, args, call, 0) < 0)
            return -1;
    } else { /* each flat parameter has a slice of the gradients */
        OWNED *trained_flags = PyObject_GetAttr(call->context, torch_names.parts);
        const char *trained = trained_flags ? PyBytes_AsString(trained_flags) : NULL;
        Py_ssize_t begin = 0, index = -1;
        if (!trained)
            return -1;
        FOR_EACH_FLAT_PARAM(part, unit) {
            if (!trained[++index])
                continue;
            Py_ssize_t num_params = (Py_ssize_t)part->handle->param.num_params;
            OWNED *own = PyTuple_GetSlice(args, begin, begin + 1 + num_params);
            if (!own || route_flat_param_gradients(part, own, call, index) < 0)
                return -1;
            begin += num_params;
        }
    }
    /* earlier gradients, perhaps of another stream, were added on this one */
    return call->was_summed ? stream_join_former(&unit->runtime->schedule.streams) : 0;
}

/* backward(context, *gradients) -> (None, None, a flat gradient or None for each part) */
static PyObject *node_backward(PyObject *self, PyObject *args) {
    struct node_call call = {.context = PyTuple_GetItem(args, 0), .args = args};
    (void)self;
    PyObject *token = PyObject_GetAttr(call.context, torch_names.unit);
    if (!token)
        return NULL;
    struct unit *unit = hook_target(token);
    OWNED *object = unit ? Py_NewRef(unit->object) : NULL; /* a dropped model may be collected in any call */
    Py_DECREF(token);
    if (!unit) {
        PyErr_SetString(PyExc_RuntimeError,
                        "backward through a FullyShardedDataParallel that was freed: keep the model "
                        "until its backward has run");
        return NULL;
    }
    if ((unit->runtime ? receive_gradients(unit, &call) : unit_refuse_backward(unit)) < 0)
        Py_CLEAR(call.input_grads);
    return call.input_grads;
}

/* Compiled autograd calls this before it traces a backward. The unit's hooks cannot be traced. */
static PyObject *node_compiled_autograd_key(PyObject *self, PyObject *context) {
    PyObject *token = PyObject_GetAttr(context, torch_names.unit);
    (void)self;
    if (!token)
        return NULL;
    const struct unit *unit = hook_target(token);
    Py_DECREF(token);
    if (!unit)
        return PyErr_Format(
            PyExc_NotImplementedError,
            "compiled autograd cannot run a FullyShardedDataParallel that was freed: keep the "
            "model until its backward has run");
    return PyErr_Format(
        PyExc_NotImplementedError,
        "rank %lld, unit %S (FullyShardedDataParallel): compiled autograd cannot trace its backward, which "
        "gathers parameters and reduces gradients. Leave torch._dynamo.config.compiled_autograd off, or call "
        "backward() outside of torch.compile and compiled_autograd._enable.",
        unit_rank(unit), unit->name);
}

static PyMethodDef forward_def = {"forward", node_forward, METH_VARARGS, NULL};
static PyMethodDef backward_def = {"backward", node_backward, METH_VARARGS, NULL};
static PyMethodDef key_def = {"_compiled_autograd_key", node_compiled_autograd_key, METH_O, NULL};

/* Create class FlatParameterViews(torch.autograd.Function), with C functions as static methods. */
int node_init(void) {
    if (apply)
        return 0;
    OWNED *function = ref_find("torch.autograd", "Function");
    OWNED *forward = function ? PyCFunction_New(&forward_def, NULL) : NULL;
    OWNED *backward = PyCFunction_New(&backward_def, NULL);
    OWNED *key = PyCFunction_New(&key_def, NULL);
    OWNED *class = NULL;
    if (function && forward && backward && key)
        class = PyObject_CallFunction((PyObject *)Py_TYPE(function), "s(O){sOsOsOss}", "FlatParameterViews",
                                      function, "forward", forward, "backward", backward, key_def.ml_name,
                                      key, "__module__", "fsdp_c");
    OWNED *super =
        class ? PyObject_CallFunctionObjArgs((PyObject *)&PySuper_Type, function, class, NULL) : NULL;
    apply = super ? PyObject_GetAttrString(super, "apply") : NULL;
    return apply ? 0 : -1;
}

/* ---- anchor ---- */

void node_drop_anchor(struct unit *unit) {
    if (unit->node.anchor_hook)
        hook_disarm(unit->node.anchor_hook);
    Py_CLEAR(unit->node.anchor_hook);
    Py_CLEAR(unit->node.accumulation_node);
    Py_CLEAR(unit->node.anchor);
    Py_CLEAR(unit->node.hooks_seen);
}

static int make_anchor(struct unit *unit) {
    struct streams *streams = &unit->runtime->schedule.streams;
    OWNED *anchor = torch_empty(0, unit->handle->storage.copy->dtype, unit->handle->param.device);
    OWNED *removable = NULL;
    if (!anchor || PyObject_SetAttr(anchor, torch_names.requires_grad, Py_True) < 0)
        return -1;
    /* The engine runs the accumulation node, the next one of the leaf's expansion, on the stream on which it
     * was created, in each backward. */
    OWNED *expanded =
        stream_enter_persistent(streams) < 0 ? NULL : PyObject_CallMethod(anchor, "expand_as", "O", anchor);
    OWNED *grad_fn = expanded ? torch_grad_fn(expanded) : NULL;
    OWNED *next = grad_fn ? PyObject_GetAttrString(grad_fn, "next_functions") : NULL;
    OWNED *first = next ? PySequence_GetItem(next, 0) : NULL;
    unit->node.accumulation_node = first ? PySequence_GetItem(first, 0) : NULL;
    if (stream_leave(streams) == 0 && unit->node.accumulation_node)
        unit->node.anchor_hook = hook_new(unit_post_backward, unit, NULL);
    if (unit->node.anchor_hook)
        removable =
            PyObject_CallMethod(unit->node.accumulation_node, "register_hook", "O", unit->node.anchor_hook);
    if (!removable) {
        node_drop_anchor(unit);
        return -1;
    }
    unit->node.anchor = Py_NewRef(anchor);
    return 0;
}

/* Remove user hooks from the views. Such hooks belong to the node of the last forward, and torch would not
 * move them to the next one. */
static int clear_view_hooks(struct unit *unit) {
    int registered = torch_hooks_registered_since(&unit->node.hooks_seen);
    FOR_EACH_FLAT_PARAM(part, unit) {
        PyObject *views = part->handle->storage.copy->views;
        for (Py_ssize_t i = 0; registered > 0 && i < PyTuple_Size(views); i++) {
            PyObject *view = PyTuple_GetItem(views, i);
            OWNED *hooks = torch_backward_hooks(view);
            if (!hooks ||
                (hooks != Py_None && PyObject_SetAttr(view, torch_names._backward_hooks, Py_None) < 0))
                registered = -1;
        }
    }
    if (registered < 0)
        Py_CLEAR(unit->node.hooks_seen);
    return registered < 0 ? -1 : 0;
}

/* Return true if the node has edges. A flat parameter in low precision changes its dtype during the forward,
 * and so loses its accumulation node. */
static bool has_edges(struct unit *unit) {
    if (!unit->runtime->has_edges)
        return false;
    FOR_EACH_FLAT_PARAM(part, unit)
        if (part->handle->param.use_orig_params || part->handle->storage.copy->low_precision)
            return false;
    return true;
}

/* Return the views, the node's outputs. New reference, or NULL. */
static PyObject *apply_node(struct unit *unit) {
    bool edges = has_edges(unit);
    if (!unit->next_segment)
        return PyObject_CallFunctionObjArgs(apply, unit->node.anchor, unit->node.anchor_hook,
                                            edges ? unit->handle->param.tensor : NULL, NULL);
    OWNED *args = PyList_New(0);
    OWNED *tuple = NULL;
    int result = args && PyList_Append(args, unit->node.anchor) == 0
                     ? PyList_Append(args, unit->node.anchor_hook)
                     : -1;
    FOR_EACH_FLAT_PARAM(part, unit)
        if (!result && edges)
            result = PyList_Append(args, part->handle->param.tensor);
    if (!result)
        tuple = PyList_AsTuple(args);
    return tuple ? PyObject_CallObject(apply, tuple) : NULL;
}

int node_attach_views(struct unit *unit) {
    /* record history under no_grad as well: code inside the module may enable gradients, as in FSDP1 */
    bool enabled = torch_grad_enabled();
    if ((!enabled || !unit->node.anchor) && torch_inference_mode())
        return 0; /* inference mode records no history */
    OWNED *views = NULL;
    bool has_anchor = unit->node.anchor;
    if (!enabled)
        torch_set_grad_enabled(true);
    /* The token does not own the unit: a cycle through the views' node would be invisible to the garbage
     * collector. */
    if (clear_view_hooks(unit) == 0 && (unit->node.anchor || make_anchor(unit) == 0))
        views = apply_node(unit);
    if (!enabled)
        torch_set_grad_enabled(false);
    unit->node.views_attached = true;
    if (views)
        return 0;
    /* A transformation of torch.func rejects the unit's autograd function. Without gradients the function is
     * not needed, so the error is cleared and a new anchor, which the transformation owns, dropped. */
    PyObject *error = PyErr_GetRaisedException();
    OWNED *peek = ref_find("torch._C._functorch", "peek_interpreter_stack");
    OWNED *innermost = peek ? PyObject_CallNoArgs(peek) : NULL;
    bool is_transformed = innermost && innermost != Py_None;
    PyErr_SetRaisedException(error);
    if (!is_transformed)
        return -1;
    PyErr_Clear();
    if (!has_anchor)
        node_drop_anchor(unit);
    if (!enabled)
        return 0;
    return unit_error(PyExc_NotImplementedError, unit_rank(unit), unit->name,
                      "its forward is called inside a transformation of torch.func (vmap, grad, jvp) with "
                      "gradients enabled, which sharded parameters cannot record. Call it under "
                      "torch.no_grad(), or transform the unwrapped module.");
}

/* ---- drop the history of views ---- */

int node_detach_part(struct unit *part) {
    PyObject *inference_guard;
    if (torch_leave_inference_mode(&inference_guard) < 0)
        return -1;
    part->node.trained_last_forward = false;
    int result = handle_detach_views(part->handle);
    return torch_return_to_inference_mode(inference_guard) < 0 ? -1 : result;
}

int node_detach_views(struct unit *unit) {
    if (!unit->node.views_attached || !unit->handle)
        return 0;
    unit->node.views_attached = false;
    FOR_EACH_FLAT_PARAM(part, unit)
        if (node_detach_part(part) < 0)
            return -1;
    return 0;
}
