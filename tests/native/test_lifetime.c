/* links, with stand-ins of its own: runtime/forward.c runtime/backward.c runtime/unshard.c runtime/reshard.c runtime/prefetch.c
          runtime/reduce.c runtime/optional.c runtime/order.c runtime/runtime.c runtime/unit.c handle/handle.c handle/flat_param.c */
#include <string.h>

#include "harness.h"
#include "python_memory.h"

#include "runtime/callbacks.h"
#include "runtime/operations.h"
#include "runtime/runtime.h"

/* ---- what the decisions stand on: each gather and each free is written down ---- */

enum { UNITS = 4 };

static struct unit units[UNITS];
static struct handle handles[UNITS];
static struct unit *pointers[UNITS];
static struct runtime runtime;
static char said[256];

static void say(const char *what, const struct unit *unit) {
    char word[16];
    snprintf(word, sizeof word, "%s%s%d", said[0] ? " " : "", what, unit ? (int)unit->place.unit : 0);
    strncat(said, word, sizeof said - strlen(said) - 1);
}

/* The words since the last call. */
static bool it_said(const char *expected) {
    bool same = !strcmp(said, expected);
    if (!same)
        fprintf(stderr, "said: %s, expected: %s\n", said, expected);
    said[0] = '\0';
    return same;
}

/* In the place of the all-gather. */
static int gather(struct unit *unit) {
    say("gather", unit);
    unit->handle->storage.param_state = PARAM_UNSHARDED;
    return 0;
}

int storage_reshard(struct storage *storage, bool free_storage) {
    int i = 0;
    while (&handles[i].storage != storage)
        i++;
    if (!free_storage || storage->param_state == PARAM_SHARDED)
        return 0;
    say("free", &units[i]);
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

int schedule_release_deferred(struct schedule *schedule) {
    CHECK(schedule == &runtime.schedule);
    strncat(said, " flush", sizeof said - strlen(said) - 1);
    return 0;
}

int schedule_flush(struct schedule *schedule) {
    return schedule_release_deferred(schedule);
}

const struct operations operations_default = {.unshard = gather,
                                              .prefetch = unit_prefetch_in_order,
                                              .post_backward_reshard = unit_post_backward_reshard};

/* ---- what is of no matter here ---- */

PyObject *PyExc_RuntimeError;
struct progress progress;
struct callbacks callbacks;
struct torch_names torch_names;
PyObject _Py_NoneStruct;

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

static int64_t num_writes; /* of each unit */

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
ANSWERS(0, int, schedule_begin_unshard, struct schedule *schedule)
ANSWERS(0, int, schedule_wait_unshard, struct schedule *schedule, struct unshard_mark *mark)
ANSWERS(0, int, limiter_record_free, struct limiter *limiter, struct streams *streams)

/* ---- nor is what is never called ---- */

ENDS(int, limiter_wait, struct limiter *limiter, struct streams *streams)
ENDS(int, schedule_wait_reduced, struct schedule *schedule)
ENDS(int, schedule_begin_pre_unshard, struct schedule *schedule)
ENDS(int, schedule_end_pre_unshard, struct schedule *schedule, bool uploads, int result)
ENDS(int, storage_alloc_unsharded, struct storage *storage)
ENDS(bool, storage_needs_pre_unshard, const struct storage *storage)
ENDS(bool, storage_has_mixed_precision, const struct storage *storage)
ENDS(int, storage_unshard_started, struct storage *storage, PyObject *work)
ENDS(int, storage_pre_unshard, struct storage *storage)
ENDS(int, handle_unshard, struct handle *handle)
ENDS(int, storage_unshard_add, struct storage *storage, struct unshard_batch *batch)
ENDS(int, storage_unshard, struct storage *storage)
ENDS(int, handle_use_precision, struct handle *handle, enum precision precision)
ENDS(void, storage_abandon_unshard, struct storage *storage)
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

/* ---- a root, and three units inside ---- */

static void build(enum sharding_strategy strategy, enum backward_prefetch backward_prefetch,
                  bool forward_prefetch) {
    order_fini(&runtime.order);
    memset(handles, 0, sizeof handles);
    runtime = (struct runtime){.units = pointers, .num_units = UNITS, .operations = &operations_default};
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
            .name_index = -1};
        order_place_init(&units[i].place, i);
        pointers[i] = &units[i];
    }
    said[0] = '\0';
}

