/* links, with stand-ins of its own: runtime/forward.c runtime/backward.c runtime/unshard.c runtime/reshard.c runtime/prefetch.c
          runtime/reduce.c runtime/optional.c runtime/order.c runtime/runtime.c runtime/unit.c handle/handle.c handle/flat_param.c */
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stdlib.h>
#include <string.h>

#include "harness.h"

#include "runtime/callbacks.h"
#include "runtime/operations.h"
#include "runtime/runtime.h"

/* ---- stand-in for Python's allocator: the program has no Python ---- */

void *PyMem_Calloc(size_t count, size_t size) {
    return calloc(count, size);
}

void *PyMem_Realloc(void *memory, size_t size) {
    return realloc(memory, size);
}

void PyMem_Free(void *memory) {
    free(memory);
}

/* ---- stand-ins below the policy, which log each unshard, free and flush ---- */

enum { UNITS = 4 };

static struct unit units[UNITS];
static struct handle handles[UNITS];
static struct unit *pointers[UNITS];
static struct runtime runtime;
static char call_log[256];

static void log_call(const char *call, const struct unit *unit) {
    char word[16];
    snprintf(word, sizeof word, "%s%s%d", call_log[0] ? " " : "", call, unit ? (int)unit->place.unit : 0);
    strncat(call_log, word, sizeof call_log - strlen(call_log) - 1);
}

/* Return true if the log since the last call is `expected`, and clear the log. */
static bool log_is(const char *expected) {
    bool same = !strcmp(call_log, expected);
    if (!same)
        fprintf(stderr, "log: %s, expected: %s\n", call_log, expected);
    call_log[0] = '\0';
    return same;
}

/* Stand-in for the all-gather. */
int operations_unshard(struct unit *unit) {
    log_call("unshard", unit);
    unit->handle->storage.param_state = PARAM_UNSHARDED;
    return 0;
}

int storage_reshard(struct storage *storage, bool free_storage) {
    int i = 0;
    while (&handles[i].storage != storage)
        i++;
    if (!free_storage || storage->param_state == PARAM_SHARDED)
        return 0;
    log_call("free", &units[i]);
    storage->param_state = PARAM_SHARDED;
    return 0;
}

int handle_pre_unshard(struct handle *handle) {
    CHECK(handle->storage.param_state == PARAM_SHARDED);
    return 0;
}

int schedule_end_unshard(struct schedule *schedule, struct unshard_mark *mark, int result) {
    CHECK(schedule == &runtime.schedule && !mark->pending);
    return result;
}

int schedule_begin_step(struct schedule *schedule) {
    CHECK(schedule == &runtime.schedule);
    return 0;
}

int deferred_free_flush(struct deferred_free *unsharded) {
    CHECK(unsharded == &runtime.schedule.unsharded);
    strncat(call_log, " flush", sizeof call_log - strlen(call_log) - 1);
    return 0;
}

int schedule_flush(struct schedule *schedule) {
    return deferred_free_flush(&schedule->unsharded);
}

int operations_post_backward_reshard(struct unit *unit) {
    return unit_post_backward_reshard(unit);
}

/* ---- stand-ins without influence on the policy ---- */

PyObject *PyExc_RuntimeError;
PyObject *PyExc_TypeError;
struct progress progress;
struct callbacks callbacks;
struct torch_names torch_names;
PyObject _Py_NoneStruct;
PyObject *operations_replaced[REPLACEABLES];

int unit_error(PyObject *type, int64_t rank, PyObject *unit, const char *format, ...) {
    (void)type;
    (void)rank;
    (void)unit;
    fprintf(stderr, "raised: %s\n", format);
    exit(1);
}

int flat_param_error(const struct flat_param *param, PyObject *type, const char *format, ...) {
    (void)param;
    return unit_error(type, 0, NULL, format);
}

int flat_param_refuse(const struct flat_param *param, const char *from, const char *to, const char *remedy) {
    (void)from;
    (void)to;
    return flat_param_error(param, NULL, remedy);
}

void profile_end(PyObject *range) {
    CHECK(!range);
}

static int64_t num_writes; /* write counter of every unit */

