/* A unit in backward: what its hooks do (D-050 to D-088). */
#include "runtime/callbacks.h"
#include "runtime/operations.h"
#include "runtime/runtime.h"
#include "torch/names.h"

/* ---- pre-backward ---- */

static int prepare_part(struct unit *part) {
    struct handle *handle = part->handle;
    /* a checkpointed part of the module may run again in this backward: it finds the same views as in the forward */
    if (handle->param.use_orig_params && handle_show_views(handle) < 0)
        return -1;
    return gradients_prepare(&handle->gradients);
}

static int prepare(struct unit *unit) {
    if (unit_unshard_for_backward(unit) < 0)
        return -1;
    if (!unit->handle)
        return 0;
    FOR_PARTS(part, unit)
        if (prepare_part(part) < 0)
            return -1;
    return 0;
}

/* Gathered for this backward already; unless its gradients have come since and this is another graph over it, as reentrant
 * checkpointing makes them: then it is gathered again (parity 26). */
static bool is_prepared(const struct unit *unit) {
    bool done = unit->handle && unit->handle->training_state == USE_BACKWARD_POST;
    return unit->ran_pre_backward && !done;
}

static int pre_backward(struct unit *unit) {
    /* whoever is outermost in this backward has it finalised (parity 12) */
    if (runtime_queue_final_callback(unit->runtime) < 0)
        return -1;
    if (unit_set_phase(unit, PHASE_IN_STEP) < 0)
        return -1;
    if (prepare(unit) < 0)
        return -1;
    unit->ran_pre_backward = true;
    unit->left_out = false;
    return 0;
}

int unit_pre_backward(struct unit *unit) {
    if (!unit->runtime)
        return 0;
    if (is_prepared(unit)) /* perhaps for a forward under another stream: this one has not waited for the gather */
        return stream_follow(&unit->runtime->schedule.streams);
    struct trace trace = trace_begin(TRACED_PRE_BACKWARD, unit->recorder_index);
    int result = pre_backward(unit);
    trace_end(trace);
    return result;
}

/* ---- post-backward ---- */

static int reduce(struct unit *unit) {
    struct runtime *runtime = unit->runtime;
    if (runtime_finish_reduction(runtime) < 0 || runtime->operations->post_backward_reshard(unit) < 0)
        return -1;
    return runtime_pack(runtime, unit) < 0 ? -1 : runtime_reduce(runtime, unit);
}

static int keep_unsharded(struct unit *unit) {
    if (unit->runtime->operations->post_backward_reshard(unit) < 0)
        return -1;
    return gradients_accumulate_unsharded(&unit->handle->gradients);
}

/* A hook of the user's has set the flat parameter's `.grad` to None. */
static int post_backward_without_gradient(struct unit *unit) {
    struct handle *handle = unit->handle;
    if (!unit->sync_gradients || !handle->param.sharded || handle->gradients.saved_shard)
        return unit->runtime->operations->post_backward_reshard(unit);
    PyErr_Format(
        PyExc_AssertionError,
        "rank %lld, unit %S: a hook of its flat parameter has set .grad to None before the gradient was reduced, "
        "which the other ranks wait for: zero the gradient instead, or clear it after backward()",
        (long long)handle->param.layout.rank, unit->name);
    return -1;
}

/* What has come is reduced with the unit around it, or added up under no_sync. */
static int post_backward_of_optional(struct unit *part) {
    if (optional_check_backward(part->leader ? part->leader : part) < 0)
        return -1;
    bool keeps = !part->sync_gradients && gradients_have_new(&part->handle->gradients);
    return keeps ? keep_unsharded(part) : part->runtime->operations->post_backward_reshard(part);
}

static int post_backward(struct unit *unit) {
    struct handle *handle = unit->handle;
    if (runtime_queue_final_callback(unit->runtime) < 0)
        return -1;
    if (handle_set_training_state(handle, USE_BACKWARD_POST) < 0 || gradients_prepare(&handle->gradients) < 0)
        return -1;
    if (gradients_call_param_hooks(&handle->gradients) < 0)
        return -1;
    if (unit_around(unit))
        return post_backward_of_optional(unit);
    if (!gradients_have_new(&handle->gradients))
        return post_backward_without_gradient(unit);
    return unit->sync_gradients ? reduce(unit) : keep_unsharded(unit);
}

/* Helps to find out which hooks do not run, under some ways of checkpointing (D-065). */
static int log_post_backward(const struct unit *unit) {
    PyObject *module = PyWeakref_GetObject(unit->module_ref);
    if (!unit->handle->param.use_orig_params || !module || module == Py_None)
        return 0;
    return callbacks_tell(callbacks.log_post_backward, module, NULL);
}

int unit_post_backward(struct unit *unit) {
    if (!unit->runtime || !unit->handle || !gradients_have_new(&unit->handle->gradients))
        return 0;
    bool enabled = torch_grad_enabled();
    struct trace trace = trace_begin(TRACED_POST_BACKWARD, unit->recorder_index);
    torch_set_grad_enabled(false);
    int result = unit->handle->param.verbose ? log_post_backward(unit) : 0;
    if (!result && unit->optional.reached)
        result = runtime_reduce_optional(unit);
    if (!result)
        result = post_backward(unit);
    torch_set_grad_enabled(enabled);
    trace_end(trace);
    return result;
}