static void end_forward(int i, bool expected) {
    unit_expect_backward(&units[i], expected);
    CHECK_EQUAL(unit_reshard_after_forward(&units[i]), 0);
}

/* As the root's, up to the units inside; of those `first` and all after it run. */
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
        order_place_end_step(&units[i].place);
    }
    order_next_iteration(&runtime.order);
}

/* ---- tests ---- */

TEST(test_full_shard_frees_each_unit_but_the_root_after_its_forward) {
    build(FULL_SHARD, PREFETCH_NONE, false);
    forward(true);
    CHECK(it_said("gather0 gather1 free1 gather2 free2 gather3 free3"));
    backward();
    CHECK(it_said("gather3 free3 flush gather2 free2 flush gather1 free1 flush free0 flush"));
}

TEST(test_without_a_backward_to_come_all_is_freed_and_nothing_held_back) {
    build(SHARD_GRAD_OP, PREFETCH_BACKWARD_PRE, false);
    forward(false);
    CHECK(it_said("gather0 gather1 free1 gather2 free2 gather3 free3 free0 flush"));
}

TEST(test_shard_grad_op_keeps_each_unit_for_its_backward) {
    build(SHARD_GRAD_OP, PREFETCH_BACKWARD_PRE, false);
    forward(true);
    CHECK(it_said("gather0 gather1 gather2 gather3"));
    backward();
    CHECK(it_said("free3 flush free2 flush free1 flush free0 flush"));
}

