/* A root: its life, the memory for what its steps gather, and which thread may use it. */
#include "runtime/runtime.h"

#include "runtime/operations.h"
#include "torch/names.h"

#include "base/check.h"

/* ---- life ---- */

/* The streams are those of the device where the first unit with parameters computes. */
static int init_schedule(struct runtime *runtime) {
    struct schedule *schedule = &runtime->schedule;
    const struct handle *first = runtime->num_units ? unit_handle_or_first(runtime->units[0]) : NULL;
    if (!first)
        return 0;
    if (schedule_init(schedule, first->param.device) < 0)
        return -1;
    for (int64_t i = 0; i < runtime->num_units && streams_are_real(&schedule->streams); i++)
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
        schedule_forget(&runtime->schedule, &unit->last_unshard);
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

/* ---- memory for what its steps gather ---- */

/* [Note: one piece] Before the first step the pool holds what as many units want as are gathered at a time.
 * It is one piece, so that torch's allocator cuts off what a unit wants, to 512 bytes; from pieces of their
 * own units would be given up to 1 MiB more, and no two of them could make room for a larger one. At the end
 * of a backward, when nothing gathered is left in it, its last reduction reads the same memory. */

/* In use, prefetched, and in forward held until its last use is over. */
static int64_t units_at_a_time(const struct runtime *runtime) {
    int64_t forward = 2, backward = 1;
    for (int64_t i = 0; i < runtime->num_units; i++) {
        const struct unit *unit = runtime->units[i];
        if (unit->forward_prefetch)
            forward = 2 + runtime->order.forward_prefetch_limit;
        if (unit->backward_prefetch != PREFETCH_NONE)
            backward = 1 + runtime->order.backward_prefetch_limit;
    }
    return forward > backward ? forward : backward;
}

static bool has_storage_to_take(const struct unit *unit) {
    return unit->handle && storage_wants_memory(&unit->handle->storage);
}

/* The root stays gathered until its backward, as every unit does that is not resharded after its forward. */
static bool stays_gathered(struct unit *part) {
    const struct unit *unit = unit_of_part(part);
    return unit->is_root ||
           (unit->handle->param.sharded && !flat_param_reshards_after_forward(&unit->handle->param));
}

static int64_t gathered_nbytes(struct unit *unit) {
    int64_t nbytes = 0;
    FOR_PARTS(part, unit)
        nbytes += part->handle->storage.copy->full.nbytes;
    return nbytes;
}

static bool is_larger(struct unit *unit, struct unit *other) {
    int64_t nbytes = gathered_nbytes(unit), nbytes_of_other = gathered_nbytes(other);
    return nbytes > nbytes_of_other || (nbytes == nbytes_of_other && unit->place.unit < other->place.unit);
}

/* The largest among the units that give their storage back in a step, after `previous`; NULL when there is
 * none. */
static struct unit *next_largest(const struct runtime *runtime, struct unit *previous) {
    struct unit *largest = NULL;
    for (int64_t i = 0; i < runtime->num_units; i++) {
        struct unit *unit = runtime->units[i];
        if (unit->leader || !has_storage_to_take(unit) || stays_gathered(unit))
            continue;
        if ((!previous || is_larger(previous, unit)) && (!largest || is_larger(unit, largest)))
            largest = unit;
    }
    return largest;
}

/* `visit` each part whose storage is held at a time: 0 or -1. */
static int for_all_held(const struct runtime *runtime, int (*visit)(struct unit *, void *), void *arg) {
    for (int64_t i = 0; i < runtime->num_units; i++) {
        struct unit *unit = runtime->units[i];
        if (has_storage_to_take(unit) && stays_gathered(unit) && visit(unit, arg) < 0)
            return -1;
    }
    struct unit *unit = NULL;
    for (int64_t i = units_at_a_time(runtime); i > 0 && (unit = next_largest(runtime, unit)); i--)
        FOR_PARTS(part, unit)
            if (visit(part, arg) < 0)
                return -1;
    return 0;
}

static int add_to_piece(struct unit *part, void *nbytes) {
    *(int64_t *)nbytes += pool_nbytes_of_piece(part->handle->storage.copy->full.nbytes);
    return 0;
}

/* What the last reduction of a backward reads, which takes the place of all that was gathered: mostly the
 * root's, whose forward was the first to begin. -1 with an exception. */
static int64_t last_input_nbytes(const struct runtime *runtime) {
    int64_t first = 0, most = 0;
    while (first < runtime->num_units && !runtime->units[first]->handle)
        first++;
    if (first == runtime->num_units || !runtime->trains)
        return 0;
    FOR_PARTS(part, runtime->units[first]) {
        struct handle *handle = part->handle;
        int trains = handle->param.sharded ? flat_param_is_trainable(&handle->param) : 0;
        if (trains < 0)
            return -1;
        int64_t nbytes = trains ? pool_nbytes_of_piece(gradients_reduce_input_nbytes(&handle->gradients)) : 0;
        most = nbytes > most ? nbytes : most;
    }
    return most;
}

/* Bytes of the piece from which all of a step is cut, or -1. */
static int64_t piece_nbytes(const struct runtime *runtime) {
    int64_t held = 0, input = last_input_nbytes(runtime);
    if (input < 0)
        return -1;
    for_all_held(runtime, add_to_piece, &held);
    return pool_piece_nbytes(held && input > held ? input : held);
}

struct taken {
    const struct pool *pool;
    bool cuts_piece;
};

static int take(struct unit *part, void *arg) {
    struct storage *storage = &part->handle->storage;
    struct taken *taken = arg;
    if (storage->param_state == PARAM_SHARDED && storage_alloc_unsharded(storage) < 0)
        return unit_explain_failure(part, TRACED_FORWARD_GATHER, false);
    taken->cuts_piece = taken->cuts_piece || pool_is_cut(taken->pool, storage->copy->full.view.data);
    return 0;
}

/* Allocate and free the storage of each unit once: 1 if the piece provides some of it, 0 or -1. */
static int take_memory(struct runtime *runtime) {
    struct taken taken = {.pool = &runtime->schedule.pool};
    int result = for_all_held(runtime, take, &taken);
    PyObject *type, *value, *traceback;
    PyErr_Fetch(&type, &value, &traceback);
    for (int64_t i = 0; i < runtime->num_units; i++)
        if (runtime->units[i]->handle && storage_release_reserved(&runtime->units[i]->handle->storage) < 0)
            result = -1;
    if (type)
        PyErr_Restore(type, value, traceback);
    return result < 0 ? -1 : taken.cuts_piece;
}

int runtime_reserve(struct runtime *runtime) {
    struct schedule *schedule = &runtime->schedule;
    struct pool *pool = &schedule->pool;
    if (!schedule_wants_memory(schedule))
        return 0;
    if (schedule_begin_reserve(schedule) < 0)
        return -1;
    int64_t nbytes = piece_nbytes(runtime);
    int cuts_piece = nbytes < 0 || pool_grow(pool, nbytes) < 0 ? -1 : take_memory(runtime);
    /* a piece that nothing can be cut of would lie idle: then each storage has one of its own */
    if (cuts_piece == 0 && pool->piece && (pool_renew(pool) < 0 || take_memory(runtime) < 0))
        cuts_piece = -1;
    return schedule_end_reserve(schedule, cuts_piece < 0 ? -1 : 0);
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

/* ---- the invariant between steps ---- */

static void check_unit(const struct unit *unit) {
    const struct handle *handle = unit->handle;
    INVARIANT(unit->phase != PHASE_IN_STEP && !unit->ran_pre_backward && !unit->needs_pre_backward_unshard);
    INVARIANT(!unit->prefetched && !unit->last_unshard.pending);
    INVARIANT(!unit->reshard_hook && !unit->stepping);
    INVARIANT(!unit->optional.open && !unit->optional.reached);
    INVARIANT(!unit->optional.enclosing || !unit->optional.first);
    order_check_place(&unit->runtime->order, &unit->place);
    INVARIANT(!handle || handle->training_state == USE_IDLE ||
              handle->training_state == USE_SUMMON_FULL_PARAMS);
    INVARIANT(!handle ||
              (!handle->gradients.in_backward && !handle->gradients.pending && !handle->gradients.work));
    INVARIANT(!handle || handle->storage.param_state != PARAM_UNSHARDING);
    if (handle && handle->ready)
        handle_check(handle);
}

void runtime_check(const struct runtime *runtime) {
    INVARIANT(!runtime->callback_queued && !runtime->reducing && !runtime->resetting &&
              !runtime->num_in_forward);
    order_check(&runtime->order);
    INVARIANT(runtime->order.num_post == 0);
    schedule_check(&runtime->schedule);
    operations_check(&operations);
    INVARIANT(schedule_is_flushed(&runtime->schedule));
    for (int64_t i = 0; i < runtime->num_units; i++)
        check_unit(runtime->units[i]);
}
