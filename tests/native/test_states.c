/* links, with stand-ins of its own: handle/flat_param.c handle/unshard.c handle/storage.c handle/param_views.c handle/earlier_grads.c
          handle/writeback.c handle/handle.c torch/freed_views.c
          runtime/unit.c runtime/schedule.c runtime/runtime.c runtime/order.c runtime/operations.c runtime/prefetch.c runtime/limiter.c */
#include <signal.h>
#include <stdarg.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include "harness.h"
#include "python_memory.h"

#include "runtime/operations.h"
#include "runtime/runtime.h"

/* Of Python, the tables need what raises an exception alone. */
PyObject *PyExc_RuntimeError, *PyExc_TypeError, *PyExc_ValueError;
PyObject _Py_NoneStruct = {.ob_refcnt = 1000};
struct _longobject {
    PyObject base;
} _Py_TrueStruct, _Py_FalseStruct;
static int num_raised;
static const char *from_in_error, *to_in_error;

PyObject *PyUnicode_FromFormatV(const char *format, va_list arguments) {
    CHECK(strstr(format, "illegal transition from %s to %s"));
    from_in_error = va_arg(arguments, const char *);
    to_in_error = va_arg(arguments, const char *);
    num_raised++;
    return NULL;
}

PyObject *PyErr_Format(PyObject *type, const char *format, ...) {
    (void)type;
    fprintf(stderr, "raised: %s\n", format);
    exit(1);
}

/* A layer's __dict__ is what it holds under the one name that is asked for. */
struct torch_names torch_names;

PyObject *PyDict_GetItemWithError(PyObject *dict, PyObject *key) {
    (void)key;
    return *(PyObject **)(void *)dict;
}

PyObject *PyErr_NoMemory(void) {
    return NULL;
}

void _Py_Dealloc(PyObject *object) {
    CHECK(!object);
}

/* Lists and tuples are their length alone. */
Py_ssize_t PyList_Size(PyObject *list) {
    return ((PyVarObject *)list)->ob_size;
}

Py_ssize_t PyTuple_Size(PyObject *tuple) {
    return ((PyVarObject *)tuple)->ob_size;
}

/* A dict has entries for as long as there are names. */
struct entries {
    PyObject base;
    const char *names[4];
    PyObject *values[4];
};

PyObject *PyDict_GetItemString(PyObject *dict, const char *name) {
    const struct entries *entries = (struct entries *)dict;
    for (int i = 0; i < 4 && entries->names[i]; i++)
        if (!strcmp(entries->names[i], name))
            return entries->values[i];
    return NULL;
}

/* Other operations are named in the table, and not called. */
#pragma GCC diagnostic ignored "-Wunused-parameter"
#define ENDS(name, ...)                                                                                      \
    int name(__VA_ARGS__) {                                                                                  \
        exit(1);                                                                                             \
    }
ENDS(unit_unshard_part, struct unit *of)
ENDS(unit_post_backward_reshard, struct unit *of)
ENDS(unit_register_pre_backward_hooks, struct unit *of, PyObject **outputs)
ENDS(unit_register_post_backward_hook, struct unit *of)
ENDS(unit_prefetch, struct unit *candidate, enum training_state state)
ENDS(node_detach_views, struct unit *of)
ENDS(torch_leave_inference_mode, PyObject **left)
ENDS(torch_return_to_inference_mode, PyObject *left)

void storage_abandon_unshard(struct storage *of) {
    exit(1);
}

/* Nothing is held back, so that nothing waits. */
int stream_wait(struct streams *streams, enum stream_role role, stream_event event) {
    (void)streams;
    (void)role;
    CHECK(!event);
    return 0;
}

int stream_record(struct streams *streams, enum stream_role role, stream_event *event) {
    return stream_wait(streams, role, *event);
}

/* ---- one table each: `put` is what no code of the library may do ---- */

static struct handle handle;
static PyObject *held_by_layer;
static struct call_guard layer;

static PyVarObject two, three;
static PyObject shard, full;
static struct entries attributes;

