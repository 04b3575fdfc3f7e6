/* Backward of one unit, from its first node to its reduction, and end of a backward for all units. */
#include "runtime/runtime.h"

#include "runtime/callbacks.h"
#include "runtime/operations.h"
#include "torch/py_torch.h"

#include "base/check.h"

/* ---- checkpoints inside a unit ---- */

/* [Note: checkpoints inside a unit]
 *
 * A reentrant checkpoint around a part of a unit's module runs a nested backward inside the unit's own. The
 * nested backward delivers the gradients of that part and runs the anchor's hook, but the outer backward
 * still reads the parameters and delivers the other gradients. The nested gradients are therefore accumulated
 * as under no_sync, and the outer backward's hook reduces and reshards. If the outer backward does not run
 * the anchor, because all trained parts of the module are checkpointed, the unit waits for the gradients of
 * its inputs, which follow its last part. A unit without such inputs waits for the end of the backward.
 *
 * torch_will_execute() distinguishes the two cases. Autograd is queried and inputs are hooked in the first
 * step of a unit, and in later ones once a nested backward was seen. Gradients that are still unreduced at
 * the end of the backward are reduced there. */

/* ---- flat parameters in the graph ---- */

/* [Note: flat parameters in the graph]
 *
 * Inside DistributedDataParallel, and once torch.distributed.pipelining is imported, a unit's node has an
 * edge to each of its flat parameters, unless use_orig_params or low precision. The edges let
 * backward(inputs=...), torch.autograd.grad() and graph visitors reach the flat parameter. Other programs
 * have no edges, which cost one more node per unit in each backward. A backward to all leaves passes None
 * along the edges: the gradients are reduced at the anchor. A backward to named leaves does not run the
 * anchor:
 *
 *   backward(inputs=...)   gradients of the flat parameters among the inputs are reduced at the end.
 *   autograd.grad(...)     receives this rank's gradient itself. A sharded strategy raises an error. */

/* The result holds for all of the graph task, so autograd is queried once per backward. */
int unit_reaches_anchor(struct unit *unit) {
    struct runtime *runtime = unit->runtime;
    if (!runtime->has_edges || (runtime->callback_queued && runtime->reach == REACH_ALL))
        return 1;
    int reaches = torch_will_execute(unit->node.accumulation_node);
    if (reaches > 0 && runtime->callback_queued)
        runtime->reach = REACH_ALL;
    return reaches;
}

int unit_receive_inputs_only(struct unit *part) {
    if (runtime_queue_final_callback(part->runtime) < 0)
        return -1;
    part->runtime->reach = REACH_INPUTS_ONLY;
    part->inputs_only = true;
    return 0;
}

/* ---- pre-backward ---- */

int unit_unshard_for_backward(struct unit *unit) {
    if (!unit->handle)
        return optional_begin_backward(unit);
    if (unit->optional.enclosing && optional_check(unit, true) < 0)
        return -1;
    if (unit_set_training_state(unit, USE_BACKWARD_PRE) < 0)
        return -1;
    if (unit_precision_for_backward(unit) < 0 || unit_unshard_and_wait(unit) < 0)
        return -1;
    unit->needs_pre_backward_unshard = false;
    unit_set_prefetched(unit, false);
    if (optional_begin_backward(unit) < 0)
        return -1;
    return unit_prefetch_next(unit, USE_BACKWARD_PRE);
}

int unit_refuse_backward(const struct unit *unit) {
    return unit_error(PyExc_RuntimeError, unit_rank(unit), unit->name,
                      "a backward has reached a forward whose root no longer exists: one of its units has "
                      "since run under another root, or the units were reset. Call backward() before that, "
                      "or let one FullyShardedDataParallel around both roots call them in its forward.");
}

