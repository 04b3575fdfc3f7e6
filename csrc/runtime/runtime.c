/* Lifecycle of a root, start of its step, scripts that iterate over its parameters, and its thread. */
#include "runtime/runtime.h"

#include "runtime/callbacks.h"
#include "torch/py_torch.h"

#include "base/check.h"

/* ---- init and fini ---- */

int runtime_init(struct runtime *runtime, PyObject *object, PyObject *unit_objects, struct unit **units) {
    size_t count = (size_t)PyTuple_Size(unit_objects);
    runtime->object = object;
    runtime->unit_objects = Py_NewRef(unit_objects);
    runtime->units = PyMem_Calloc(count + 1, sizeof *runtime->units);
    if (!runtime->units) {
        PyErr_NoMemory();
        return -1;
    }
    if (order_init(&runtime->order, (int64_t)count) < 0)
        return -1;
    for (size_t i = 0; i < count; i++) {
        struct unit *unit = units[i];
        if (unit->handle && handle_follow_flat_param(unit->handle) < 0)
            return -1;
        unit->is_root = i == 0;
        unit->runtime = runtime;
        unit->runtime_object = Py_NewRef(object);
        unit->place = (struct order_place){.unit = (int64_t)i, .pre_forward = -1, .post_forward = -1};
        runtime->units[runtime->num_units++] = unit;
    }
    /* the streams belong to the device of the first unit with parameters */
    struct schedule *schedule = &runtime->schedule;
    const struct handle *first = count ? unit_handle_or_first(units[0]) : NULL;
    if (first && schedule_init(schedule, first->param.device) < 0)
        return -1;
    FOR_EACH_UNIT(unit, runtime)
        if (unit->handle && streams_are_real(&schedule->streams))
            storage_share(&unit->handle->storage, &schedule->unsharded, &schedule->pool, unit->leader);
    return 0;
}

int runtime_clear(struct runtime *runtime) {
    if (schedule_begin_step(&runtime->schedule) < 0 || schedule_flush(&runtime->schedule) < 0)
        PyErr_WriteUnraisable(runtime->object);
    /* Return the units to their state before lazy init: units outlive their runtime if lazy init fails
     * half-way. Unsharded storage is freed with its handle, after the computation on it. */
    FOR_EACH_UNIT(unit, runtime) {
        stream_event_destroy(&runtime->schedule.streams, &unit->unsharded.mark.gathered);
        if (unit->handle)
            storage_leave_root(&unit->handle->storage);
        unit->runtime = NULL;
        unit->is_root = false;
        unit->optional = (struct optional){0};
        Py_CLEAR(unit->runtime_object);
    }
    runtime->num_units = 0;
    schedule_fini(&runtime->schedule);
    order_fini(&runtime->order);
    PyMem_Free(runtime->units);
    runtime->units = NULL;
    Py_CLEAR(runtime->unit_objects);
    return 0;
}

int runtime_release(struct runtime *runtime) {
    FOR_EACH_UNIT(unit, runtime)
        if (unit->handle &&
            (storage_reshard(&unit->handle->storage, true) < 0 || handle_expose_sharded(unit->handle) < 0))
            return -1;
    return runtime_clear(runtime);
}

int runtime_visit(struct runtime *runtime, visitproc visit, void *arg) {
    Py_VISIT(runtime->unit_objects);
    return 0;
}

/* ---- DistributedDataParallel around the root ---- */

/* Record the active DDP around the root, and enable edges to flat parameters. DDP averages gradients of
 * unsharded flat parameters, by hooks that run after the anchor's. */
static int record_ddp(struct runtime *runtime) {
    PyObject *ddp = torch_active_ddp();
    int result = 0;
    if (ddp != Py_None && runtime->ddp != ddp) {
        OWNED *module = unit_module(runtime->units[0]);
        result = module ? callbacks_call(callbacks.check_ddp, module, ddp) : 0;
    }
    runtime->ddp = result < 0 || ddp == Py_None ? NULL : ddp;
    Py_XDECREF(ddp);
    if (result < 0 || runtime->has_edges)
        return result;
    /* Enable edges from the first forward in which DDP or a pipeline may read flat parameters: see [Note:
     * flat parameters in the graph] in backward.c. */
    OWNED *name = PyUnicode_FromString("torch.distributed.pipelining");
    PyObject *module = name ? PyDict_GetItemWithError(PyImport_GetModuleDict(), name) : NULL;
    runtime->has_edges = module || runtime->ddp;
    return PyErr_Occurred() ? -1 : 0;
}