static void begin_param(void) {
    two.ob_size = 2;
    three.ob_size = 3;
    handle.param.strategy = FULL_SHARD;
    handle.param.sharded = handle.param.layout.sharded = handle.param.use_orig_params = true;
    handle.param.num_params = handle.param.layout.num_params = 2;
    handle.param.shapes = handle.param.strides = handle.param.params = (PyObject *)&two;
    handle.param.param_views = (PyObject *)&three;
}

static void begin(void) {
    memset(&handle, 0, sizeof handle);
    held_by_layer = (PyObject *)&handle;
    layer = (struct call_guard){.attributes = (PyObject *)(void *)&held_by_layer};
    begin_param();
    handle.param_views =
        (struct param_views){.count = 3, .guards = &layer, .num_guards = 1, .guards_placed = true};
    handle.writeback.storage = &handle.storage;
    handle.writeback.param_views = &handle.param_views;
    handle.writeback.param = &handle.param;
    handle.writeback.gradients = &handle.gradients;
    handle.writeback.use = &handle.training_state;
    handle.storage.local_shard = &shard;
    handle.storage.copies[0].full.tensor = &full;
    attributes = (struct entries){.names = {"_local_shard", "_full_param_padded"}, .values = {&shard, &full}};
    handle.storage.attributes = (PyObject *)&attributes;
    handle.storage.param = handle.param_views.param = handle.gradients.param = &handle.param;
    handle.gradients.storage = &handle.storage;
    handle.storage.copy = handle.storage.copies;
    handle.storage.copies[0].full.allocated = true;
}

static struct unit unit;
static struct schedule schedule;

/* Each state of `field` is tried with each other one as `to` of `set`; of `legal` there is one row per state,
 * with a mark for each that it may become. */
#define CHECK_TABLE(field, num_states, set, ...)                                                             \
    do {                                                                                                     \
        static const char *const legal[] = {__VA_ARGS__};                                                    \
        CHECK_EQUAL(sizeof legal / sizeof *legal, num_states);                                               \
        for (int from = 0; from < num_states; from++)                                                        \
            for (int to = 0; to < num_states; to++) {                                                        \
                begin();                                                                                     \
                (field) = from;                                                                              \
                const int is_legal = legal[from][to] == 'x', raised_before = num_raised;                     \
                CHECK_EQUAL(set, is_legal - 1);                                                              \
                CHECK_EQUAL((int)(field), is_legal ? to : from);                                             \
                CHECK_EQUAL(num_raised - raised_before, !is_legal);                                          \
            }                                                                                                \
    } while (0)

TEST(test_every_illegal_transition_is_refused) {
    /* SHARDED, UNSHARDING, UNSHARDED */
    CHECK_TABLE(handle.storage.param_state, PARAM_STATES, storage_set_state(&handle.storage, to), ".x.",
                "x.x", "x..");
    /* NOTHING, SHARDED, VIEWS, FULL_PARAMS */
    CHECK_TABLE(handle.param_views.shown, SHOWN_KINDS, param_views_set_shown(&handle.param_views, to), "xxxx",
                "x...", "x...", "x...");
    /* GRAD_NONE, GRAD_SHARDED, GRAD_UNSHARDED */
    CHECK_TABLE(handle.gradients.kind, GRAD_KINDS, gradients_set_kind(&handle.gradients, to), "xxx", "xx.",
                "xx.");
    /* IDLE, FORWARD, BACKWARD_PRE, BACKWARD_POST, SUMMON_FULL_PARAMS */
    CHECK_TABLE(handle.training_state, USE_STATES, handle_set_training_state(&handle, to), "xxxxx", "x....",
                "x..x.", "xxxx.", "x....");
    /* IDLE, IN_STEP, SUMMON_FULL_PARAMS */
    CHECK_TABLE(unit.phase, UNIT_PHASES, unit_set_phase(&unit, to), "xxx", "xx.", "x..");
    /* NONE, PACKED, ENQUEUED */
    CHECK_TABLE(schedule.reduction, REDUCTION_STATES, schedule_set_reduction(&schedule, to, &handle.param),
                "xx.", "x.x", "x..");
}