int unit_pre_backward(void *target) {
    struct unit *unit = target;
    if (!unit->runtime)
        return unit->handle ? unit_refuse_backward(unit) : 0;
    /* The parameters may be unsharded already, by a forward under another stream: wait for that all-gather.
     * If the unit has received its gradients, this is another graph over the unit, from a reentrant
     * checkpoint: unshard again. */
    bool done = unit->handle && unit->handle->training_state == USE_BACKWARD_POST;
    if (unit->ran_pre_backward && !done)
        return stream_follow(&unit->runtime->schedule.streams);
    TRACE(TRACED_PRE_BACKWARD, unit->name_index);
    /* the outermost unit of this backward queues the final callback; FSDP1 lets only the root do so */
    if (runtime_queue_final_callback(unit->runtime) < 0 || unit_set_phase(unit, PHASE_IN_STEP) < 0)
        return -1;
    PyObject *accumulation_node = unit->node.accumulation_node;
    struct unit_nesting *nesting = &unit->nesting;
    nesting->graph_task = nesting->recomputed ? torch_graph_task() : unit->runtime->graph_task;
    nesting->nested = false;
    int will_run = nesting->can_nest && accumulation_node ? torch_will_execute(accumulation_node) : 1;
    nesting->anchor_will_run = will_run;
    if (nesting->graph_task == -2 || will_run < 0)
        return -1;
    /* Warn if a backward to named tensors leaves the original parameters without gradients. Original
     * parameters are in no graph, so a schedule that computes gradients of inputs first and of weights later
     * finds none. Gradients of inputs alone are legitimate, hence no error. */
    int reaches_anchor =
        accumulation_node && unit->handle->param.use_orig_params ? unit_reaches_anchor(unit) : 1;
    if (reaches_anchor == 0)
        reaches_anchor = PyErr_WarnFormat(
            PyExc_UserWarning, 1,
            "rank %lld, unit %S: a backward to named tensors has passed through the unit without gradients "
            "for its parameters, which use_orig_params=True does not support. Schedules that compute the "
            "gradients of inputs and weights separately need use_orig_params=False.",
            unit_rank(unit), unit->name);
    if (reaches_anchor < 0 || unit_unshard_for_backward(unit) < 0)
        return -1;
    FOR_EACH_FLAT_PARAM(part, unit->handle ? unit : NULL) {
        struct handle *handle = part->handle;
        /* a checkpointed part that runs again in this backward must find the views of the forward */
        if (handle->param.use_orig_params && handle_expose_views(handle) < 0)
            return -1;
        if (grads_begin_backward(&handle->grads) < 0)
            return -1;
        if (handle->grads.stashed)
            runtime_schedule_recovery(unit->runtime);
    }
    unit->ran_pre_backward = true;
    unit->had_gradient = true;
    return 0;
}

/* Hook of the base of an output that is a view. Outside the unit, such as that of an input, it may get its
 * gradient after the unit's backward. */
int unit_pre_backward_of_base(void *target) {
    struct unit *unit = target;
    bool done = unit->handle && unit->handle->training_state == USE_BACKWARD_POST;
    return done ? 0 : unit_pre_backward(unit);
}

/* ---- post-backward ---- */

static bool has_received(struct unit *unit) {
    FOR_EACH_FLAT_PARAM(part, unit)
        if (grads_have_received(&part->handle->grads))
            return true;
    return false;
}

static int accumulate_unsharded(struct unit *part) {
    if (grads_accumulate_unsharded(&part->handle->grads) < 0)
        return unit_explain_failure(part, TRACED_SUM, false);
    return 0;
}

/* Return true if `.grad` must be final before the end of the backward: DistributedDataParallel reads it
 * there, or a pipeline may and no other rank contributes. */
static bool is_exposed_at_once(const struct unit *unit) {
    const struct flat_param *param = &unit->handle->param;
    bool alone = param->shard_group.world_size == 1 && !param->replicate_group.group;
    return unit->runtime->has_edges && !param->use_orig_params && !param->sharded &&
           !unit->handle->storage.offload && (alone || unit->runtime->ddp);
}

static int post_backward(struct unit *unit) {
    struct runtime *runtime = unit->runtime;
    if (runtime_queue_final_callback(runtime) < 0 || unit_set_training_state(unit, USE_BACKWARD_POST) < 0)
        return -1;
    FOR_EACH_FLAT_PARAM(part, unit)
        if (grads_begin_backward(&part->handle->grads) < 0 ||
            grads_call_param_hooks(&part->handle->grads) < 0)
            return -1;
    if (unit->optional.enclosing) {
        if (optional_check(unit, true) < 0)
            return -1;
        if (unit->sync_gradients) /* the enclosing unit reduces it */
            return operations_post_backward_reshard(unit);
    } else if (!has_received(unit)) { /* a user hook on the flat parameter has set `.grad` to None */
        const struct handle *handle = unit->handle;
        if (unit->sync_gradients && handle->param.sharded && !handle->grads.saved_shard)
            return unit_error(
                PyExc_AssertionError, handle->param.layout.rank, unit->name,
                "a hook of the flat parameter has set .grad to None before the reduction, which the other "
                "ranks are waiting for. Zero the gradient instead, or clear it after backward().");
        return operations_post_backward_reshard(unit);
    }
    if ((unit->sync_gradients && runtime_finish_reduction(runtime) < 0) ||
        operations_post_backward_reshard(unit) < 0)
        return -1;
    FOR_EACH_FLAT_PARAM(part, unit) {
        bool received = grads_have_received(&part->handle->grads);
        if (!unit->sync_gradients) {
            if (received && accumulate_unsharded(part) < 0)
                return -1;
            continue;
        }
        /* reduce all trainable segments: another rank may have received gradients where this one has none */
        int reduced = 1;
        if (unit->next_segment)
            reduced = runtime->reach == REACH_INPUTS_ONLY ? part->inputs_only
                      : received                          ? 1
                                                          : flat_param_is_trainable(&part->handle->param);
        if (reduced < 0 || (reduced && runtime_reduce_part(part) < 0))
            return -1;
    }
    if (unit->optional.enclosing || !is_exposed_at_once(unit))
        return 0;
    /* before the hooks on the flat parameter's accumulation node, which runs next: DistributedDataParallel
     * all-reduces the gradient there */
    if (runtime_finish_reduction(runtime) < 0 || schedule_wait_reduced(&runtime->schedule) < 0)
        return -1;
    FOR_EACH_FLAT_PARAM(part, unit)
        if (is_exposed_at_once(part) && grads_expose(&part->handle->grads) < 0)
            return -1;
    return 0;
}