#define ANSWERS(answer, type, name, ...)                                                                     \
    type name(__VA_ARGS__) {                                                                                 \
        return answer;                                                                                       \
    }
#define ENDS(type, name, ...)                                                                                \
    type name(__VA_ARGS__) {                                                                                 \
        exit(1);                                                                                             \
    }
#define DOES_NOTHING(name, ...)                                                                              \
    void name(__VA_ARGS__) {                                                                                 \
    }

ENDS(void, _Py_Dealloc, PyObject *object)
ENDS(PyObject *, PyErr_NoMemory, void)
DOES_NOTHING(PyErr_Clear, void)
DOES_NOTHING(collective_group_fini, struct collective_group *group)
DOES_NOTHING(storage_drop_snapshot, struct storage *storage)
ANSWERS(NULL, PyObject *, PyErr_Occurred, void)
ANSWERS(NULL, PyObject *, profile_begin, const char *name)
ANSWERS(NULL, PyObject *, profile_begin_inner, const char *name)
ANSWERS(true, bool, torch_grad_enabled, void)
ANSWERS(0, int, torch_keeps_graph, void)
ANSWERS(0, int, operations_reshard, struct unit *part, bool free_storage)
ANSWERS(0, int, param_views_expose_views, struct param_views *param_views, PyObject *views)
ANSWERS(0, int, param_views_expose_sharded, struct param_views *param_views, PyObject *shard, PyObject *views)
ANSWERS(0, int, writeback_check_views, struct handle *handle)
ANSWERS(0, int, handle_writeback_views, struct handle *handle)
ANSWERS(0, int, handle_writeback_forward, struct handle *handle)
ANSWERS(false, bool, writeback_pop_copied, struct handle *handle)
ANSWERS(num_writes, int64_t, writeback_count_writes, const struct handle *handle)
ANSWERS(0, long long, unit_rank, const struct unit *unit)
ANSWERS(1, int, flat_param_is_trainable, const struct flat_param *param)
ANSWERS(0, int, storage_wait_unshard, struct storage *storage)
ANSWERS(0, int, stream_enter, struct streams *streams, enum stream_role role)
ANSWERS(0, int, schedule_wait_unshard, struct schedule *schedule, struct unshard_mark *mark)
DOES_NOTHING(limiter_add_free, struct limiter *limiter, struct streams *streams, stream_event last_use)

/* ---- functions that are linked and never called ---- */

ENDS(PyObject *, operations_call, struct unit *unit, enum replaceable which, PyObject *a, PyObject *b,
     PyObject *c)
ENDS(int, limiter_wait, struct limiter *limiter, struct streams *streams)
ENDS(int, schedule_wait_reduced, struct schedule *schedule)
ENDS(int, schedule_end_pre_unshard, struct schedule *schedule, bool uploads, int result)
ENDS(int, storage_alloc_unsharded, struct storage *storage)
ENDS(bool, storage_needs_pre_unshard, const struct storage *storage)
ENDS(int, storage_unshard_started, struct storage *storage, PyObject *work)
ENDS(int, storage_pre_unshard, struct storage *storage)
ENDS(int, handle_unshard, struct handle *handle)
ENDS(int, storage_unshard, struct storage *storage, struct unshard_batch *batch)
ENDS(int, handle_use_precision, struct handle *handle, enum precision precision)
ENDS(int, storage_abandon_unshard, struct storage *storage)
ENDS(bool, collective_can_coalesce, const struct collective_group *group)
ENDS(PyObject *, collective_all_gather_coalesced, const struct collective_group *group, PyObject *outputs,
     PyObject *inputs)