TEST(test_an_illegal_transition_names_both_states) {
    begin();
    CHECK_EQUAL(storage_set_state(&handle.storage, PARAM_UNSHARDED), -1);
    CHECK(!strcmp(from_in_error, "SHARDED") && !strcmp(to_in_error, "UNSHARDED"));
    handle.param_views.shown = SHOWN_VIEWS;
    CHECK_EQUAL(param_views_set_shown(&handle.param_views, SHOWN_FULL_PARAMS), -1);
    CHECK(!strcmp(from_in_error, "VIEWS") && !strcmp(to_in_error, "FULL_PARAMS"));
    handle.gradients.kind = GRAD_SHARDED;
    CHECK_EQUAL(gradients_set_kind(&handle.gradients, GRAD_UNSHARDED), -1);
    CHECK(!strcmp(from_in_error, "GRAD_SHARDED") && !strcmp(to_in_error, "GRAD_UNSHARDED"));
    handle.training_state = USE_FORWARD;
    CHECK_EQUAL(handle_set_training_state(&handle, USE_SUMMON_FULL_PARAMS), -1);
    CHECK(!strcmp(from_in_error, "FORWARD") && !strcmp(to_in_error, "SUMMON_FULL_PARAMS"));
    unit.phase = PHASE_IN_STEP;
    CHECK_EQUAL(unit_set_phase(&unit, PHASE_SUMMON_FULL_PARAMS), -1);
    CHECK(!strcmp(from_in_error, "IN_STEP") && !strcmp(to_in_error, "SUMMON_FULL_PARAMS"));
    schedule.reduction = REDUCTION_NONE;
    CHECK_EQUAL(schedule_set_reduction(&schedule, REDUCTION_ENQUEUED, &handle.param), -1);
    CHECK(!strcmp(from_in_error, "REDUCTION_NONE") && !strcmp(to_in_error, "REDUCTION_ENQUEUED"));
}

/* ---- invariants ---- */

static struct unit *all_units[] = {&unit};
static struct runtime runtime;

static void begin_runtime(void) {
    memset(&unit, 0, sizeof unit);
    unit.handle = &handle;
    runtime = (struct runtime){.units = all_units, .num_units = 1};
    unit.runtime = &runtime;
    order_place_init(&unit.place, 0);
    CHECK_EQUAL(order_init(&runtime.order, 1), 0);
    order_record_pre_forward(&runtime.order, &unit.place);
}

static void use_streams(void) {
    runtime.schedule.streams.backend = (const struct stream_backend *)&runtime;
}

/* The runtime's own operation. */
int unit_prefetch_in_order(struct unit *of, enum training_state state) {
    CHECK(of && state == USE_FORWARD);
    return 0;
}

/* What takes its place raises. */
PyObject *PyWeakref_GetObject(PyObject *reference) {
    CHECK(!reference);
    return Py_None;
}

PyObject *PyObject_CallFunctionObjArgs(PyObject *function, ...) {
    CHECK(function);
    return NULL;
}

TEST(test_what_takes_the_place_of_an_operation_is_called_until_it_is_given_back) {
    static PyObject function = {.ob_refcnt = 1000};
    begin_runtime();
    operations_init(&operations);
    CHECK_EQUAL(operations.prefetch(&unit, USE_FORWARD), 0);
    CHECK_EQUAL(operations_replace(&operations, "_get_handle_to_prefetch", &function), 0);
    CHECK_EQUAL(operations.prefetch(&unit, USE_FORWARD), -1);
    CHECK_EQUAL(operations_replace(&operations, "_get_handle_to_prefetch", Py_None), 0);
    CHECK_EQUAL(operations.prefetch(&unit, USE_FORWARD), 0);
}

#define BREAK(invariant, ...)                                                                                \
    if (number-- == 0) {                                                                                     \
        __VA_ARGS__;                                                                                         \
        return invariant;                                                                                    \
    }

