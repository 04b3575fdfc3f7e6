/* The way back after an exception in a step. */
#include "runtime/runtime.h"

#include <sched.h>
#include <time.h>

#include "torch/names.h"

static int reset(struct runtime *runtime) {
    PyErr_Clear();
    if (runtime_drop_reduction(runtime) < 0 || schedule_join(&runtime->schedule) < 0)
        return -1;
    for (int64_t i = 0; i < runtime->num_units; i++) {
        struct unit *unit = runtime->units[i];
        struct handle *handle = unit->handle;
        if (handle && handle->training_state == USE_SUMMON_FULL_PARAMS)
            continue; /* summon_full_params ends by itself */
        optional_reset(unit);
        if (unit_unwatch_inputs(unit) < 0)
            return -1;
        if (handle) {
            if (gradients_show_again(&handle->gradients) < 0)
                return -1;
            if (handle->gradients.in_backward)
                gradients_drop(&handle->gradients);
            handle_set_training_state(handle, USE_IDLE);
            if (unit_reshard(unit, true) < 0 || handle_show_sharded(handle) < 0)
                return -1;
        }
        if (unit_end_step(unit) < 0)
            return -1;
    }
    trace_abandon();
    order_forget_forwards(&runtime->order);
    int result = schedule_settle(&runtime->schedule);
    runtime->callback_queued = false; /* at the end: until then a forward waits */
    return result;
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

/* ---- a backward that has raised ---- */

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
