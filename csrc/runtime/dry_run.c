#include "runtime/dry_run.h"

#include <stddef.h>

#include "runtime/operations.h"
#include "torch/names.h"

/* One unit of the tree: the runtime's structs, and where it is in the tree. */
struct actor {
    struct dry_run *run;
    const struct dry_unit *is;
    struct unit unit;
    struct handle handle;
    struct actor *parent, *previous, *next; /* beside it, inside the same unit */
    struct actor *first, *last;             /* inside it */
    bool has_inputs;                        /* that require gradients */
    bool expected;                          /* its output does */
};

struct dry_run {
    const struct dry_tree *tree;
    struct actor *actors; /* owned, as the array below */
    struct unit **units;
    struct actor *passed;         /* a frozen unit whose inputs have yet to get their gradients, or NULL */
    struct operations operations; /* the runtime's own, but for the all-gather */
    struct runtime runtime;
    PyObject *tensor;   /* owned; stands for all, and is empty */
    PyObject *trained;  /* owned; the same for flat parameters that require gradients */
    PyObject *name;     /* owned; str */
    PyObject *events;   /* borrowed; what happens goes there */
    bool requires_grad; /* what the last unit returned does */
};

/* ---- what is recorded ---- */

static int append(struct dry_run *run, enum dry_event event, int64_t unit, int64_t nbytes) {
    return ref_append(run->events, Py_BuildValue("(iLL)", (int)event, (long long)unit, (long long)nbytes));
}

static int record(const struct actor *actor, enum dry_event event) {
    return append(actor->run, event, actor->unit.place.unit, actor->is->nbytes);
}

/* In the place of a storage's resize_, before the buffer knows of it. */
static int on_resize(void *target) {
    const struct actor *actor = target;
    return record(actor, actor->handle.storage.copy->full.allocated ? DRY_RUN_GIVE_BACK : DRY_RUN_TAKE);
}

/* In the place of that of what is kept for the backward. */
static int on_node_resize(void *target) {
    const struct actor *actor = target;
    enum dry_event event = storage_gathers_in_node(&actor->handle.storage) ? DRY_RUN_FORGET : DRY_RUN_KEEP;
    return append(actor->run, event, actor->unit.place.unit, actor->is->node_nbytes);
}

/* In the place of an all-gather. */
static int gather(struct unit *unit) {
    const struct actor *actor = (const struct actor *)((const char *)unit - offsetof(struct actor, unit));
    bool in_node = storage_gathers_in_node(&unit->handle->storage);
    if (record(actor, in_node ? DRY_RUN_GATHER_IN_NODE : DRY_RUN_GATHER) < 0 ||
        storage_alloc_unsharded(&unit->handle->storage) < 0)
        return -1;
    return storage_set_state(&unit->handle->storage, PARAM_UNSHARDING);
}

/* ---- the tree ---- */

static void join_parent(struct dry_run *run, struct actor *actor) {
    if (actor->is->parent < 0)
        return;
    struct actor *parent = &run->actors[actor->is->parent];
    if (actor->is->is_segment) {
        unit_lead(&parent->unit, &actor->unit);
        return;
    }
    actor->parent = parent;
    actor->previous = parent->last;
    *(parent->last ? &parent->last->next : &parent->first) = actor;
    parent->last = actor;
}

static int init_buffer(struct buffer *buffer, struct actor *actor, int (*resized)(void *), int64_t nbytes) {
    OWNED *resize = hook_new(resized, actor, NULL);
    if (!resize)
        return -1;
    buffer_init_without_memory(buffer, actor->run->tensor, resize, nbytes);
    return 0;
}

static int init_handle(struct dry_run *run, struct actor *actor) {
    struct handle *handle = &actor->handle;
    bool sharded = actor->is->strategy != NO_SHARD;
    *handle = (struct handle){
        .param = {.tensor = actor->is->is_trainable ? run->trained : run->tensor,
                  .name = run->name,
                  .strategy = actor->is->strategy,
                  .sharded = sharded,
                  .layout = {.padded_numel = actor->is->reduce_nbytes},
                  .skip_writeback_check = true},
        .storage = {.param = &handle->param,
                    .copy = handle->storage.copies,
                    .local_shard = run->tensor,
                    .copies = {{.full_data = run->tensor,
                                .secondary_source = actor->is->node_nbytes ? run->tensor : NULL,
                                .is_local = !sharded && actor->is->nbytes == 0,
                                .reduce_kind = DTYPE_OTHER_1}}},
        HANDLE_ABOVE_STORAGE(handle),
    };
    storage_share(&handle->storage, run->tree->has_streams ? &run->runtime.schedule.unsharded : NULL, NULL,
                  actor->is->is_segment);
    if (init_buffer(&handle->storage.copy->full, actor, on_resize, actor->is->nbytes) < 0)
        return -1;
    return init_buffer(&handle->storage.copy->secondary_shard, actor, on_node_resize, actor->is->node_nbytes);
}

