/* Recovery after an exception: in the forward of one unit, in a step, and in a backward that autograd's own
 * thread releases. */
#include "runtime/callbacks.h"
#include "runtime/runtime.h"

#include <sched.h>
#include <time.h>

#include "torch/py_torch.h"

/* ---- failed forward ---- */

/* Reshard the unit and keep the exception. If the root fails, reset all of its tree: units that have finished
 * wait for a backward that will not run. */
void unit_abandon_forward(struct unit *unit) {
    PyObject *error = PyErr_GetRaisedException();
    /* Name the other unit if a kernel failed on its sharded parameters. */
    OWNED *module = unit_module(unit);
    if (module && error)
        callbacks_call(callbacks.explain_error, error, module);
    PyErr_Clear(); /* Python code must not run with an exception set */
    unit_set_phase(unit, PHASE_IDLE);
    optional_abandon(unit);
    unit_set_prefetched(unit, false);
    FOR_EACH_FLAT_PARAM(part, unit->handle ? unit : NULL) {
        unit_reshard(part, !unit->optional.enclosing);
        PyErr_Clear();
        handle_expose_sharded(part->handle);
        PyErr_Clear();
        handle_set_training_state(part->handle, USE_IDLE);
    }
    if (unit->is_root && !unit->runtime->callback_queued)
        runtime_reset(unit->runtime);
    PyErr_Clear();
    PyErr_SetRaisedException(error);
}

/* ---- reset of a tree ---- */

/* Keep the first exception in `first` and continue: a collective that fails again must not stop the reset of
 * later units. */
static void keep_first_error(PyObject **first, int result) {
    if (result < 0 && !*first)
        *first = PyErr_GetRaisedException();
    PyErr_Clear();
}

static int reset(struct runtime *runtime) {
    struct schedule *schedule = &runtime->schedule;
    PyObject *first = NULL;
    PyErr_Clear();
    runtime->reducing = NULL;
    keep_first_error(&first,
                     /* legal from every state */
                     schedule_set_reduction(&runtime->schedule, REDUCTION_NONE, NULL));
    /* make COMPUTE wait for all streams; UNSHARD has waited for PRE_UNSHARD, so the loop begins there */
    int joined = 0;
    for (int role = STREAM_UNSHARD; joined == 0 && role < STREAM_ROLES; role++) {
        joined = stream_record(&schedule->streams, (enum stream_role)role, &schedule->joined);
        if (!joined)
            joined = stream_wait(&schedule->streams, STREAM_COMPUTE, schedule->joined);
    }
    keep_first_error(&first, joined);
    FOR_EACH_UNIT(unit, runtime) {
        struct handle *handle = unit->handle;
        if (handle && handle->training_state == USE_SUMMON_FULL_PARAMS)
            continue; /* summon_full_params exits by itself */
        optional_reset(unit);
        unit->unsharded.saved_by_graph = false;
        keep_first_error(&first, unit_remove_input_hooks(unit));
        if (handle) {
            keep_first_error(&first, unit_wait_step(unit));
            keep_first_error(&first, grads_restore_stashed(&handle->grads));
            keep_first_error(&first, grads_restore_param_hooks(&handle->grads));
            if (handle->grads.in_backward)
                grads_discard(&handle->grads);
            keep_first_error(&first, handle_set_training_state(handle, USE_IDLE));
            keep_first_error(&first, unit_reshard(unit, true));
            keep_first_error(&first, handle_expose_sharded(handle));
        }
        keep_first_error(&first, unit_end_step(unit));
    }
    progress_leave(0); /* leave all phases */
    runtime->order.num_post = 0;
    keep_first_error(&first, schedule_flush(&runtime->schedule));
    runtime->callback_queued = false; /* Clear last: a concurrent forward waits for this flag. */
    if (!first)
        return 0;
    PyErr_SetRaisedException(first);
    return -1;
}

/* Reset, or wait for another thread's reset. Autograd's own thread releases a failed backward on a GPU, while
 * the script may be in its next forward: a second reset would free that forward's parameters. */
int runtime_reset(struct runtime *runtime) {
    unsigned long thread = PyThread_get_thread_ident();
    if (!runtime->resetting) {
        runtime->resetting = thread;
        int result = reset(runtime);
        runtime->resetting = 0;
        return result;
    }
    while (runtime->resetting && runtime->resetting != thread) {
        if (PyErr_CheckSignals() < 0)
            return -1;
        Py_BEGIN_ALLOW_THREADS sched_yield();
        Py_END_ALLOW_THREADS
    }
    return 0;
}

/* ---- failed backward ---- */

/* Return 1 if autograd is running a backward in this thread, 0 if not, -1 with an exception. */
static int in_backward(void) {
    int64_t id = torch_graph_task();
    return id == -2 ? -1 : id != -1;
}

/* Reset if a callback is queued outside of any backward, which means that its backward raised. */
int runtime_reset_after_failed_backward(struct runtime *runtime) {
    if (!runtime->callback_queued)
        return 0;
    int running = in_backward();
    if (running)
        return running < 0 ? -1 : 0;
    return runtime_reset(runtime);
}

/* Wait until autograd's own thread has released a failed backward. The error reaches the script first on a
 * GPU, and the release takes as long as acquiring the GIL. A backward of another thread that has not failed
 * releases nothing, so the wait is bounded. */
int runtime_wait_failed_backward(const struct runtime *runtime) {
    const struct timespec moment = {.tv_nsec = 100 * 1000};
    if (!streams_are_real(&runtime->schedule.streams) || !(runtime->callback_queued || runtime->resetting))
        return 0;
    int running = in_backward();
    for (int i = 0; i < 500 && !running && (runtime->callback_queued || runtime->resetting); i++) {
        if (PyErr_CheckSignals() < 0)
            return -1;
        Py_BEGIN_ALLOW_THREADS nanosleep(&moment, NULL);
        Py_END_ALLOW_THREADS
    }
    return running < 0 ? -1 : 0;
}

/* Runs in the interpreter's main thread, while the forward's thread may still be in the backward. */
static int recover_in_pending_call(void *waiting) {
    struct runtime *runtime = waiting;
    OWNED *object = runtime->object;
    bool is_script = runtime->forward_thread == PyThread_get_thread_ident();
    runtime->recovery_scheduled = false;
    int result = 0;
    if (is_script) /* reset as a forward would, unless autograd's thread has */
        result =
            runtime_wait_failed_backward(runtime) < 0 ? -1 : runtime_reset_after_failed_backward(runtime);
    return result;
}

/* Recover in a pending call: an optimizer that steps after a failed backward reads gradients without calling
 * this library. Py_AddPendingCall fails if its queue is full; then recovery waits for the next forward. */
void runtime_schedule_recovery(struct runtime *runtime) {
    if (runtime->recovery_scheduled || !streams_are_real(&runtime->schedule.streams))
        return;
    runtime->recovery_scheduled = Py_AddPendingCall(recover_in_pending_call, runtime) == 0;
    if (runtime->recovery_scheduled)
        Py_INCREF(runtime->object);
}