/* ---- the start of a step ---- */

int runtime_collect_user_grads(struct runtime *runtime) {
    FOR_EACH_UNIT(unit, runtime)
        if (unit->handle && handle_collect_user_grads(unit->handle) < 0)
            return -1;
    return 0;
}

/* Warn once about units whose trainable parameters never receive a gradient: those that have run in training
 * mode, if a backward has ended since. The root's next forward warns, because another backward may reach the
 * unit before that, as in a GAN. A unit that has had a gradient before is assumed to be skipped on purpose,
 * as alternating heads are. Return 0 or -1. */
static int warn_no_gradient(struct runtime *runtime) {
    OWNED *names = NULL;
    FOR_EACH_UNIT(unit, runtime) {
        bool lacks_gradient = unit->expects_gradient && runtime->ended_backward && !unit->had_gradient;
        unit->expects_gradient = false;
        if (lacks_gradient && !runtime->warned_no_gradient &&
            ((!names && !(names = PyList_New(0))) || PyList_Append(names, unit->handle->param.name) < 0))
            return -1;
    }
    runtime->ended_backward = false;
    OWNED *module = names ? unit_module(runtime->units[0]) : NULL;
    if (!module)
        return 0;
    runtime->warned_no_gradient = true;
    return callbacks_call(callbacks.warn_of_units_without_gradient, module, names);
}

int runtime_pre_forward(struct runtime *runtime) {
    struct unit *root = runtime->units[0];
    OWNED *module = unit_module(root);
    TRACE(TRACED_ROOT_PRE_FORWARD, root->name_index);
    if (module && root->options.full_precision_in_eval && /* buffers follow the mode too */
        callbacks_call(callbacks.cast_buffers_for_mode, module, NULL) < 0)
        return -1;
    if (runtime_check_state_dict_thread(runtime) < 0)
        return -1;
    runtime->grad_enabled = torch_grad_enabled();
    if (record_ddp(runtime) < 0 || warn_no_gradient(runtime) < 0 || runtime_check_kept(runtime) < 0 ||
        runtime_reshard_stale(runtime) < 0)
        return -1;
    if (schedule_begin_step(&runtime->schedule) < 0 || runtime_reserve(runtime) < 0)
        return -1;
    return runtime_collect_user_grads(runtime);
}

/* The script has called a unit outside of the root's forward. */
int runtime_begin_step_alone(struct runtime *runtime) {
    if (runtime->units[0]->phase != PHASE_IDLE)
        return 0;
    return runtime_check_kept(runtime) < 0 ? -1 : schedule_begin_step(&runtime->schedule);
}

void runtime_enter_forward(struct runtime *runtime) {
    if (runtime->num_in_forward++ || runtime->callback_queued)
        return;
    runtime->num_forwards++;
    runtime->forward_thread = PyThread_get_thread_ident();
}

void runtime_leave_forward(struct runtime *runtime) {
    if (--runtime->num_in_forward == 0)
        stream_record_external_end(&runtime->schedule.streams);
}

/* ---- scripts that iterate over the parameters ---- */

bool unit_exposes_views(struct unit *part) {
    const struct unit *unit = unit_of_part(part);
    return part->handle && handle_keeps_views_exposed(part->handle) &&
           part->handle->param_views.exposed == EXPOSED_VIEWS && unit->phase == PHASE_IDLE &&
           part->handle->training_state == USE_IDLE && unit->unsharded.for_forward != FOR_NEXT_FORWARD;
}

int runtime_begin_walk(struct runtime *runtime) {
    if (runtime_wait_failed_backward(runtime) < 0)
        return -1;
    if (runtime->num_in_forward || runtime->callback_queued)
        return 0;
    FOR_EACH_UNIT(unit, runtime) {
        struct handle *handle = unit->handle;
        if (!handle)
            continue;
        if (!handle->param.use_orig_params) {
            if (param_views_restore_attributes(&handle->param_views, handle->storage.copy->views) < 0)
                return -1;
        } else if (unit_exposes_views(unit) && !handle->param.skip_writeback_check &&
                   handle->storage.param_state == PARAM_UNSHARDED &&
                   storage_take_snapshot(&handle->storage) < 0) {
            return -1;
        }
    }
    return 0;
}

