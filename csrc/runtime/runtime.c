/* A root: lazy init, the start of a step, its end, and the way back after an exception. */
#include "runtime/runtime.h"

#include <sched.h>
#include <string.h>
#include <time.h>

#include "runtime/hook.h"
#include "runtime/watch.h"
#include "torch/names.h"

/* ---- life ---- */

static int bind_unit(struct runtime *runtime, struct unit *unit, bool is_root) {
    if (unit->handle && handle_follow_flat_param(unit->handle) < 0)
        return -1;
    unit->is_root = is_root;
    unit->runtime = runtime;
    unit->runtime_object = Py_NewRef(runtime->object);
    unit->pre_forward_index = unit->post_forward_index = -1;
    return 0;
}

static void share(struct schedule *schedule, struct handle *handle) {
    struct storage *storage = &handle->storage;
    if (schedule)
        storage_share(storage, &schedule->unsharded, &schedule->inputs, &schedule->pool);
    else
        storage_share(storage, NULL, NULL, NULL);
}

/* The streams are those of the device where the first unit with parameters computes. */
static int init_schedule(struct runtime *runtime) {
    struct schedule *schedule = &runtime->schedule;
    int64_t first = 0;
    while (first < runtime->num_units && !runtime->units[first]->handle)
        first++;
    if (first == runtime->num_units)
        return 0;
    if (schedule_init(schedule, runtime->units[first]->handle->param.device) < 0)
        return -1;
    for (int64_t i = first; i < runtime->num_units && streams_are_real(&schedule->streams); i++)
        if (runtime->units[i]->handle)
            share(schedule, runtime->units[i]->handle);
    return 0;
}

int runtime_init(struct runtime *runtime, PyObject *object, PyObject *unit_objects, struct unit **units) {
    size_t count = (size_t)PyTuple_Size(unit_objects);
    runtime->object = object;
    runtime->unit_objects = Py_NewRef(unit_objects);
    runtime->units = PyMem_Calloc(count + 1, sizeof *runtime->units);
    runtime->pre_order = PyMem_Calloc(count + 1, sizeof *runtime->pre_order);
    runtime->post_order = PyMem_Calloc(count + 1, sizeof *runtime->post_order);
    if (!runtime->units || !runtime->pre_order || !runtime->post_order) {
        PyErr_NoMemory();
        return -1;
    }
    runtime->capacity = (int64_t)count + 1;
    runtime->backward_prefetch_limit = runtime->forward_prefetch_limit = 1;
    for (size_t i = 0; i < count; i++) {
        if (bind_unit(runtime, units[i], i == 0) < 0)
            return -1;
        runtime->units[runtime->num_units++] = units[i];
    }
    return init_schedule(runtime);
}

/* Units outlive their runtime when lazy init failed half-way: they are as before it. What is still gathered goes with its handle,
 * after all that was computed on it. */
static void unbind_units(struct runtime *runtime) {
    if (schedule_begin_step(&runtime->schedule) < 0 || schedule_settle(&runtime->schedule) < 0)
        PyErr_WriteUnraisable(runtime->object);
    for (int64_t i = 0; i < runtime->num_units; i++) {
        struct unit *unit = runtime->units[i];
        stream_event_destroy(&runtime->schedule.streams, &unit->gathered);
        if (unit->handle)
            share(NULL, unit->handle);
        unit->runtime = NULL;
        unit->is_root = false;
        Py_CLEAR(unit->runtime_object);
    }
    runtime->num_units = 0;
}

int runtime_clear(struct runtime *runtime) {
    unbind_units(runtime);
    schedule_fini(&runtime->schedule);
    order_check_free(runtime->order_check);
    runtime->order_check = NULL;
    PyMem_Free(runtime->units);
    PyMem_Free(runtime->pre_order);
    PyMem_Free(runtime->post_order);
    runtime->units = runtime->pre_order = runtime->post_order = NULL;
    Py_CLEAR(runtime->unit_objects);
    return 0;
}

int runtime_visit(struct runtime *runtime, visitproc visit, void *arg) {
    Py_VISIT(runtime->unit_objects);
    return 0;
}

void runtime_detach_views(struct runtime *runtime) {
    for (int64_t i = 0; i < runtime->num_units; i++)
        if (unit_detach_views(runtime->units[i]) < 0)
            PyErr_WriteUnraisable(runtime->units[i]->name);
}

/* ---- start of a step ---- */

int runtime_collect_user_grads(struct runtime *runtime) {
    for (int64_t i = 0; i < runtime->num_units; i++) {
        struct handle *handle = runtime->units[i]->handle;
        if (handle && handle_collect_user_grads(handle) < 0)
            return -1;
    }
    return 0;
}

/* Is autograd running a backward in this thread? */
static int in_backward(void) {
    static PyObject *graph_task_id; /* owned for ever */
    if (!graph_task_id) {
        PyObject *module = PyImport_ImportModule("torch._C");
        graph_task_id = module ? PyObject_GetAttrString(module, "_current_graph_task_id") : NULL;
        Py_XDECREF(module);
    }
    PyObject *id = graph_task_id ? PyObject_CallNoArgs(graph_task_id) : NULL;
    int result = id ? PyLong_AsLong(id) != -1 : -1;
    Py_XDECREF(id);
    return result;
}

