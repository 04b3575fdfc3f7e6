/* A root: its life, and the start of a step. */
#include "runtime/runtime.h"

#include "handle/unit_error.h"
#include "runtime/operations.h"
#include "torch/names.h"

/* ---- life ---- */

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
            storage_share(&runtime->units[i]->handle->storage, &schedule->unsharded, &schedule->pool,
                          runtime->units[i]->leader);
    return 0;
}

int runtime_init(struct runtime *runtime, PyObject *object, PyObject *unit_objects, struct unit **units) {
    size_t count = (size_t)PyTuple_Size(unit_objects);
    runtime->object = object;
    runtime->operations = &operations;
    runtime->unit_objects = Py_NewRef(unit_objects);
    runtime->units = PyMem_Calloc(count + 1, sizeof *runtime->units);
    if (!runtime->units) {
        PyErr_NoMemory();
        return -1;
    }
    if (order_init(&runtime->order, (int64_t)count) < 0)
        return -1;
    for (size_t i = 0; i < count; i++) {
        if (unit_bind(units[i], runtime, (int64_t)i) < 0)
            return -1;
        runtime->units[runtime->num_units++] = units[i];
    }
    return init_schedule(runtime);
}

/* Units outlive their runtime when lazy init failed half-way: they are as before it. What is still gathered
 * goes with its handle, after all that was computed on it. */
static void unbind_units(struct runtime *runtime) {
    if (schedule_begin_step(&runtime->schedule) < 0 || schedule_flush(&runtime->schedule) < 0)
        PyErr_WriteUnraisable(runtime->object);
    for (int64_t i = 0; i < runtime->num_units; i++) {
        struct unit *unit = runtime->units[i];
        schedule_forget(&runtime->schedule, &unit->gather);
        if (unit->handle)
            storage_share(&unit->handle->storage, NULL, NULL, unit->leader);
        unit_unbind(unit);
    }
    runtime->num_units = 0;
}

int runtime_clear(struct runtime *runtime) {
    unbind_units(runtime);
    schedule_fini(&runtime->schedule);
    order_fini(&runtime->order);
    PyMem_Free(runtime->units);
    runtime->units = NULL;
    Py_CLEAR(runtime->unit_objects);
    return 0;
}

int runtime_visit(struct runtime *runtime, visitproc visit, void *arg) {
    Py_VISIT(runtime->unit_objects);
    return 0;
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

int runtime_root_pre_forward(struct runtime *runtime) {
    if (runtime_check_holder(runtime) < 0)
        return -1;
    runtime->trains = torch_grad_enabled();
    if (runtime_note_ddp(runtime) < 0 || runtime_tell_of_left_out(runtime) < 0 ||
        runtime_check_kept(runtime) < 0 || runtime_give_back_stale(runtime) < 0)
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

/* ---- its end ---- */

int runtime_release(struct runtime *runtime) {
    for (int64_t i = 0; i < runtime->num_units; i++) {
        struct handle *handle = runtime->units[i]->handle;
        if (handle && (storage_reshard(&handle->storage, true) < 0 || handle_show_sharded(handle) < 0))
            return -1;
    }
    return runtime_clear(runtime);
}

/* ---- one thread at a time ---- */

/* One thread at a time uses a tree.
 *
 * A state dict, or a look at whole parameters, in one thread while another steps the same model would take
 * what that one is amid for what a failed backward has left, and drop it. It is refused, and so is a step
 * that begins while another thread is amid a state dict: each before it changes anything. Both are asked once
 * per step, so that a forward of an inner unit alone is not. */

static bool is_in_backward(void) {
    return torch_graph_task() >= 0;
}

static int refuse(const struct runtime *runtime, const char *what, const char *remedy) {
    if (!runtime->num_units)
        return 0;
    return unit_error(PyExc_RuntimeError, unit_rank(runtime->units[0]), runtime->units[0]->name,
                      "another thread is amid %s of this model, and %s. The other thread goes "
                      "on.",
                      what, remedy);
}

/* On a GPU autograd's own thread runs the backward of the thread of the forward. */
int runtime_check_thread(const struct runtime *runtime) {
    unsigned long thread = PyThread_get_thread_ident();
    bool is_stepped = runtime->num_in_forward || runtime->callback_queued;
    if (is_stepped && runtime->forward_thread != thread && !is_in_backward())
        return refuse(
            runtime, "a forward or backward",
            "whoever looks at its parameters meanwhile, as state_dict() does, must be the thread that "
            "trains: call it there, or after the step");
    return runtime_check_holder(runtime);
}

int runtime_check_forward_thread(const struct runtime *runtime) {
    if (!runtime->num_in_forward || runtime->forward_thread == PyThread_get_thread_ident() ||
        is_in_backward())
        return 0;
    return refuse(runtime, "a forward",
                  "two of them cannot run it at once: let threads take turns, by a lock, or give each a "
                  "model");
}

int runtime_check_holder(const struct runtime *runtime) {
    if (!runtime->holder || runtime->holder == PyThread_get_thread_ident())
        return 0;
    return refuse(runtime, "a state dict",
                  "nothing else can use its parameters until that is done: wait for that thread");
}

int runtime_hold(struct runtime *runtime) {
    if (runtime_check_thread(runtime) < 0)
        return -1;
    bool held = runtime->holder;
    runtime->holder = PyThread_get_thread_ident();
    return !held;
}

void runtime_let_go(struct runtime *runtime) {
    runtime->holder = 0;
}