/* Process all gradients that the unit has received. */
static int post_backward_with_gradients(struct unit *unit) {
    const struct flat_param *param = &unit->handle->param;
    OWNED *module = unit_module(unit);
    /* users find missing hooks in this log, under some kinds of checkpointing */
    if (param->verbose && param->use_orig_params && module &&
        callbacks_call(callbacks.log_post_backward, module, NULL) < 0)
        return -1;
    struct unit_nesting *nesting = &unit->nesting;
    int64_t current = unit->ran_pre_backward ? torch_graph_task() : nesting->graph_task;
    if (current == -2)
        return -1;
    nesting->nested = nesting->nested || current != nesting->graph_task;
    nesting->can_nest = nesting->nested;
    if (current == nesting->graph_task)
        return unit->optional.reached && optional_reduce(unit) < 0 ? -1 : post_backward(unit);
    nesting->awaits_input_grads = !nesting->anchor_will_run;
    if (nesting->awaits_input_grads)
        return 0;
    /* The anchor's hook runs again in the outer backward, which delivers the other gradients and reads the
     * parameters until then. */
    FOR_EACH_FLAT_PARAM(part, unit) {
        struct grads *grads = &part->handle->grads;
        if (grads_have_received(grads) &&
            (grads_call_param_hooks(grads) < 0 || accumulate_unsharded(part) < 0))
            return -1;
    }
    return 0;
}

/* Runs on the anchor's stream, usually that of the first forward. The gradients are memory of the stream that
 * the backward used, which stream_follow() waits for. */
int unit_post_backward(void *target) {
    struct unit *unit = target;
    OWNED *object = Py_NewRef(unit->object); /* the anchor's hook does not own the unit */
    if (!unit->runtime)
        return 0;
    if (stream_follow(&unit->runtime->schedule.streams) < 0)
        return -1;
    if (unit->handle && has_received(unit)) {
        unit->had_gradient = true;
        bool enabled = torch_grad_enabled();
        TRACE(TRACED_POST_BACKWARD, unit->name_index);
        torch_set_grad_enabled(false);
        int result = post_backward_with_gradients(unit);
        torch_set_grad_enabled(enabled);
        if (result < 0)
            return -1;
    }
    return unit->runtime ? stream_join_former(&unit->runtime->schedule.streams) : 0;
}

/* Process the gradients of checkpointed parts: see [Note: checkpoints inside a unit]. */
int unit_post_backward_of_parts(void *target) {
    struct unit *unit = target;
    if (!unit->nesting.awaits_input_grads)
        return 0;
    unit->nesting.awaits_input_grads = false;
    unit->nesting.graph_task = torch_graph_task();
    return unit_post_backward(unit);
}

int unit_reshard_only(void *target) {
    struct unit *unit = target;
    if (!unit->runtime || !unit->handle || unit->handle->training_state != USE_BACKWARD_PRE)
        return 0;
    TRACE(TRACED_POST_BACKWARD_RESHARD_ONLY, unit->name_index);
    if (unit_set_training_state(unit, USE_BACKWARD_POST) < 0)
        return -1;
    return operations_post_backward_reshard(unit);
}

/* ---- the end of a backward ---- */

/* Reset after a backward that raised: its callback is destroyed with the graph task. Autograd's own thread
 * does that on a GPU, perhaps when another backward with a callback of its own is running. */
static int backward_raised(void *target, const void *hook) {
    struct runtime *runtime = target;
    return runtime->callback_queued && runtime->final_hook == hook ? runtime_reset(runtime) : 0;
}