/* A queued callback outside of any backward means that the last backward raised: what it left is dropped. */
int runtime_reset_after_failed_backward(struct runtime *runtime) {
    if (!runtime->callback_queued)
        return 0;
    int running = in_backward();
    if (running)
        return running < 0 ? -1 : 0;
    return runtime_reset(runtime);
}

/* On a GPU the error reaches the script before autograd's own thread lets go of the backward, which takes it no longer than to get
 * the interpreter's lock. Amid a backward of another thread nothing is let go of, so that the wait has an end. */
int runtime_await_failed_backward(const struct runtime *runtime) {
    const struct timespec moment = {.tv_nsec = 100 * 1000};
    if (!streams_are_real(&runtime->schedule.streams) || !(runtime->callback_queued || runtime->resetting))
        return 0;
    int running = in_backward();
    for (int i = 0; i < 500 && !running && (runtime->callback_queued || runtime->resetting); i++) {
        Py_BEGIN_ALLOW_THREADS nanosleep(&moment, NULL);
        Py_END_ALLOW_THREADS
    }
    return running < 0 ? -1 : 0;
}

int runtime_root_pre_forward(struct runtime *runtime) {
    runtime->trains = torch_grad_enabled();
    if (runtime_tell_of_left_out(runtime) < 0)
        return -1;
    if (schedule_begin_step(&runtime->schedule) < 0 || schedule_reserve(runtime) < 0)
        return -1;
    return runtime_collect_user_grads(runtime);
}

/* ---- end of a backward ---- */

static int final_callback(void *target) {
    return runtime_final_callback(target);
}

/* The callback goes with the backward it was queued in, called or not. On a GPU autograd's own thread lets go of that, which may be
 * once another backward runs: its callback is not this one. */
static int backward_raised(void *target, const void *hook) {
    struct runtime *runtime = target;
    return runtime->callback_queued && runtime->final_hook == hook ? runtime_reset(runtime) : 0;
}

int runtime_queue_final_callback(struct runtime *runtime) {
    if (runtime->callback_queued)
        return 0;
    if (runtime_collect_user_grads(runtime) < 0)
        return -1;
    PyObject *hook = hook_new(final_callback, runtime, runtime->object);
    if (hook)
        hook_on_drop(hook, backward_raised);
    runtime->final_hook = hook;
    PyObject *done = hook ? PyObject_CallFunctionObjArgs(torch_names.queue_callback, hook, NULL) : NULL;
    Py_XDECREF(hook);
    Py_XDECREF(done);
    if (!done)
        return -1;
    runtime->callback_queued = true;
    return 0;
}

/* Optimizers that users attached to original parameters step as soon as the unit's gradients are there (D-089). */
static int step_in_backward(struct unit *unit) {
    struct schedule *schedule = &unit->runtime->schedule;
    if (schedule_wait_reduced(schedule) < 0 || (unit->handle->storage.offload && schedule_synchronize(schedule) < 0))
        return -1;
    if (gradients_hand_over(&unit->handle->gradients) < 0)
        return -1;
    unit->stepped_in = schedule->num_begins;
    PyObject *done = PyObject_CallMethod(unit->handle_object, "step_in_backward", NULL);
    Py_XDECREF(done);
    return done ? handle_collect_user_grads(unit->handle) : -1;
}

int runtime_finish_reduction(struct runtime *runtime) {
    struct unit *unit = runtime->reducing;
    runtime->reducing = NULL;
    if (!unit)
        return 0;
    uint64_t place = ledger_enter(unit->ledger_index, LEDGER_REDUCE);
    if (schedule_finish_reduction(unit) < 0)
        return -1;
    ledger_leave(place);
    return unit->handle->optimizer_in_backward ? step_in_backward(unit) : 0;
}

static int remove_reshard_hook(struct unit *unit) {
    if (!unit->reshard_hook)
        return 0;
    PyObject *done = PyObject_CallMethod(unit->reshard_hook, "remove", NULL);
    Py_CLEAR(unit->reshard_hook);
    Py_XDECREF(done);
    return done ? 0 : -1;
}

static int reset_flags(struct unit *unit) {
    unit->ran_pre_backward = unit->needs_pre_backward_unshard = unit->prefetched = unit->cut_off = false;
    unit->post_forward_index = -1;
    return unit_set_training_state(unit, USE_IDLE);
}

static int reshard_at_the_end(struct unit *unit) {
    struct handle *handle = unit->handle;
    bool free_storage =
        !handle->param.sharded || unit->sync_gradients || flat_param_reshards_after_forward(&handle->param);
    return schedule_reshard(unit, free_storage) < 0 ? -1 : handle_show_sharded(handle);
}

static int finalise_handle(struct unit *unit) {
    struct handle *handle = unit->handle;
    if (handle->gradients.in_backward && gradients_hand_over(&handle->gradients) < 0)
        return -1;
    return handle_set_training_state(handle, USE_IDLE);
}