TEST(test_under_no_sync_a_strategy_that_keeps_parameters_stays_gathered) {
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

TEST(test_copies_of_what_is_not_sharded_are_freed_at_once) {
    build(NO_SHARD, PREFETCH_NONE, false);
    forward(true);
    CHECK(it_said("gather0 gather1 free1 gather2 free2 gather3 free3 free0"));
}

TEST(test_a_forward_gathers_anew_what_one_without_backward_has_left) {
    build(SHARD_GRAD_OP, PREFETCH_BACKWARD_PRE, false);
    forward(true);
    said[0] = '\0';
    forward_from(2, true);
    CHECK(it_said("free0 free1 free2 free3 gather0 gather2 gather3"));
}

TEST(test_a_unit_that_runs_again_in_one_forward_is_gathered_once) {
    build(SHARD_GRAD_OP, PREFETCH_BACKWARD_PRE, false);
    forward(true);
    said[0] = '\0';
    CHECK_EQUAL(unit_unshard_for_forward(&units[1]), 0);
    end_forward(1, true);
    CHECK(it_said(""));
}

TEST(test_what_was_gathered_ahead_in_vain_is_freed_with_the_forward) {
    build(FULL_SHARD, PREFETCH_NONE, true);
    forward(true);
    backward();
    end_backward();
    said[0] = '\0';
    forward_from(3, false); /* 1 is expected after the root, and 2 and 3 after that */
    CHECK(it_said("gather0 gather1 gather3 free3 free0 free1 flush"));
    CHECK(!units[1].unsharded.prefetched);
}

TEST(test_what_no_sync_keeps_is_for_the_next_forward_unless_parameters_were_written_to) {
    for (int written = 0; written < 2; written++) {
        build(SHARD_GRAD_OP, PREFETCH_NONE, false);
        for (int i = 0; i < UNITS; i++)
            units[i].sync_gradients = false;
        forward(true);
        backward();
        end_backward();
        num_writes += written;
        said[0] = '\0';
        forward(true);
        CHECK(it_said(written ? "free0 gather0 free1 gather1 free2 gather2 free3 gather3" : ""));
        forward(true); /* no backward came */
        CHECK(it_said("free0 free1 free2 free3 gather0 gather1 gather2 gather3"));
    }
}

TEST(test_the_first_forward_tells_the_next_what_to_gather_ahead) {
    build(FULL_SHARD, PREFETCH_NONE, true);
    forward(true);
    CHECK(it_said("gather0 gather1 free1 gather2 free2 gather3 free3"));
    backward();
    end_backward();
    said[0] = '\0';
    forward(true);
    CHECK(it_said("gather0 gather1 gather2 free1 gather3 free2 free3"));
}

TEST(test_limits_say_how_many_units_are_gathered_ahead) {
    build(FULL_SHARD, PREFETCH_BACKWARD_PRE, true);
    order_set_limits(&runtime.order, 2, 0);
    forward(true);
    said[0] = '\0';
    backward();
    CHECK(it_said("gather3 gather2 gather1 free3 flush free2 flush free1 flush free0 flush"));
    end_backward();
    order_set_limits(&runtime.order, 0, 2);
    forward(true);
    CHECK(it_said("gather0 gather1 gather2 gather3 free1 free2 free3"));
    backward();
    CHECK(it_said("gather3 free3 flush gather2 free2 flush gather1 free1 flush free0 flush"));
}

TEST(test_after_a_unit_the_next_is_gathered_before_its_memory_goes) {
    build(FULL_SHARD, PREFETCH_BACKWARD_POST, false);
    forward(true);
    said[0] = '\0';
    backward();
    CHECK(it_said("gather3 free3 gather2 flush free2 gather1 flush free1 flush free0 flush"));
}

TEST(test_a_frozen_unit_is_given_back_once_amid_its_backward) {
    build(FULL_SHARD, PREFETCH_NONE, false);
    forward(true);
    said[0] = '\0';
    CHECK_EQUAL(unit_reshard_only(&units[3]), 0);
    CHECK(it_said(""));
    CHECK_EQUAL(unit_unshard_for_backward(&units[3]), 0);
    CHECK_EQUAL(unit_reshard_only(&units[3]), 0);
    CHECK_EQUAL(unit_reshard_only(&units[3]), 0);
    CHECK(it_said("gather3 free3 flush"));
}

TEST(test_a_backward_that_ends_leaves_nothing_gathered) {
    build(FULL_SHARD, PREFETCH_BACKWARD_PRE, false);
    forward(true);
    CHECK_EQUAL(unit_unshard_for_backward(&units[3]), 0);
    said[0] = '\0';
    end_backward();
    CHECK(it_said("free0 free2 free3"));
}

TEST(test_a_backward_within_a_forward_ends_for_its_own_units_alone) {
    build(FULL_SHARD, PREFETCH_BACKWARD_PRE, false);
    forward(true);
    CHECK_EQUAL(unit_unshard_for_backward(&units[3]), 0);
    said[0] = '\0';
    runtime.num_in_forward = 1;
    CHECK_EQUAL(runtime_reshard_units(&runtime), 0);
    CHECK(it_said("free2 free3"));
    runtime.num_in_forward = 0;
}

/* Units 1 and 2 belong to the root; whether they run, nothing tells. */
static void optional_step(bool runs) {
    optional_add(&units[2], &units[0]);
    optional_add(&units[1], &units[0]);
    CHECK_EQUAL(unit_unshard_for_forward(&units[0]), 0);
    for (int i = runs ? 1 : 3; i < UNITS; i++) {
        CHECK_EQUAL(unit_unshard_for_forward(&units[i]), 0);
        end_forward(i, true);
    }
    end_forward(0, true);
    strcat(said, " |");
    CHECK_EQUAL(unit_unshard_for_backward(&units[0]), 0);
    for (int i = UNITS - 1; i >= (runs ? 1 : 3); i--) {
        CHECK_EQUAL(unit_unshard_for_backward(&units[i]), 0);
        post_backward(i);
    }
    CHECK_EQUAL(optional_end_backward(&units[0]), 0);
    post_backward(0);
}

TEST(test_optional_units_come_and_go_with_the_unit_around_them) {
    for (int runs = 0; runs < 2; runs++) {
        build(FULL_SHARD, PREFETCH_BACKWARD_PRE, true);
        optional_step(runs);
        CHECK(it_said("gather0 gather1 gather2 gather3 free3 free1 free2 | "
                      "gather1 gather2 gather3 free3 flush free1 flush free2 flush free0 flush"));
        build(SHARD_GRAD_OP, PREFETCH_BACKWARD_POST, false);
        optional_step(runs);
        CHECK(it_said("gather0 gather1 gather2 gather3 | free3 flush free1 flush free2 flush free0 flush"));
    }
}

int main(void) {
    const int failed = run_tests();
    order_fini(&runtime.order);
    return failed;
}