static int init_actor(struct dry_run *run, int64_t index) {
    struct actor *actor = &run->actors[index];
    const struct dry_unit *is = &run->tree->units[index];
    actor->run = run;
    actor->is = is;
    actor->unit = (struct unit){
        .handle = is->has_params ? &actor->handle : NULL,
        .runtime = &run->runtime,
        .name = run->name,
        .backward_prefetch = is->backward_prefetch,
        .forward_prefetch = is->forward_prefetch,
        .is_root = index == 0,
        .sync_gradients = true,
        .name_index = -1,
    };
    order_place_init(&actor->unit.place, index);
    run->units[index] = &actor->unit;
    join_parent(run, actor);
    return is->has_params ? init_handle(run, actor) : 0;
}

static int init_runtime(struct dry_run *run) {
    struct runtime *runtime = &run->runtime;
    OWNED *cpu = PyObject_GetAttr(run->tensor, torch_names.device);
    run->operations = operations_own;
    run->operations.gather = gather;
    *runtime = (struct runtime){.units = run->units,
                                .num_units = run->tree->num_units,
                                .operations = &run->operations,
                                .trains = true};
    if (!cpu || order_init(&runtime->order, runtime->num_units) < 0)
        return -1;
    order_set_limits(&runtime->order, run->tree->backward_prefetch_limit, run->tree->forward_prefetch_limit);
    return schedule_init(&runtime->schedule, cpu);
}

/* From the last to the first, as each is the first of its list. */
static void join_optional(struct dry_run *run) {
    const struct dry_unit *units = run->tree->units;
    for (int64_t i = run->tree->num_units - 1; i > 0; i--) {
        int64_t enclosing = units[i].parent;
        while (enclosing > 0 && units[enclosing].is_optional)
            enclosing = units[enclosing].parent;
        if (units[i].is_optional)
            optional_add(run->units[i], run->units[enclosing]);
    }
}

static PyObject *empty_tensor(PyObject *requires_grad) {
    PyObject *tensor = PyObject_CallFunction(torch_names.empty, "i", 0);
    if (tensor && PyObject_SetAttr(tensor, torch_names.requires_grad, requires_grad) < 0)
        Py_CLEAR(tensor);
    return tensor;
}

static int init(struct dry_run *run) {
    size_t count = (size_t)run->tree->num_units;
    run->actors = PyMem_Calloc(count, sizeof *run->actors);
    run->units = PyMem_Calloc(count, sizeof *run->units);
    if (!run->actors || !run->units) {
        PyErr_NoMemory();
        return -1;
    }
    run->name = PyUnicode_FromString("of a dry run");
    run->tensor = run->name ? empty_tensor(Py_False) : NULL;
    run->trained = run->tensor ? empty_tensor(Py_True) : NULL;
    if (!run->trained || init_runtime(run) < 0)
        return -1;
    for (int64_t i = 0; i < run->tree->num_units; i++)
        if (init_actor(run, i) < 0)
            return -1;
    join_optional(run);
    return 0;
}

static void fini(struct dry_run *run) {
    for (int64_t i = 0; run->actors && i < run->tree->num_units; i++) {
        struct precision_copy *copy = &run->actors[i].handle.storage.copies[PRECISION_COMPUTE];
        buffer_fini(&copy->full);
        buffer_fini(&copy->secondary_shard);
    }
    order_fini(&run->runtime.order);
    schedule_fini(&run->runtime.schedule);
    PyMem_Free(run->actors);
    PyMem_Free(run->units);
    Py_CLEAR(run->tensor);
    Py_CLEAR(run->trained);
    Py_CLEAR(run->name);
}

/* ---- what a model and autograd do ---- */

static int forward(struct actor *actor);

static int forward_within(struct actor *actor) {
    struct dry_run *run = actor->run;
    if (unit_unshard_for_forward(&actor->unit) < 0)
        return -1;
    actor->has_inputs = run->requires_grad;
    run->requires_grad = run->requires_grad || actor->is->is_trainable;
    for (struct actor *inner = actor->first; inner; inner = inner->next)
        if (forward(inner) < 0)
            return -1;
    actor->expected = run->requires_grad;
    unit_expect_backward(&actor->unit, actor->expected);
    return unit_reshard_after_forward(&actor->unit);
}

static int forward(struct actor *actor) {
    runtime_enter_forward(&actor->run->runtime);
    int result = forward_within(actor);
    runtime_leave_forward(&actor->run->runtime);
    return result;
}

static int begin_backward(struct actor *actor) {
    bool begins = actor->unit.handle ? actor->unit.needs_pre_backward_unshard : actor->expected;
    return begins ? unit_unshard_for_backward(&actor->unit) : 0;
}

