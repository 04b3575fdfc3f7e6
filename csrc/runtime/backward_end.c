/* The end of a backward: the reduction in flight, the gradients, the parameters. */
#include "runtime/callbacks.h"
#include "runtime/hook.h"
#include "runtime/runtime.h"
#include "torch/names.h"

#include "base/check.h"

/* The callback goes with the backward it was queued in, called or not. On a GPU autograd's own thread lets go
 * of that, which may be once another backward runs: its callback is not this one. */
static int backward_raised(void *target, const void *hook) {
    struct runtime *runtime = target;
    return runtime->callback_queued && runtime->final_hook == hook ? runtime_reset(runtime) : 0;
}

int runtime_queue_final_callback(struct runtime *runtime) {
    if (runtime->callback_queued)
        return 0;
    struct schedule *schedule = &runtime->schedule;
    /* An optimizer may have stepped since a backward that came before without a forward in between. */
    if (runtime_check_holder(runtime) < 0 || runtime_collect_user_grads(runtime) < 0 ||
        (schedule->has_ended && schedule_begin_step(schedule) < 0))
        return -1;
    OWNED *hook = hook_new(runtime_final_callback, runtime, runtime->object);
    runtime->final_hook = hook;
    if (!hook)
        return -1;
    hook_on_drop(hook, backward_raised);
    if (ref_done(PyObject_CallFunctionObjArgs(torch_names.queue_callback, hook, NULL)) < 0)
        return -1;
    runtime->graph_task = torch_graph_task();
    if (runtime->graph_task == -2)
        return -1;
    runtime->callback_queued = true;
    runtime->reach = REACH_UNKNOWN;
    runtime->graph_goes_on = torch_grad_enabled();
    return 0;
}

void runtime_set_reach(struct runtime *runtime, enum backward_reach reach) {
    runtime->reach = reach;
}

static int finalise_handle(struct unit *unit) {
    struct handle *handle = unit->handle;
    if (unit_await_step(unit) < 0)
        return -1;
    if (handle->gradients.in_backward && gradients_hand_over(&handle->gradients) < 0)
        return -1;
    if (gradients_show_param_hooks(&handle->gradients) < 0)
        return -1;
    return handle_set_training_state(handle, USE_IDLE);
}

/* A synchronised backward that did not pass through a unit leaves nothing of its no_sync gradients unreduced
 * either: an optimizer may step next. Where the user calls the callback by hand, nothing is sent. */
static int reduce_left_over(struct runtime *runtime, struct unit *unit) {
    if (!runtime->callback_queued || !unit->handle || !unit->sync_gradients ||
        !unit->handle->gradients.unreduced || unit_of_part(unit)->optional.enclosing)
        return 0;
    if (gradients_prepare(&unit->handle->gradients) < 0 || !unit->handle->gradients.unreduced)
        return PyErr_Occurred() ? -1 : 0;
    return runtime_reduce_part(unit) < 0 ? -1 : runtime_finish_reduction(runtime);
}

static bool offloads(const struct runtime *runtime) {
    for (int64_t i = 0; i < runtime->num_units; i++)
        if (runtime->units[i]->handle && runtime->units[i]->handle->storage.offload)
            return true;
    return false;
}

/* The backward was to named leaves, among which no anchor is: see [Note: flat parameters in the graph]. */
static int end_named(struct runtime *runtime) {
    for (int64_t i = runtime->num_units - 1; i >= 0 && runtime->reach == REACH_NAMED; i--) {
        PyObject *hook = runtime->units[i]->anchor_hook;
        if (hook && ref_done(PyObject_CallNoArgs(hook)) < 0)
            return -1;
    }
    return 0;
}

static int finalise_units(struct runtime *runtime) {
    if (end_named(runtime) < 0 || runtime_finish_reduction(runtime) < 0 ||
        runtime_reduce_all_optional(runtime) < 0)
        return -1;
    for (int64_t i = 0; i < runtime->num_units && !runtime->num_in_forward; i++)
        if (reduce_left_over(runtime, runtime->units[i]) < 0)
            return -1;
    if (schedule_wait_reduced(&runtime->schedule) < 0 || runtime_reshard_units(runtime) < 0)
        return -1;
    /* an optimizer on the CPU may step next */
    if (offloads(runtime) && schedule_synchronize(&runtime->schedule) < 0)
        return -1;
    for (int64_t i = 0; i < runtime->num_units; i++) {
        struct unit *unit = runtime->units[i];
        if (!unit_ends_with_backward(unit))
            continue;
        if (unit_unwatch_inputs(unit) < 0 || (unit->handle && finalise_handle(unit) < 0) ||
            unit_end_step(unit) < 0)
            return -1;
    }
    return 0;
}

static int end_backward(struct runtime *runtime) {
    bool enabled = torch_grad_enabled();
    torch_set_grad_enabled(false);
    int result = finalise_units(runtime) < 0 ? -1 : schedule_end_backward(&runtime->schedule);
    torch_set_grad_enabled(enabled);
    if (result < 0)
        return -1;
    if (!runtime->num_in_forward) {
        if (runtime_note_kept(runtime) < 0)
            return -1;
        order_next_iteration(&runtime->order);
        trace_end_step();
    }
    runtime->callback_queued = false;
    if (!runtime->num_in_forward)
        CHECKED(runtime_check(runtime));
    return 0;
}

static int check_backward(struct runtime *runtime) {
    PyObject *module = PyWeakref_GetObject(runtime->units[0]->module_ref);
    if (module && module != Py_None && callbacks_tell(callbacks.check_backward, module, NULL) < 0)
        return -1; /* the next backward is looked at as well */
    runtime->unchecked = false;
    return 0;
}

int runtime_final_callback(void *target) {
    struct runtime *runtime = target;
    bool ends_step = runtime->callback_queued && !runtime->num_in_forward;
    bool tells = ends_step && !runtime->told_of_no_gradient;
    OWNED *cut_off = tells ? runtime_take_cut_off(runtime) : Py_NewRef(Py_None);
    /* told when all is in order again: a warning may be made an error */
    if (!cut_off || end_backward(runtime) < 0 || runtime_tell_of_cut_off(runtime, cut_off) < 0)
        return -1;
    return ends_step && runtime->unchecked ? check_backward(runtime) : 0;
}