ENDS(int, callbacks_call, PyObject *function, PyObject *a, PyObject *b)
ENDS(void, PyErr_Fetch, PyObject **type, PyObject **value, PyObject **traceback)
ENDS(void, PyErr_NormalizeException, PyObject **type, PyObject **value, PyObject **traceback)
ENDS(int, PyException_SetTraceback, PyObject *error, PyObject *traceback)
ENDS(PyObject *, PyException_GetTraceback, PyObject *error)
ENDS(void, PyErr_Restore, PyObject *type, PyObject *value, PyObject *traceback)
ENDS(PyObject *, PyObject_CallFunction, PyObject *function, const char *format, ...)
ENDS(PyObject *, PyDict_GetItemWithError, PyObject *dict, PyObject *key)
ENDS(PyObject *, PyObject_GetAttr, PyObject *object, PyObject *name)
ENDS(PyObject *, PyObject_GetAttrString, PyObject *object, const char *name)
ENDS(int, PyObject_IsTrue, PyObject *object)
ENDS(PyObject *, PyWeakref_GetObject, PyObject *reference)
ENDS(PyObject *, PyList_New, Py_ssize_t count)

/* ---- a model: a root and three inner units ---- */

static void build(enum sharding_strategy strategy, enum backward_prefetch backward_prefetch,
                  bool forward_prefetch) {
    order_fini(&runtime.order);
    memset(handles, 0, sizeof handles);
    runtime = (struct runtime){.units = pointers, .num_units = UNITS};
    CHECK_EQUAL(order_init(&runtime.order, UNITS), 0);
    for (int i = 0; i < UNITS; i++) {
        handles[i].param.strategy = strategy;
        handles[i].param.sharded = strategy != NO_SHARD;
        handles[i].storage.copy = handles[i].storage.copies;
        units[i] = (struct unit){
            .handle = &handles[i],
            .runtime = &runtime,
            .options = {.backward_prefetch = backward_prefetch, .forward_prefetch = forward_prefetch},
            .is_root = i == 0,
            .sync_gradients = true,
            .place = {.unit = i, .pre_forward = -1, .post_forward = -1},
            .name_index = -1};
        pointers[i] = &units[i];
    }
    call_log[0] = '\0';
}

static void end_forward(int i, bool expected) {
    units[i].needs_pre_backward_unshard = expected && units[i].handle;
    CHECK_EQUAL(unit_reshard_after_forward(&units[i]), 0);
}

/* Run a forward of the root in which the inner units from `first` on run. */
static void forward_from(int first, bool expected) {
    runtime.num_forwards++;
    CHECK_EQUAL(runtime_check_kept(&runtime), 0);
    CHECK_EQUAL(runtime_reshard_stale(&runtime), 0);
    CHECK_EQUAL(unit_unshard_for_forward(&units[0]), 0);
    for (int i = first; i < UNITS; i++) {
        CHECK_EQUAL(unit_unshard_for_forward(&units[i]), 0);
        end_forward(i, expected);
    }
    end_forward(0, expected);
}

static void forward(bool expected) {
    forward_from(1, expected);
}

static void post_backward(int i) {
    CHECK_EQUAL(handle_set_training_state(&handles[i], USE_BACKWARD_POST), 0);
    CHECK_EQUAL(unit_post_backward_reshard(&units[i]), 0);
}

static void backward(void) {
    CHECK_EQUAL(unit_unshard_for_backward(&units[0]), 0);
    for (int i = UNITS - 1; i > 0; i--) {
        CHECK_EQUAL(unit_unshard_for_backward(&units[i]), 0);
        post_backward(i);
    }
    post_backward(0);
}

static void end_backward(void) {
    CHECK_EQUAL(runtime_reshard_units(&runtime), 0);
    CHECK_EQUAL(runtime_record_kept(&runtime), 0);
    for (int i = 0; i < UNITS; i++) {
        CHECK_EQUAL(handle_set_training_state(&handles[i], USE_IDLE), 0);
        units[i].unsharded.prefetched = false;
        units[i].place.post_forward = -1;
    }
    order_next_iteration(&runtime.order);
}

/* ---- tests ---- */

TEST(test_full_shard_frees_each_unit_but_the_root_after_its_forward) {
    build(FULL_SHARD, PREFETCH_NONE, false);
    forward(true);
    CHECK(log_is("unshard0 unshard1 free1 unshard2 free2 unshard3 free3"));
    backward();
    CHECK(log_is("unshard3 free3 flush unshard2 free2 flush unshard1 free1 flush free0 flush"));
}