/* ---- one thread at a time ---- */

/* A state dict, or a read of full parameters, in one thread during another thread's step would mistake that
 * step for a failed backward and reset it. Such calls are rejected before they change anything, and so is a
 * step that begins during another thread's state dict. The check runs once per step: the forward of an inner
 * unit alone has none. */

static int refuse(const struct runtime *runtime, const char *doing) {
    if (!runtime->num_units)
        return 0;
    return unit_error(PyExc_RuntimeError, unit_rank(runtime->units[0]), runtime->units[0]->name,
                      "another thread is inside %s of this model, and no other call can use its parameters "
                      "until that is done. The other thread is not affected. Wait for it, for example with a "
                      "lock, or give each thread its own model.",
                      doing);
}

/* Autograd's own thread, which runs the backward on a GPU, counts as the forward's thread. */
static bool is_stepped_by_other_thread(const struct runtime *runtime) {
    return runtime->forward_thread != PyThread_get_thread_ident() && torch_graph_task() < 0;
}

int runtime_check_thread(const struct runtime *runtime) {
    bool is_stepped = runtime->num_in_forward || runtime->callback_queued;
    return is_stepped && is_stepped_by_other_thread(runtime) ? refuse(runtime, "a forward or backward")
                                                             : runtime_check_state_dict_thread(runtime);
}

int runtime_check_forward_thread(const struct runtime *runtime) {
    return runtime->num_in_forward && is_stepped_by_other_thread(runtime) ? refuse(runtime, "a forward") : 0;
}

int runtime_check_state_dict_thread(const struct runtime *runtime) {
    bool is_free = !runtime->state_dict_thread || runtime->state_dict_thread == PyThread_get_thread_ident();
    return is_free ? 0 : refuse(runtime, "a state dict");
}

int runtime_begin_state_dict(struct runtime *runtime) {
    if (runtime_check_thread(runtime) < 0)
        return -1;
    bool is_nested = runtime->state_dict_thread;
    runtime->state_dict_thread = PyThread_get_thread_ident();
    return !is_nested;
}

void runtime_end_state_dict(struct runtime *runtime) {
    runtime->state_dict_thread = 0;
}

/* ---- the invariant between steps ---- */

void runtime_check(const struct runtime *runtime) {
    INVARIANT(!runtime->callback_queued && !runtime->reducing && !runtime->resetting &&
              !runtime->num_in_forward);
    const struct order *order = &runtime->order;
    INVARIANT(order->num_pre <= order->num_units && order->num_post == 0);
    INVARIANT(order->backward_prefetch_limit >= 0 && order->forward_prefetch_limit >= 0);
    const struct schedule *schedule = &runtime->schedule;
    schedule_check(schedule);
    INVARIANT(schedule->reduction == REDUCTION_NONE && !schedule->packed_gradients && !schedule->reducing &&
              !schedule->all_reducing && !schedule->scattered_output && !schedule->stepped_gradient &&
              !schedule->uploading && !schedule->unsharded.held);
    FOR_EACH_UNIT(unit, runtime) {
        const struct handle *handle = unit->handle;
        INVARIANT(unit->phase != PHASE_IN_STEP && !unit->ran_pre_backward &&
                  !unit->needs_pre_backward_unshard);
        INVARIANT(!unit->unsharded.prefetched && !unit->unsharded.mark.pending);
        INVARIANT(!unit->remove_input_hooks && !unit->nesting.awaits_input_grads && !unit->stepping);
        INVARIANT(!unit->optional.open && !unit->optional.reached);
        INVARIANT(!unit->optional.enclosing || !unit->optional.first);
        int64_t place = unit->place.pre_forward;
        INVARIANT(unit->place.post_forward == -1);
        INVARIANT(place == -1 || (place < order->num_pre && order->pre[place] == unit->place.unit));
        INVARIANT(!handle || handle->training_state == USE_IDLE ||
                  handle->training_state == USE_SUMMON_FULL_PARAMS);
        INVARIANT(!handle || (!handle->grads.in_backward && !handle->grads.pending && !handle->grads.work));
        INVARIANT(!handle || handle->storage.param_state != PARAM_UNSHARDING);
        if (handle && handle->initialized)
            handle_check(handle);
    }
}