/* Breaks the invariant of this number; what names it, or NULL where there are no more. */
static const char *break_one(int number) {
    static PyVarObject one = {.ob_size = 1};
    static struct precision_copy other_copy;
    static struct storage other_storage;
    static struct flat_param other_param;
    BREAK("copy->full.allocated", handle.storage.copies[0].full.allocated = false,
          handle.storage.param_state = PARAM_UNSHARDED)
    BREAK("!storage->unshard_work", handle.storage.unshard_work = (PyObject *)&handle)
    BREAK("copies[i].full.allocated", handle.storage.copies[1].full.allocated = true)
    BREAK("copy >= storage->copies", handle.storage.copy = &other_copy)
    BREAK("!= SHOWN_SHARDED", handle.param.use_orig_params = false, handle.param.params = NULL,
          handle.param_views.shown = SHOWN_SHARDED)
    BREAK("!param_views->wrapped_views", handle.param_views.wrapped_views = (PyObject *)&handle)
    BREAK("!gradients->in_backward", handle.gradients.in_backward = true,
          handle.gradients.kind = GRAD_SHARDED)
    BREAK("!gradients->work", handle.gradients.work = (PyObject *)&handle)
    BREAK("!= GRAD_UNSHARDED", handle.param.strategy = NO_SHARD,
          handle.param.sharded = handle.param.layout.sharded = false, attributes.names[1] = NULL,
          handle.gradients.kind = GRAD_UNSHARDED)
    BREAK("param->strategy != NO_SHARD", handle.param.strategy = NO_SHARD)
    BREAK("!param->replicate_group.group", handle.param.replicate_group.group = &full)
    BREAK("param->shard_group.rank", handle.param.layout.rank = 1)
    BREAK("param->layout.num_params == param->num_params", handle.param.layout.num_params = 1)
    BREAK("PyTuple_Size(param->shapes)", handle.param.shapes = (PyObject *)&three)
    BREAK("PyList_Size(param->param_views)", handle.param.param_views = (PyObject *)&one)
    BREAK("param->params != NULL", handle.param.use_orig_params = false)
    BREAK("PyList_Size(param->params)", handle.param.params = (PyObject *)&one)
    BREAK("param_views->count >=", handle.param_views.count = 1)
    BREAK("_local_shard", attributes.values[0] = &full)
    BREAK("_full_param_padded", attributes.names[1] = NULL)
    BREAK("_mp_shard", attributes.names[2] = "_mp_shard", attributes.values[2] = &full)
    BREAK("writeback->unheld_turn", handle.writeback.unheld_turn = 2)
    BREAK("handle->writeback.storage", handle.writeback.storage = &other_storage)
    BREAK("!gradients->offloaded", handle.gradients.offloaded = &full)
    BREAK("!handle->summon.full", handle.summon.full = &full)
    BREAK("handle->gradients.param", handle.gradients.param = &other_param)
    BREAK("!gradients->shown", handle.gradients.shown = Py_None, handle.gradients.kind = GRAD_UNSHARDED)
    BREAK("param_views.param == &handle->param", handle.param_views.param = &other_param)
    BREAK("guards[i].compiled", held_by_layer = NULL)
    BREAK("unit->phase != PHASE_IN_STEP", unit.phase = PHASE_IN_STEP)
    BREAK("handle->training_state == USE_IDLE", handle.training_state = USE_BACKWARD_POST)
    BREAK("!handle->gradients.pending", handle.gradients.pending = (PyObject *)&handle)
    BREAK("!= PARAM_UNSHARDING", handle.storage.param_state = PARAM_UNSHARDING)
    BREAK("is_at(order->post", order_record_post_forward(&runtime.order, &unit.place),
          order_forget_forwards(&runtime.order))
    BREAK("!unit->unsharded.prefetched", unit.unsharded.prefetched = true)
    BREAK("!runtime->reducing", runtime.reducing = &unit)
    BREAK("!unit->reshard_hook", unit.reshard_hook = (PyObject *)&unit)
    BREAK("order.num_post == 0", order_record_post_forward(&runtime.order, &unit.place))
    BREAK("are_units(order, order->post", order_record_post_forward(&runtime.order, &unit.place),
          runtime.order.post[0] = 1)
    BREAK("are_units(order, order->pre", runtime.order.pre[0] = 1)
    BREAK("order->num_pre <= order->num_units", runtime.order.num_pre = 2)
    BREAK("is_at(order->pre", unit.place.unit = 1)
    BREAK("backward_prefetch_limit >= 0", order_set_limits(&runtime.order, -1, 1))
    BREAK("!schedule->packs_beside", runtime.schedule.packs_beside = true)
    BREAK("!schedule->limiter.count", runtime.schedule.limiter.count = 1,
          runtime.schedule.limiter.num_frees = 1)
    BREAK("<= LIMITER_DEPTH", use_streams(), runtime.schedule.limiter.count = LIMITER_DEPTH + 1,
          runtime.schedule.limiter.num_frees = LIMITER_DEPTH + 1)
    BREAK("<= limiter->num_frees", use_streams(), runtime.schedule.limiter.count = 1)
    BREAK("schedule->all_reducing ||", use_streams(),
          runtime.schedule.scattered_output = (PyObject *)&runtime)
    BREAK("schedule_is_flushed(", runtime.schedule.reduction = REDUCTION_PACKED)
    BREAK("schedule_is_flushed(", use_streams(),
          runtime.schedule.unsharded.held = &handle.storage.copies[0].full)
    BREAK("schedule_is_flushed(", use_streams(), runtime.schedule.all_reducing = true)
    BREAK("!memcmp(&expected", operations.replaced[REPLACEABLE_GET_HANDLE_TO_PREFETCH] = (PyObject *)&unit)
    BREAK("!memcmp(&expected", operations.unshard = unit_post_backward_reshard)
    BREAK("!memcmp(&expected", operations.prefetch = NULL)
    return NULL;
}