TEST(test_a_forward_without_backward_frees_all_units_at_once) {
    build(SHARD_GRAD_OP, PREFETCH_BACKWARD_PRE, false);
    forward(false);
    CHECK(log_is("unshard0 unshard1 free1 unshard2 free2 unshard3 free3 free0 flush"));
}

TEST(test_shard_grad_op_keeps_each_unit_for_its_backward) {
    build(SHARD_GRAD_OP, PREFETCH_BACKWARD_PRE, false);
    forward(true);
    CHECK(log_is("unshard0 unshard1 unshard2 unshard3"));
    backward();
    CHECK(log_is("free3 flush free2 flush free1 flush free0 flush"));
}

TEST(test_under_no_sync_shard_grad_op_stays_unsharded) {
    for (enum sharding_strategy strategy = FULL_SHARD; strategy <= SHARD_GRAD_OP; strategy++) {
        build(strategy, PREFETCH_NONE, false);
        for (int i = 0; i < UNITS; i++)
            units[i].sync_gradients = false;
        forward(true);
        backward();
        end_backward();
        for (int i = 0; i < UNITS; i++)
            CHECK_EQUAL(handles[i].storage.param_state == PARAM_UNSHARDED, strategy == SHARD_GRAD_OP);
    }
}

TEST(test_no_shard_frees_its_copies_at_once) {
    build(NO_SHARD, PREFETCH_NONE, false);
    forward(true);
    CHECK(log_is("unshard0 unshard1 free1 unshard2 free2 unshard3 free3 free0"));
}

TEST(test_a_forward_unshards_stale_units_again) {
    build(SHARD_GRAD_OP, PREFETCH_BACKWARD_PRE, false);
    forward(true);
    call_log[0] = '\0';
    forward_from(2, true);
    CHECK(log_is("free0 free1 free2 free3 unshard0 unshard2 unshard3"));
}

TEST(test_a_unit_that_runs_twice_in_one_forward_is_unsharded_once) {
    build(SHARD_GRAD_OP, PREFETCH_BACKWARD_PRE, false);
    forward(true);
    call_log[0] = '\0';
    CHECK_EQUAL(unit_unshard_for_forward(&units[1]), 0);
    end_forward(1, true);
    CHECK(log_is(""));
}

TEST(test_an_unused_prefetch_is_freed_with_the_forward) {
    build(FULL_SHARD, PREFETCH_NONE, true);
    forward(true);
    backward();
    end_backward();
    call_log[0] = '\0';
    forward_from(3, false); /* prefetches unit 1 after the root, and no other */
    CHECK(log_is("unshard0 unshard1 unshard3 free3 free0 free1 flush"));
    CHECK(!units[1].unsharded.prefetched);
}

TEST(test_units_kept_after_no_sync_are_reused_unless_parameters_were_written) {
    for (int written = 0; written < 2; written++) {
        build(SHARD_GRAD_OP, PREFETCH_NONE, false);
        for (int i = 0; i < UNITS; i++)
            units[i].sync_gradients = false;
        forward(true);
        backward();
        end_backward();
        num_writes += written;
        call_log[0] = '\0';
        forward(true);
        CHECK(log_is(written ? "free0 unshard0 free1 unshard1 free2 unshard2 free3 unshard3" : ""));
        forward(true); /* the forward before had no backward */
        CHECK(log_is("free0 free1 free2 free3 unshard0 unshard1 unshard2 unshard3"));
    }
}

TEST(test_the_second_forward_prefetches_in_the_order_of_the_first) {
    build(FULL_SHARD, PREFETCH_NONE, true);
    forward(true);
    CHECK(log_is("unshard0 unshard1 free1 unshard2 free2 unshard3 free3"));
    backward();
    end_backward();
    call_log[0] = '\0';
    forward(true);
    CHECK(log_is("unshard0 unshard1 unshard2 free1 unshard3 free2 free3"));
}