/* The output of a unit is that of the last unit inside, whose hook was there before; but a unit around
 * optional ones has its hook called before theirs. */
static int pre_backward(struct actor *actor) {
    bool comes_first = actor->unit.optional.first;
    if (comes_first && begin_backward(actor) < 0)
        return -1;
    if (actor->last && pre_backward(actor->last) < 0)
        return -1;
    return comes_first ? 0 : begin_backward(actor);
}

static int reshard_passed(struct dry_run *run) {
    struct actor *passed = run->passed;
    run->passed = NULL;
    return passed ? unit_reshard_only(&passed->unit) : 0;
}

/* Whether its input is the output of another unit, and not of what the unit around it computed. */
static bool follows_unit(const struct actor *actor) {
    if (actor->previous || !actor->parent)
        return actor->previous;
    return !actor->parent->is->has_params && follows_unit(actor->parent);
}

static int post_backward(struct actor *actor) {
    struct unit *unit = &actor->unit;
    if (!unit->handle)
        return 0;
    if (actor->is->is_trainable) {
        if ((unit->optional.reached && unit_reshard_optional(unit) < 0) ||
            unit_set_training_state(unit, USE_BACKWARD_POST) < 0)
            return -1;
        return actor->run->operations.post_backward_reshard(unit);
    }
    /* a frozen unit goes when its inputs have gradients: after the pre-backward of the unit that they come
     * from */
    if (!actor->has_inputs)
        return 0;
    if (!follows_unit(actor))
        return unit_reshard_only(unit);
    actor->run->passed = actor;
    return 0;
}

/* `begun`: the gradient of its output has come. */
static int backward(struct actor *actor, bool begun) {
    if (!begun && (pre_backward(actor) < 0 || reshard_passed(actor->run) < 0))
        return -1;
    for (struct actor *inner = actor->last; inner; inner = inner->previous)
        if (backward(inner, inner == actor->last) < 0)
            return -1;
    return post_backward(actor);
}

static int finish_backward(struct dry_run *run) {
    for (int64_t i = 0; i < run->runtime.num_units; i++)
        if (run->units[i]->optional.reached && unit_reshard_optional(run->units[i]) < 0)
            return -1;
    if (runtime_reshard_units(&run->runtime) < 0 || schedule_end_backward(&run->runtime.schedule) < 0)
        return -1;
    for (int64_t i = 0; i < run->runtime.num_units; i++)
        if (handle_set_training_state(&run->actors[i].handle, USE_IDLE) < 0 ||
            unit_end_step(run->units[i]) < 0)
            return -1;
    order_next_iteration(&run->runtime.order);
    run->passed = NULL;
    return 0;
}

/* ---- the steps ---- */

/* What happens from now on goes into a new list, the next one of `lists`. 0 or -1. */
static int begin_list(struct dry_run *run, PyObject *lists) {
    run->events = PyList_New(0);
    int result = run->events ? PyList_Append(lists, run->events) : -1;
    Py_XDECREF(run->events); /* `lists` owns it */
    return result;
}

static int run_step(struct dry_run *run, PyObject *lists, bool sync_gradients) {
    for (int64_t i = 0; i < run->runtime.num_units; i++)
        unit_set_sync_gradients(run->units[i], sync_gradients);
    run->requires_grad = run->tree->inputs_require_grad;
    if (begin_list(run, lists) < 0 || forward(run->actors) < 0 || begin_list(run, lists) < 0)
        return -1;
    if (run->requires_grad && backward(run->actors, false) < 0)
        return -1;
    if (begin_list(run, lists) < 0)
        return -1;
    return run->requires_grad ? finish_backward(run) : 0;
}

static int run_all(struct dry_run *run, PyObject *lists, const bool *sync_gradients, int64_t num_steps) {
    if (begin_list(run, lists) < 0)
        return -1;
    if (run->tree->has_streams) { /* in the place of runtime_reserve */
        int64_t nbytes = runtime_piece_nbytes(&run->runtime);
        if (nbytes < 0 || (nbytes && append(run, DRY_RUN_GROW, run->actors->unit.place.unit, nbytes) < 0) ||
            runtime_take_memory(&run->runtime) < 0)
            return -1;
    }
    for (int64_t i = 0; i < num_steps; i++)
        if (run_step(run, lists, sync_gradients[i]) < 0)
            return -1;
    return 0;
}

PyObject *dry_run_steps(const struct dry_tree *tree, const bool *sync_gradients, int64_t num_steps) {
    struct dry_run run = {.tree = tree};
    PyObject *lists = PyList_New(0);
    if (lists && (init(&run) < 0 || run_all(&run, lists, sync_gradients, num_steps) < 0))
        Py_CLEAR(lists);
    fini(&run);
    return lists;
}