int runtime_queue_final_callback(struct runtime *runtime) {
    if (runtime->callback_queued)
        return 0;
    struct schedule *schedule = &runtime->schedule;
    /* An optimizer may have stepped since the last backward, without a forward in between. */
    if (runtime_check_state_dict_thread(runtime) < 0 || runtime_collect_user_grads(runtime) < 0 ||
        (schedule->backward_ended && schedule_begin_step(schedule) < 0))
        return -1;
    OWNED *hook = hook_new(runtime_final_callback, runtime, runtime->object);
    runtime->final_hook = hook;
    if (!hook)
        return -1;
    hook_set_on_drop(hook, backward_raised);
    if (ref_done(PyObject_CallFunctionObjArgs(torch_names.queue_callback, hook, NULL)) < 0)
        return -1;
    runtime->graph_task = torch_graph_task();
    if (runtime->graph_task == -2)
        return -1;
    runtime->callback_queued = true;
    runtime->reach = REACH_UNKNOWN;
    runtime->create_graph = torch_grad_enabled();
    return 0;
}

static int finalise_units(struct runtime *runtime) {
    bool offloads = false;
    /* a backward to named leaves ran no anchor: see [Note: flat parameters in the graph] */
    for (int64_t i = runtime->num_units - 1; i >= 0 && runtime->reach == REACH_INPUTS_ONLY; i--) {
        PyObject *hook = runtime->units[i]->node.anchor_hook;
        if (hook && ref_done(PyObject_CallNoArgs(hook)) < 0)
            return -1;
    }
    for (int64_t i = runtime->num_units - 1; i >= 0; i--)
        if (unit_post_backward_of_parts(runtime->units[i]) < 0)
            return -1;
    if (runtime_finish_reduction(runtime) < 0 || optional_reduce_all(runtime) < 0)
        return -1;
    FOR_EACH_UNIT(unit, runtime) {
        if (!unit->handle)
            continue;
        offloads = offloads || unit->handle->storage.offload;
        /* Reduce no_sync gradients of a unit that this synchronised backward did not reach: an optimizer may
         * step next. A callback that the user calls by hand issues no collective. */
        struct grads *grads = &unit->handle->grads;
        if (!runtime->callback_queued || runtime->num_in_forward || !unit->sync_gradients ||
            !grads->unreduced || unit_of_part(unit)->optional.enclosing)
            continue;
        if (grads_begin_backward(grads) < 0)
            return -1;
        if (grads->unreduced && /* not cleared by the user */
            (runtime_reduce_part(unit) < 0 || runtime_finish_reduction(runtime) < 0))
            return -1;
    }
    if (schedule_wait_reduced(&runtime->schedule) < 0 || runtime_reshard_units(runtime) < 0)
        return -1;
    /* an optimizer on the CPU may step next */
    if (offloads && schedule_synchronize(&runtime->schedule) < 0)
        return -1;
    FOR_EACH_UNIT(unit, runtime) {
        struct handle *handle = unit->handle;
        if (!unit_ends_with_backward(unit))
            continue;
        if (unit_remove_input_hooks(unit) < 0)
            return -1;
        if (handle &&
            (unit_wait_step(unit) < 0 || (handle->grads.in_backward && grads_expose(&handle->grads) < 0) ||
             grads_restore_param_hooks(&handle->grads) < 0 ||
             handle_set_training_state(handle, USE_IDLE) < 0))
            return -1;
        if (unit_end_step(unit) < 0)
            return -1;
    }
    return 0;
}

int runtime_final_callback(void *target) {
    struct runtime *runtime = target;
    bool ends_step = runtime->callback_queued && !runtime->num_in_forward;
    bool enabled = torch_grad_enabled();
    torch_set_grad_enabled(false);
    int result = finalise_units(runtime) < 0 ? -1 : schedule_end_backward(&runtime->schedule);
    torch_set_grad_enabled(enabled);
    if (result < 0)
        return -1;
    if (!runtime->num_in_forward) {
        if (runtime_record_kept(runtime) < 0)
            return -1;
        order_next_iteration(&runtime->order);
        progress.step = progress.step + 1;
        progress_leave(0);
    }
    runtime->callback_queued = false;
    if (!runtime->num_in_forward)
        CHECKED(runtime_check(runtime));
    runtime->ended_backward = true;
    if (!ends_step || !runtime->checks_next_backward)
        return 0;
    OWNED *module = unit_module(runtime->units[0]);
    if (module && callbacks_call(callbacks.check_backward, module, NULL) < 0)
        return -1; /* check the next backward as well */
    runtime->checks_next_backward = false;
    return 0;
}
