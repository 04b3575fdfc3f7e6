/* A root's step: how it starts, how the gradients of one unit after the other are packed and reduced, of
 * which at most one is on its way, and how its backward ends. */
#include "runtime/callbacks.h"
#include "runtime/runtime.h"
#include "torch/names.h"

#include "base/check.h"

/* ---- DistributedDataParallel around the root ---- */

/* It averages the gradients of flat parameters that are whole on each rank, by hooks that come after the
 * anchor's. What it cannot average is said when the root's forward begins. */

/* Are the unit's parameters among those that it looks after, and trained? 1, 0 or -1. */
static int is_among(const struct flat_param *param, PyObject *managed) {
    PyObject *own = param->use_orig_params ? PyList_GetItem(param->params, 0) : param->tensor;
    for (Py_ssize_t i = 0; i < PyList_Size(managed); i++)
        if (PyList_GetItem(managed, i) == own)
            return flat_param_is_trainable(param);
    return 0;
}

static int check_part(const struct unit *part, PyObject *managed) {
    const struct flat_param *param = &part->handle->param;
    bool whole = !param->sharded && !part->handle->storage.offload;
    bool reached = !param->use_orig_params && !part->handle->storage.copies[PRECISION_COMPUTE].low_precision;
    int among = whole && reached ? 0 : is_among(param, managed);
    if (among <= 0)
        return among;
    if (param->use_orig_params || whole) /* torch trains on (parity 48) */
        return PyErr_WarnFormat(
            PyExc_UserWarning, 1,
            "rank %lld, unit %S: DistributedDataParallel never averages its gradients, as autograd does "
            "not reach %s: replicas drift apart. Use HYBRID_SHARD in place of DistributedDataParallel, "
            "or a group of one rank, use_orig_params=False and full precision",
            (long long)param->layout.rank, param->name,
            param->use_orig_params ? "original parameters" : "flat parameters of low precision");
    return flat_param_error(
        param, PyExc_RuntimeError,
        "DistributedDataParallel cannot average the gradient of its flat parameter, which "
        "is %s: use HYBRID_SHARD in place of DistributedDataParallel, or NO_SHARD without CPU "
        "offload",
        param->sharded ? "sharded, each rank's being of another part" : "offloaded");
}

static int note_ddp(struct runtime *runtime) {
    PyObject *ddp = torch_active_ddp();
    int result = 0;
    if (ddp != Py_None && runtime->ddp != ddp) {
        OWNED *managed = PyObject_GetAttr(ddp, torch_names._module_parameters);
        if (!managed)
            PyErr_Clear();
        bool is_list = managed && PyList_Check(managed);
        for (int64_t i = 0; is_list && !result && i < runtime->num_units; i++)
            result = runtime->units[i]->handle ? check_part(runtime->units[i], managed) : 0;
    }
    runtime->ddp = result < 0 || ddp == Py_None ? NULL : ddp;
    Py_XDECREF(ddp);
    if (result < 0 || runtime->has_edges)
        return result;
    /* From the first forward on in which somebody may look for flat parameters: see [Note: flat parameters in
     * the graph] in backward.c. */
    OWNED *name = PyUnicode_FromString("torch.distributed.pipelining");
    PyObject *module = name ? PyDict_GetItemWithError(PyImport_GetModuleDict(), name) : NULL;
    runtime->has_edges = module || runtime->ddp;
    return PyErr_Occurred() ? -1 : 0;
}

/* ---- units without a gradient ---- */

/* [Note: units without a gradient]
 * A unit that trains has run its forward, a backward has ended, and no gradient has come to the unit. It is
 * said once, of a root:
 *
 *   cut off   No gradient can come: none of the unit's outputs requires one, as inside a reentrant checkpoint
 *             where no input requires a gradient, behind frozen embeddings for instance. Or such a checkpoint
 *             ran the unit itself, without gradients, and has not run it again. This is said at the end of
 *             the first backward that left the unit out.
 *   left out  An output requires a gradient, and the backward did not pass through it. Another backward may
 *             yet do so, as in a GAN: this is said when the root begins its next forward and none has.
 *
 * A unit to which one has come before is on purpose without one now, as a head is that takes turns with
 * others. */
static bool is_told(const struct unit *unit) {
    return unit->runtime->told_of_no_gradient || !unit->handle || !unit->views_attached ||
           unit->optional.enclosing || unit->had_gradient;
}

static int cut_off(struct unit *unit) {
    int training = unit_is_training(unit);
    if (training < 0)
        return -1;
    unit->cut_off = training;
    unit->runtime->any_cut_off = unit->runtime->any_cut_off || training;
    return 0;
}

int unit_note_cut_off(struct unit *unit) {
    return is_told(unit) ? 0 : cut_off(unit);
}