static void nothing(void) {
}

/* What is broken in a process of its own, as it is to end: by `begin_with`, and by an invariant's number
 * where one is given. What it says is kept in `said`. */
static bool aborts_after(void (*begin_with)(void), int broken, char *said, size_t size) {
    int status = 0, ends[2];
    fflush(NULL);
    CHECK(pipe(ends) == 0);
    pid_t child = fork();
    if (child == 0) {
        if (dup2(ends[1], STDERR_FILENO) < 0)
            _exit(2);
        begin();
        begin_runtime();
        memset(&operations, 0, sizeof operations); /* what this process has broken to know its name */
        operations_init(&operations);
        begin_with();
        break_one(broken);
        handle_check(&handle);
        runtime_check(&runtime);
        _exit(0);
    }
    close(ends[1]);
    size_t length = 0; /* not every C library writes a message at once */
    for (ssize_t more = 1; more > 0; length += (size_t)more) {
        more = read(ends[0], said + length, size - 1 - length);
        CHECK(more >= 0);
    }
    close(ends[0]);
    CHECK(child > 0 && waitpid(child, &status, 0) == child);
    said[length] = '\0';
    return WIFSIGNALED(status) && WTERMSIG(status) == SIGABRT;
}

TEST(test_a_broken_invariant_ends_the_process_and_is_named) {
    char said[1024];
    CHECK(!aborts_after(nothing, -1, said, sizeof said));
    CHECK(!aborts_after(use_streams, -1, said, sizeof said));
    int count = 0;
    for (const char *invariant; begin(), begin_runtime(), (invariant = break_one(count)); count++) {
        CHECK(aborts_after(nothing, count, said, sizeof said));
        if (!strstr(said, invariant))
            fprintf(stderr, "expected %s in: %s", invariant, said);
        CHECK(strstr(said, invariant));
    }
    CHECK_EQUAL(count, 54);
}

int main(void) {
    return run_tests();
}