TEST(test_limits_set_the_number_of_prefetched_units) {
    build(FULL_SHARD, PREFETCH_BACKWARD_PRE, true);
    order_set_limits(&runtime.order, 2, 0);
    forward(true);
    call_log[0] = '\0';
    backward();
    CHECK(log_is("unshard3 unshard2 unshard1 free3 flush free2 flush free1 flush free0 flush"));
    end_backward();
    order_set_limits(&runtime.order, 0, 2);
    forward(true);
    CHECK(log_is("unshard0 unshard1 unshard2 unshard3 free1 free2 free3"));
    backward();
    CHECK(log_is("unshard3 free3 flush unshard2 free2 flush unshard1 free1 flush free0 flush"));
}

TEST(test_backward_post_prefetches_before_the_unit_is_freed) {
    build(FULL_SHARD, PREFETCH_BACKWARD_POST, false);
    forward(true);
    call_log[0] = '\0';
    backward();
    CHECK(log_is("unshard3 free3 unshard2 flush free2 unshard1 flush free1 flush free0 flush"));
}

TEST(test_a_frozen_unit_is_resharded_once_in_backward) {
    build(FULL_SHARD, PREFETCH_NONE, false);
    forward(true);
    call_log[0] = '\0';
    CHECK_EQUAL(unit_reshard_only(&units[3]), 0);
    CHECK(log_is(""));
    CHECK_EQUAL(unit_unshard_for_backward(&units[3]), 0);
    CHECK_EQUAL(unit_reshard_only(&units[3]), 0);
    CHECK_EQUAL(unit_reshard_only(&units[3]), 0);
    CHECK(log_is("unshard3 free3 flush"));
}

TEST(test_the_end_of_a_backward_reshards_all_units) {
    build(FULL_SHARD, PREFETCH_BACKWARD_PRE, false);
    forward(true);
    CHECK_EQUAL(unit_unshard_for_backward(&units[3]), 0);
    call_log[0] = '\0';
    end_backward();
    CHECK(log_is("free0 free2 free3"));
}

TEST(test_a_backward_inside_a_forward_reshards_only_its_units) {
    build(FULL_SHARD, PREFETCH_BACKWARD_PRE, false);
    forward(true);
    CHECK_EQUAL(unit_unshard_for_backward(&units[3]), 0);
    call_log[0] = '\0';
    runtime.num_in_forward = 1;
    CHECK_EQUAL(runtime_reshard_units(&runtime), 0);
    CHECK(log_is("free2 free3"));
    runtime.num_in_forward = 0;
}

/* Run a step in which units 1 and 2 are optional units of the root, which run if `runs`. */
static void optional_step(bool runs) {
    optional_add(&units[2], &units[0]);
    optional_add(&units[1], &units[0]);
    CHECK_EQUAL(unit_unshard_for_forward(&units[0]), 0);
    for (int i = runs ? 1 : 3; i < UNITS; i++) {
        CHECK_EQUAL(unit_unshard_for_forward(&units[i]), 0);
        end_forward(i, true);
    }
    end_forward(0, true);
    strcat(call_log, " |");
    CHECK_EQUAL(unit_unshard_for_backward(&units[0]), 0);
    for (int i = UNITS - 1; i >= (runs ? 1 : 3); i--) {
        CHECK_EQUAL(unit_unshard_for_backward(&units[i]), 0);
        post_backward(i);
    }
    CHECK_EQUAL(optional_end_backward(&units[0]), 0);
    post_backward(0);
}

TEST(test_optional_units_are_unsharded_and_resharded_with_their_enclosing_unit) {
    for (int runs = 0; runs < 2; runs++) {
        build(FULL_SHARD, PREFETCH_BACKWARD_PRE, true);
        optional_step(runs);
        CHECK(log_is("unshard0 unshard1 unshard2 unshard3 free3 free1 free2 | "
                     "unshard1 unshard2 unshard3 free3 flush free1 flush free2 flush free0 flush"));
        build(SHARD_GRAD_OP, PREFETCH_BACKWARD_POST, false);
        optional_step(runs);
        CHECK(
            log_is("unshard0 unshard1 unshard2 unshard3 | free3 flush free1 flush free2 flush free0 flush"));
    }
}

int main(void) {
    const int failed = run_tests();
    order_fini(&runtime.order);
    return failed;
}