/* Asked before the first backward alone: it looks at the frames on Python's stack. */
int unit_note_checkpointed(struct unit *unit) {
    if (unit->runtime->order.iteration > 0 || !unit->runtime->trains || unit->is_root || is_told(unit))
        return 0;
    OWNED *answer = PyObject_CallNoArgs(callbacks.is_in_reentrant_checkpoint);
    int checkpointed = answer ? PyObject_IsTrue(answer) : -1;
    return checkpointed > 0 ? cut_off(unit) : checkpointed;
}

/* New list of the names of the units that the backward could not reach, None where there is none, or NULL.
 * Those that it left out are noted. */
static PyObject *take_cut_off(struct runtime *runtime) {
    PyObject *names = runtime->any_cut_off ? PyList_New(0) : Py_NewRef(Py_None);
    for (int64_t i = 0; names && i < runtime->num_units; i++) {
        struct unit *unit = runtime->units[i];
        unit->left_out = unit->needs_pre_backward_unshard && !is_told(unit);
        runtime->any_left_out = runtime->any_left_out || unit->left_out;
        /* a module may hand its results out by another way than its outputs, and be reached after all */
        bool was_cut_off = unit->cut_off && unit->handle->training_state == USE_IDLE;
        if (was_cut_off && PyList_Append(names, unit->handle->param.name) < 0)
            Py_CLEAR(names);
    }
    runtime->any_cut_off = false;
    return names;
}

/* Warns, once. */
static int tell(struct runtime *runtime, PyObject *function, PyObject *names) {
    PyObject *module = PyWeakref_GetObject(runtime->units[0]->module_ref);
    if (!PyList_Size(names) || !module || module == Py_None)
        return 0;
    runtime->told_of_no_gradient = true;
    return callbacks_tell(function, module, names);
}

static int tell_of_left_out(struct runtime *runtime) {
    if (!runtime->any_left_out)
        return 0;
    runtime->any_left_out = false;
    OWNED *names = PyList_New(0);
    for (int64_t i = 0; names && i < runtime->num_units; i++) {
        struct unit *unit = runtime->units[i];
        /* whether it trains is asked now: most are never left out */
        int trains = unit->left_out ? unit_is_training(unit) : 0;
        unit->left_out = false;
        if (trains < 0 || (trains && PyList_Append(names, unit->handle->param.name) < 0))
            Py_CLEAR(names);
    }
    return names ? tell(runtime, callbacks.warn_of_units_left_out, names) : -1;
}

/* ---- start ---- */

int runtime_collect_user_grads(struct runtime *runtime) {
    for (int64_t i = 0; i < runtime->num_units; i++) {
        struct handle *handle = runtime->units[i]->handle;
        if (handle && handle_collect_user_grads(handle) < 0)
            return -1;
    }
    return 0;
}

int runtime_root_pre_forward(struct runtime *runtime) {
    if (runtime_check_holder(runtime) < 0)
        return -1;
    runtime->trains = torch_grad_enabled();
    if (note_ddp(runtime) < 0 || tell_of_left_out(runtime) < 0 || runtime_check_kept(runtime) < 0 ||
        runtime_reshard_stale(runtime) < 0)
        return -1;
    if (schedule_begin_step(&runtime->schedule) < 0 || runtime_reserve(runtime) < 0)
        return -1;
    return runtime_collect_user_grads(runtime);
}

void runtime_enter_forward(struct runtime *runtime) {
    if (runtime->num_in_forward++ || runtime->callback_queued)
        return;
    runtime->num_forwards++;
    runtime->forward_thread = PyThread_get_thread_ident();
}

void runtime_leave_forward(struct runtime *runtime) {
    if (--runtime->num_in_forward == 0)
        stream_note_end(&runtime->schedule.streams);
}

/* ---- reductions ---- */

/* Mostly the root is found at once, which is the first of the units and the last in backward: its gradients
 * are still to come. */
static bool is_last(const struct runtime *runtime) {
    for (int64_t i = 0; i < runtime->num_units; i++) {
        const struct unit *unit = runtime->units[i];
        if (unit->handle &&
            (unit->needs_pre_backward_unshard || unit->handle->training_state == USE_BACKWARD_PRE))
            return false;
    }
    return true;
}

static bool is_anything_gathered(const struct runtime *runtime) {
    for (int64_t i = 0; i < runtime->num_units; i++)
        if (runtime->units[i]->handle && runtime->units[i]->handle->storage.copy->full.allocated)
            return true;
    return false;
}

/* See schedule.h: the last reduction of a backward reads memory that lies idle then. */
static enum stream_role owner_of_input(const struct runtime *runtime, const struct gradients *gradients) {
    if (!is_last(runtime))
        return STREAM_POST_BACKWARD;
    bool has_room = pool_has_room(&runtime->schedule.pool, gradients_reduce_input_nbytes(gradients));
    return has_room && !is_anything_gathered(runtime) ? STREAM_UNSHARD : STREAM_COMPUTE;
}