/* A synchronised backward that did not pass through a unit leaves nothing of its no_sync gradients unreduced either: an optimizer
 * may step next. Where the user calls the callback by hand, nothing is sent. */
static int reduce_left_over(struct runtime *runtime, struct unit *unit) {
    if (!runtime->callback_queued || !unit->handle || !unit->sync_gradients || !unit->handle->gradients.unreduced)
        return 0;
    if (gradients_prepare(&unit->handle->gradients) < 0 || !unit->handle->gradients.unreduced)
        return PyErr_Occurred() ? -1 : 0;
    if (watch(unit, Py_None) < 0 || schedule_pack(unit) < 0)
        return -1;
    runtime->reducing = unit;
    return schedule_reduce(unit) < 0 ? -1 : runtime_finish_reduction(runtime);
}

/* A backward within a forward ends for the units that it passed through, and those gathered for it in vain. The others are amid
 * their forward, or wait for the backward of the whole. */
static bool ends(const struct unit *unit) {
    if (!unit->runtime->num_in_forward)
        return true;
    if (!unit->handle)
        return unit->ran_pre_backward;
    enum training_state state = unit->handle->training_state;
    return state == USE_BACKWARD_PRE || state == USE_BACKWARD_POST || (state == USE_IDLE && unit->prefetched);
}

static int finalise_units(struct runtime *runtime) {
    if (runtime_finish_reduction(runtime) < 0)
        return -1;
    for (int64_t i = 0; i < runtime->num_units && !runtime->num_in_forward; i++)
        if (reduce_left_over(runtime, runtime->units[i]) < 0)
            return -1;
    bool offload = false;
    if (schedule_wait_reduced(&runtime->schedule) < 0)
        return -1;
    for (int64_t i = 0; i < runtime->num_units; i++) {
        struct unit *unit = runtime->units[i];
        if (unit->handle && ends(unit) && reshard_at_the_end(unit) < 0)
            return -1;
        offload = offload || (unit->handle && unit->handle->storage.offload);
    }
    if (offload && schedule_synchronize(&runtime->schedule) < 0) /* an optimizer on the CPU may step next */
        return -1;
    for (int64_t i = 0; i < runtime->num_units; i++) {
        struct unit *unit = runtime->units[i];
        if (!ends(unit))
            continue;
        if (remove_reshard_hook(unit) < 0 || (unit->handle && finalise_handle(unit) < 0) || reset_flags(unit) < 0)
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
        order_next_iteration(runtime);
        ledger_end_step();
    }
    runtime->callback_queued = false;
    return 0;
}

int runtime_final_callback(struct runtime *runtime) {
    if (runtime->told_of_no_gradient || !runtime->callback_queued || runtime->num_in_forward)
        return end_backward(runtime);
    PyObject *cut_off = runtime_take_cut_off(runtime);
    int result = cut_off ? end_backward(runtime) : -1;
    if (!result) /* when all is in order again: a warning may be made an error */
        result = runtime_tell_of_cut_off(runtime, cut_off);
    Py_XDECREF(cut_off);
    return result;
}

int runtime_release(struct runtime *runtime) {
    for (int64_t i = 0; i < runtime->num_units; i++) {
        struct handle *handle = runtime->units[i]->handle;
        if (handle && (storage_reshard(&handle->storage, true) < 0 || handle_show_sharded(handle) < 0))
            return -1;
    }
    return runtime_clear(runtime);
}

/* ---- after an exception ---- */

static int reset(struct runtime *runtime) {
    PyErr_Clear();
    runtime->reducing = NULL;
    if (schedule_join(&runtime->schedule) < 0)
        return -1;
    for (int64_t i = 0; i < runtime->num_units; i++) {
        struct unit *unit = runtime->units[i];
        struct handle *handle = unit->handle;
        if (handle && handle->training_state == USE_SUMMON_FULL_PARAMS)
            continue; /* summon_full_params ends by itself */
        if (remove_reshard_hook(unit) < 0)
            return -1;
        if (handle) {
            if (handle->gradients.in_backward)
                gradients_drop(&handle->gradients);
            handle_set_training_state(handle, USE_IDLE);
            if (schedule_reshard(unit, true) < 0 || handle_show_sharded(handle) < 0)
                return -1;
        }
        if (reset_flags(unit) < 0)
            return -1;
    }
    ledger_leave(0);
    runtime->num_post = 0;
    runtime->callback_queued = false;
    return schedule_settle(&runtime->schedule);
}

/* On a GPU autograd's own thread lets go of a backward that has raised, while the script may be in its next forward already: whoever
 * comes second waits, or what it has gathered meanwhile would be given back. */
static int wait_for_reset(const struct runtime *runtime, unsigned long thread) {
    while (runtime->resetting && runtime->resetting != thread) {
        Py_BEGIN_ALLOW_THREADS sched_yield();
        Py_END_ALLOW_THREADS
    }
    return 0;
}

int runtime_reset(struct runtime *runtime) {
    unsigned long thread = PyThread_get_thread_ident();
    if (runtime->resetting)
        return wait_for_reset(runtime, thread);
    runtime->resetting = thread;
    int result = reset(runtime);
    runtime->resetting = 0;
    return result;
}
