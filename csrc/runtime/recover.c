/* The way back after an exception: in the forward of one unit, in a step, and in a backward that autograd's own
 * thread lets go of. */
#include "runtime/callbacks.h"
#include "runtime/runtime.h"

#include <sched.h>
#include <time.h>

#include "torch/py_torch.h"

/* ---- a forward that has raised ---- */

/* The module raised: nothing of this forward stays gathered, and the exception goes on. A root's failure is
 * its whole tree's: units that had finished wait for a backward that will not come. */
void unit_abandon_forward(struct unit *unit) {
    PyObject *error = PyErr_GetRaisedException();
    /* An error of a kernel on parameters that another unit keeps sharded names that unit. */
    OWNED *module = unit_module(unit);
    if (module && error)
        callbacks_call(callbacks.explain_error, error, module);
    PyErr_Clear(); /* nothing of Python's is called with an exception set */
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

/* ---- a whole tree ---- */

/* Keep the first exception of several in `first` and go on: a collective that fails again must not leave the
 * units behind it as they were. */
static void keep_first_error(PyObject **first, int result) {
    if (result < 0 && !*first)
        *first = PyErr_GetRaisedException();
    PyErr_Clear();
}

static void reset_unit(struct unit *unit, PyObject **first) {
    struct handle *handle = unit->handle;
    if (handle && handle->training_state == USE_SUMMON_FULL_PARAMS)
        return; /* summon_full_params ends by itself */
    optional_reset(unit);
    unit->unsharded.saved_by_graph = false;
    keep_first_error(first, unit_remove_input_hooks(unit));
    if (handle) {
        keep_first_error(first, unit_await_step(unit));
        keep_first_error(first, grads_restore_stashed(&handle->grads));
        keep_first_error(first, grads_restore_param_hooks(&handle->grads));
        if (handle->grads.in_backward)
            grads_discard(&handle->grads);
        keep_first_error(first, handle_set_training_state(handle, USE_IDLE));
        keep_first_error(first, unit_reshard(unit, true));
        keep_first_error(first, handle_expose_sharded(handle));
    }
    keep_first_error(first, unit_end_step(unit));
}

static int reset(struct runtime *runtime) {
    PyObject *first = NULL;
    PyErr_Clear();
    runtime->reducing = NULL;
    keep_first_error(&first,
                     schedule_set_reduction(&runtime->schedule, REDUCTION_NONE, NULL)); /* legal from all */
    keep_first_error(&first, schedule_join(&runtime->schedule));
    for (int64_t i = 0; i < runtime->num_units; i++)
        reset_unit(runtime->units[i], &first);
    trace_abandon();
    order_clear_forwards(&runtime->order);
    keep_first_error(&first, schedule_flush(&runtime->schedule));
    runtime->callback_queued = false; /* at the end: until then a forward waits */
    if (!first)
        return 0;
    PyErr_SetRaisedException(first);
    return -1;
}

/* On a GPU autograd's own thread lets go of a backward that has raised, while the script may be in its next
 * forward already: whoever comes second waits, or what it has gathered meanwhile would be given back. */
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

/* ---- a backward that has raised ---- */

/* Is autograd running a backward in this thread? */
static int in_backward(void) {
    int64_t id = torch_graph_task();
    return id == -2 ? -1 : id != -1;
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

/* On a GPU the error reaches the script before autograd's own thread lets go of the backward, which takes it
 * no longer than to get the interpreter's lock. Amid a backward of another thread nothing is let go of, so
 * that the wait has an end. */
int runtime_await_failed_backward(const struct runtime *runtime) {
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

/* In the thread that runs the interpreter's pending calls. The forward's may be another one, which is amid
 * the backward still. */
static int recover_in_pending_call(void *waiting) {
    struct runtime *runtime = waiting;
    OWNED *object = runtime->object;
    bool is_script = runtime->forward_thread == PyThread_get_thread_ident();
    runtime->recovery_scheduled = false;
    int result = 0;
    if (is_script) /* as a forward would, where autograd's thread has not come to it */
        result =
            runtime_await_failed_backward(runtime) < 0 ? -1 : runtime_reset_after_failed_backward(runtime);
    return result;
}

/* An optimizer asks nobody before it reads or clears gradients, and what this backward hides is shown again
 * if it raises. The interpreter makes pending calls before the script's next call; where it has too many, it
 * makes none. */
void runtime_schedule_recovery(struct runtime *runtime) {
    if (runtime->recovery_scheduled || !streams_are_real(&runtime->schedule.streams))
        return;
    runtime->recovery_scheduled = Py_AddPendingCall(recover_in_pending_call, runtime) == 0;
    if (runtime->recovery_scheduled)
        Py_INCREF(runtime->object);
}