/* Optimizers of the unit step as soon as its gradients are there (D-089). */
static int step_in_backward(struct unit *unit) {
    struct schedule *schedule = &unit->runtime->schedule;
    struct gradients *gradients = &unit->handle->gradients;
    int have_late = gradients_add_late(gradients, NULL);
    if (have_late < 0)
        return -1;
    unit->stepping = true;
    if (have_late) /* autograd has added what computation made */
        return schedule_wait_reduced(schedule) < 0 || gradients_hand_over(gradients) < 0
                   ? -1
                   : callbacks_tell(callbacks.step_in_backward, unit->handle_object, NULL);
    OWNED *gradient = Py_XNewRef(gradients->saved_shard);
    if (schedule_begin_stepping(schedule, gradients) < 0)
        return -1;
    int result = gradients_hand_over(gradients);
    if (!result)
        result = callbacks_tell(callbacks.step_in_backward, unit->handle_object, NULL);
    return schedule_end_stepping(schedule, gradients, gradient, result);
}

int runtime_finish_reduction(struct runtime *runtime) {
    struct unit *unit = runtime->reducing;
    runtime->reducing = NULL;
    if (!unit)
        return 0;
    {
        TRACE(TRACED_REDUCTION, unit->name_index);
        if (schedule_finish_reduction(&runtime->schedule, &unit->handle->gradients) < 0)
            return unit_explain_failure(unit, TRACED_REDUCTION, true);
    }
    return unit->handle->optimizer_in_backward ? step_in_backward(unit) : 0;
}

int runtime_reduce_part(struct unit *part) {
    struct runtime *runtime = part->runtime;
    struct gradients *gradients = &part->handle->gradients;
    if (runtime_finish_reduction(runtime) < 0 || gradients_receive_nothing(gradients) < 0)
        return -1;
    if (schedule_pack(&runtime->schedule, gradients, owner_of_input(runtime, gradients)) < 0)
        return unit_explain_failure(part, TRACED_REDUCTION, false);
    runtime->reducing = part;
    if (schedule_reduce(&runtime->schedule, gradients) < 0)
        return unit_explain_failure(part, TRACED_REDUCTION, false);
    return 0;
}

/* ---- of optional units ---- */

static int reduce_part(struct unit *part) {
    struct handle *handle = part->handle;
    optional_set_owes(part, false);
    if (handle_set_training_state(handle, USE_BACKWARD_POST) < 0 || gradients_prepare(&handle->gradients) < 0)
        return -1;
    return runtime_reduce_part(part);
}

/* Whether a unit ran, or has gradients, is not asked. */
int runtime_reduce_optional(struct unit *enclosing) {
    if (unit_reshard_optional(enclosing) < 0)
        return -1;
    for (struct unit *unit = enclosing->optional.first; unit; unit = unit->optional.next)
        FOR_PARTS(part, unit) {
            if (!part->optional.trains)
                continue;
            if (!part->sync_gradients)
                optional_set_owes(part, true);
            else if (reduce_part(part) < 0)
                return -1;
        }
    return 0;
}

static int reduce_all_optional(struct runtime *runtime) {
    for (int64_t i = 0; i < runtime->num_units && runtime->callback_queued; i++) {
        struct unit *unit = runtime->units[i];
        if (unit->optional.reached && runtime_reduce_optional(unit) < 0)
            return -1;
        /* the backward has not come to the unit around it */
        bool owes = !runtime->num_in_forward && unit->optional.owes && unit->sync_gradients;
        if (owes && reduce_part(unit) < 0)
            return -1;
    }
    return runtime_finish_reduction(runtime);
}

/* ---- end of a backward ---- */

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

/* The backward was to named leaves, among which no anchor is: see [Note: flat parameters in the graph]
 * in backward.c. */
static int end_named(struct runtime *runtime) {
    for (int64_t i = runtime->num_units - 1; i >= 0 && runtime->reach == REACH_NAMED; i--) {
        PyObject *hook = runtime->units[i]->anchor_hook;
        if (hook && ref_done(PyObject_CallNoArgs(hook)) < 0)
            return -1;
    }
    return 0;
}

static int finalise_units(struct runtime *runtime) {
    if (end_named(runtime) < 0 || runtime_finish_reduction(runtime) < 0 || reduce_all_optional(runtime) < 0)
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
    OWNED *cut_off = tells ? take_cut_off(runtime) : Py_NewRef(Py_None);
    /* told when all is in order again: a warning may be made an error */
    if (!cut_off || end_backward(runtime) < 0 ||
        (cut_off != Py_None && tell(runtime, callbacks.warn_of_units_cut_off, cut_off) < 0))
        return -1;
    return ends_step && runtime->unchecked ? check_backward(runtime) : 0;
}
