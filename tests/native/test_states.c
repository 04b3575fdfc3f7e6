/* links: handle/states.c runtime/states.c runtime/order.c runtime/operations.c torch/deferred_free.c */
#include <signal.h>
#include <stdarg.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include "harness.h"
#include "python_memory.h"

#include "handle/unit_error.h"
#include "runtime/operations.h"
#include "runtime/runtime.h"

/* Of Python, the tables need what raises an exception alone. */
PyObject *PyExc_RuntimeError, *PyExc_ValueError;
PyObject _Py_NoneStruct = {.ob_refcnt = 1000};
static int num_raised;
static const char *from_in_error, *to_in_error;

int unit_error(PyObject *type, int64_t rank, PyObject *unit, const char *format, ...) {
    va_list arguments;
    (void)type;
    (void)rank;
    (void)unit;
    CHECK(strstr(format, "illegal transition from %s to %s"));
    va_start(arguments, format);
    from_in_error = va_arg(arguments, const char *);
    to_in_error = va_arg(arguments, const char *);
    va_end(arguments);
    num_raised++;
    return -1;
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

/* No order is validated here. */
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

int buffer_free(struct buffer *buffer) {
    CHECK(!buffer);
    return 0;
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
    handle.call_guards = (struct call_guards){.all = &layer, .count = 1, .placed = true};
    begin_param();
    handle.param_views.count = 3;
    handle.writeback.storage = &handle.storage;
    handle.writeback.param_views = &handle.param_views;
    handle.writeback.param = &handle.param;
    handle.storage.local_shard = &shard;
    handle.storage.copies[0].full.tensor = &full;
    attributes = (struct entries){.names = {"_local_shard", "_full_param_padded"}, .values = {&shard, &full}};
    handle.attributes.dict = (PyObject *)&attributes;
    handle.storage.param = handle.param_views.param = handle.gradients.param = &handle.param;
    handle.gradients.storage = &handle.storage;
    handle.storage.copy = handle.storage.copies;
    handle.storage.copies[0].full.allocated = true;
}

static void put_param_state(int state) {
    handle.storage.param_state = (enum param_state)state;
}

static int move_param_state(int state) {
    return storage_set_state(&handle.storage, (enum param_state)state);
}

static int param_state_now(void) {
    return handle.storage.param_state;
}

static void put_shown(int shown) {
    handle.param_views.shown = (enum shown)shown;
}

static int move_shown(int shown) {
    return param_views_set_shown(&handle.param_views, (enum shown)shown);
}

static int shown_now(void) {
    return handle.param_views.shown;
}

static void put_kind(int kind) {
    handle.gradients.kind = (enum grad_kind)kind;
}

static int move_kind(int kind) {
    return gradients_set_kind(&handle.gradients, (enum grad_kind)kind);
}

static int kind_now(void) {
    return handle.gradients.kind;
}

static void put_training_state(int state) {
    handle.training_state = (enum training_state)state;
}

static int move_training_state(int state) {
    return handle_set_training_state(&handle, (enum training_state)state);
}

static int training_state_now(void) {
    return handle.training_state;
}

static struct unit unit;

static void put_phase(int phase) {
    unit.phase = (enum unit_phase)phase;
}

static int move_phase(int phase) {
    return unit_set_phase(&unit, (enum unit_phase)phase);
}

static int phase_now(void) {
    return unit.phase;
}

static struct schedule schedule;

static void put_reduction(int state) {
    schedule.reduction = (enum reduction_state)state;
}

static int move_reduction(int state) {
    return schedule_set_reduction(&schedule, (enum reduction_state)state, &handle.param);
}

static int reduction_now(void) {
    return schedule.reduction;
}

struct machine {
    void (*put)(int state);
    int (*move)(int state);
    int (*now)(void);
    int num_states;
};

/* `legal`: one row per state, with a mark for each it may become. */
static void check_table(const struct machine *machine, const char *const *legal) {
    for (int from = 0; from < machine->num_states; from++) {
        for (int to = 0; to < machine->num_states; to++) {
            bool is_legal = legal[from][to] == 'x';
            begin();
            machine->put(from);
            int raised_before = num_raised;
            CHECK_EQUAL(machine->move(to), is_legal ? 0 : -1);
            CHECK_EQUAL(machine->now(), is_legal ? to : from);
            CHECK_EQUAL(num_raised - raised_before, is_legal ? 0 : 1);
        }
    }
}

static void test_param_state_refuses_every_illegal_transition(void) {
    static const struct machine machine = {put_param_state, move_param_state, param_state_now, PARAM_STATES};
    /* SHARDED, UNSHARDING, UNSHARDED */
    static const char *const legal[] = {".x.", "x.x", "x.."};
    check_table(&machine, legal);
}

static void test_shown_refuses_every_illegal_transition(void) {
    static const struct machine machine = {put_shown, move_shown, shown_now, SHOWN_KINDS};
    /* NOTHING, SHARDED, VIEWS, FULL_PARAMS */
    static const char *const legal[] = {"xxxx", "x...", "x...", "x..."};
    check_table(&machine, legal);
}

static void test_gradients_refuse_every_illegal_transition(void) {
    static const struct machine machine = {put_kind, move_kind, kind_now, GRAD_KINDS};
    /* GRAD_NONE, GRAD_SHARDED, GRAD_UNSHARDED */
    static const char *const legal[] = {"xxx", "xx.", "xx."};
    check_table(&machine, legal);
}

static void test_training_state_refuses_every_illegal_transition(void) {
    static const struct machine machine = {put_training_state, move_training_state, training_state_now,
                                           USE_STATES};
    /* IDLE, FORWARD, BACKWARD_PRE, BACKWARD_POST, SUMMON_FULL_PARAMS */
    static const char *const legal[] = {"xxxxx", "x....", "x..x.", "xxxx.", "x...."};
    check_table(&machine, legal);
}

static void test_phase_refuses_every_illegal_transition(void) {
    static const struct machine machine = {put_phase, move_phase, phase_now, UNIT_PHASES};
    /* IDLE, IN_STEP, SUMMON_FULL_PARAMS */
    static const char *const legal[] = {"xxx", "xx.", "x.."};
    check_table(&machine, legal);
}

static void test_a_reduction_refuses_every_illegal_transition(void) {
    static const struct machine machine = {put_reduction, move_reduction, reduction_now, REDUCTION_STATES};
    /* NONE, PACKED, ENQUEUED */
    static const char *const legal[] = {"xx.", "x.x", "x.."};
    check_table(&machine, legal);
}

static void test_an_illegal_transition_names_both_states(void) {
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

static void gather_without_storage(void) {
    handle.storage.copies[0].full.allocated = false;
    handle.storage.param_state = PARAM_UNSHARDED;
}

static void keep_a_collective_in_flight(void) {
    handle.storage.unshard_work = (PyObject *)&handle;
}

static void gather_in_two_precisions(void) {
    handle.storage.copies[1].full.allocated = true;
}

static void use_a_copy_of_another_handle(void) {
    static struct precision_copy stranger;
    handle.storage.copy = &stranger;
}

static void show_shards_without_original_parameters(void) {
    handle.param.use_orig_params = false;
    handle.param.params = NULL;
    handle.param_views.shown = SHOWN_SHARDED;
}

static void keep_wrapped_views_of_nobody(void) {
    handle.param_views.wrapped_views = (PyObject *)&handle;
}

static void hand_over_amid_a_backward(void) {
    handle.gradients.in_backward = true;
    handle.gradients.kind = GRAD_SHARDED;
}

static void reduce_without_an_output(void) {
    handle.gradients.work = (PyObject *)&handle;
}

static void keep_an_unsharded_gradient_of_what_is_not_sharded(void) {
    handle.param.strategy = NO_SHARD;
    handle.param.sharded = handle.param.layout.sharded = false;
    attributes.names[1] = NULL;
    handle.gradients.kind = GRAD_UNSHARDED;
}

static void shard_what_is_not_to_be_sharded(void) {
    handle.param.strategy = NO_SHARD;
}

static void shard_over_replicas_of_a_full_shard(void) {
    handle.param.replicate_group.group = &full;
}

static void lay_out_for_another_rank(void) {
    handle.param.layout.rank = 1;
}

static void lay_out_a_parameter_too_few(void) {
    handle.param.layout.num_params = 1;
}

static void shape_a_parameter_too_many(void) {
    handle.param.shapes = (PyObject *)&three;
}

static void find_a_parameter_nowhere(void) {
    static PyVarObject one = {.ob_size = 1};
    handle.param.param_views = (PyObject *)&one;
}

static void keep_original_parameters_unasked(void) {
    handle.param.use_orig_params = false;
}

static void lose_an_original_parameter(void) {
    static PyVarObject one = {.ob_size = 1};
    handle.param.params = (PyObject *)&one;
}

static void fill_fewer_param_views_than_there_are_parameters(void) {
    handle.param_views.count = 1;
}

static void publish_another_shard(void) {
    attributes.values[0] = &full;
}

static void publish_no_full_parameter(void) {
    attributes.names[1] = NULL;
}

static void publish_a_copy_of_low_precision(void) {
    attributes.names[2] = "_mp_shard";
    attributes.values[2] = &full;
}

static void take_changes_over_while_gathered(void) {
    handle.writeback.taken = true;
    handle.storage.param_state = PARAM_UNSHARDED;
}

static void look_at_a_parameter_that_is_not_there(void) {
    handle.writeback.unheld_turn = 2;
}

static void follow_edits_of_another_handle(void) {
    static struct storage stranger;
    handle.writeback.storage = &stranger;
}

static void offload_a_gradient_that_stays(void) {
    handle.gradients.offloaded = &full;
}

static void summon_without_saying_so(void) {
    handle.summon.full = &full;
}

static void receive_gradients_of_another_handle(void) {
    static struct flat_param stranger;
    handle.gradients.param = &stranger;
}

static void watch_a_gradient_that_is_not_shown(void) {
    handle.gradients.shown = Py_None;
    handle.gradients.kind = GRAD_UNSHARDED;
}

static void share_a_component_with_another_handle(void) {
    static struct flat_param stranger;
    handle.param_views.param = &stranger;
}

static void place_no_call_in_a_layer(void) {
    held_by_layer = NULL;
}

/* ---- of a root ---- */

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

static void leave_a_unit_in_a_step(void) {
    unit.phase = PHASE_IN_STEP;
}

static void leave_a_handle_in_use(void) {
    handle.training_state = USE_BACKWARD_POST;
}

static void leave_a_gradient_behind(void) {
    handle.gradients.pending = (PyObject *)&handle;
}

static void leave_a_gather_in_flight(void) {
    handle.storage.param_state = PARAM_UNSHARDING;
}

static void leave_a_unit_in_the_order(void) {
    CHECK_EQUAL(order_record_post_forward(&runtime.order, &unit.place), 0);
    order_forget_forwards(&runtime.order);
}

static void leave_a_forward_in_the_order(void) {
    CHECK_EQUAL(order_record_post_forward(&runtime.order, &unit.place), 0);
}

static void run_a_unit_that_is_not_there(void) {
    leave_a_forward_in_the_order();
    runtime.order.post[0] = 1;
}

static void order_a_unit_that_is_not_there(void) {
    runtime.order.pre[0] = 1;
}

static void order_more_units_than_there_are(void) {
    runtime.order.num_pre = 2;
}

static void forget_a_unit_in_the_order(void) {
    unit.place.unit = 1;
}

static void look_back_in_the_order(void) {
    order_set_limits(&runtime.order, -1, 1);
}

/* ---- of a schedule: some streams, or none ---- */

static void use_streams(void) {
    runtime.schedule.streams.backend = (const struct stream_backend *)&runtime;
}

static void pack_beside_without_streams(void) {
    runtime.schedule.packs_beside = true;
}

static void limit_without_streams(void) {
    runtime.schedule.limiter_count = 1;
    runtime.schedule.num_frees = 1;
}

static void limit_more_than_there_is_room_for(void) {
    use_streams();
    runtime.schedule.limiter_count = LIMITER_DEPTH + 1;
    runtime.schedule.num_frees = LIMITER_DEPTH + 1;
}

static void limit_more_than_was_freed(void) {
    use_streams();
    runtime.schedule.limiter_count = 1;
}

static void keep_the_output_of_a_reduction_that_is_over(void) {
    use_streams();
    runtime.schedule.scattered_output = (PyObject *)&runtime;
}

static void leave_gradients_packed(void) {
    runtime.schedule.reduction = REDUCTION_PACKED;
}

static void hold_back_a_buffer(void) {
    use_streams();
    runtime.schedule.unsharded.held = &handle.storage.copies[0].full;
}

static void leave_an_all_reduce_in_flight(void) {
    use_streams();
    runtime.schedule.all_reducing = true;
}

static void leave_a_unit_gathered_ahead(void) {
    order_place_set_prefetched(&unit.place, true);
}

static void leave_a_reduction_in_flight(void) {
    runtime.reducing = &unit;
}

static void leave_a_hook_on_inputs(void) {
    unit.reshard_hook = (PyObject *)&unit;
}

/* ---- of the table of operations ---- */

static int own_prefetch(struct unit *of, enum training_state state) {
    CHECK(of && state == USE_FORWARD);
    return 0;
}

static int call_prefetch(struct unit *of, enum training_state state) {
    return own_prefetch(of, state) - 1;
}

const struct operations operations_own = {.prefetch = own_prefetch};
const struct operations operations_calls = {.prefetch = call_prefetch};

static void replace_an_operation_in_name_alone(void) {
    operations.replaced[REPLACEABLE_GET_HANDLE_TO_PREFETCH] = (PyObject *)&unit;
}

static void call_what_was_put_nowhere(void) {
    operations.prefetch = call_prefetch;
}

static void leave_out_an_operation(void) {
    operations.prefetch = NULL;
}

static void test_what_takes_the_place_of_an_operation_is_called_until_it_is_given_back(void) {
    static PyObject function = {.ob_refcnt = 1000};
    operations_init(&operations);
    CHECK_EQUAL(operations.prefetch(&unit, USE_FORWARD), 0);
    CHECK_EQUAL(operations_replace(&operations, "_get_handle_to_prefetch", &function), 0);
    CHECK_EQUAL(operations.prefetch(&unit, USE_FORWARD), -1);
    CHECK_EQUAL(operations_replace(&operations, "_get_handle_to_prefetch", Py_None), 0);
    CHECK_EQUAL(operations.prefetch(&unit, USE_FORWARD), 0);
}

/* In a process of its own, as it is to end. What it says is kept in `said`. */
static bool aborts_after(void (*break_it)(void), char *said, size_t size) {
    int status = 0, ends[2];
    fflush(NULL);
    CHECK(pipe(ends) == 0);
    pid_t child = fork();
    if (child == 0) {
        if (dup2(ends[1], STDERR_FILENO) < 0)
            _exit(2);
        begin();
        begin_runtime();
        operations_init(&operations);
        break_it();
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

static void nothing(void) {
}

static void test_a_broken_invariant_ends_the_process_and_is_named(void) {
    static const struct {
        void (*break_it)(void);
        const char *invariant;
    } broken[] = {
        {gather_without_storage, "copy->full.allocated"},
        {keep_a_collective_in_flight, "!storage->unshard_work"},
        {gather_in_two_precisions, "copies[i].full.allocated"},
        {use_a_copy_of_another_handle, "copy >= storage->copies"},
        {show_shards_without_original_parameters, "!= SHOWN_SHARDED"},
        {keep_wrapped_views_of_nobody, "!param_views->wrapped_views"},
        {hand_over_amid_a_backward, "!gradients->in_backward"},
        {reduce_without_an_output, "!gradients->work"},
        {keep_an_unsharded_gradient_of_what_is_not_sharded, "!= GRAD_UNSHARDED"},
        {shard_what_is_not_to_be_sharded, "param->strategy != NO_SHARD"},
        {shard_over_replicas_of_a_full_shard, "!param->replicate_group.group"},
        {lay_out_for_another_rank, "param->shard_group.rank"},
        {lay_out_a_parameter_too_few, "param->layout.num_params == param->num_params"},
        {shape_a_parameter_too_many, "PyTuple_Size(param->shapes)"},
        {find_a_parameter_nowhere, "PyList_Size(param->param_views)"},
        {keep_original_parameters_unasked, "param->params != NULL"},
        {lose_an_original_parameter, "PyList_Size(param->params)"},
        {fill_fewer_param_views_than_there_are_parameters, "param_views->count >="},
        {publish_another_shard, "_local_shard"},
        {publish_no_full_parameter, "_full_param_padded"},
        {publish_a_copy_of_low_precision, "_mp_shard"},
        {take_changes_over_while_gathered, "!writeback->taken"},
        {look_at_a_parameter_that_is_not_there, "writeback->unheld_turn"},
        {follow_edits_of_another_handle, "handle->writeback.storage"},
        {offload_a_gradient_that_stays, "!gradients->offloaded"},
        {summon_without_saying_so, "!handle->summon.full"},
        {receive_gradients_of_another_handle, "handle->gradients.param"},
        {watch_a_gradient_that_is_not_shown, "!gradients->shown"},
        {share_a_component_with_another_handle, "param_views.param == &handle->param"},
        {place_no_call_in_a_layer, "layers->all[i].compiled"},
        {leave_a_unit_in_a_step, "unit->phase != PHASE_IN_STEP"},
        {leave_a_handle_in_use, "handle->training_state == USE_IDLE"},
        {leave_a_gradient_behind, "!handle->gradients.pending"},
        {leave_a_gather_in_flight, "!= PARAM_UNSHARDING"},
        {leave_a_unit_in_the_order, "is_at(order->post"},
        {leave_a_unit_gathered_ahead, "!unit->place.prefetched"},
        {leave_a_reduction_in_flight, "!runtime->reducing"},
        {leave_a_hook_on_inputs, "!unit->reshard_hook"},
        {leave_a_forward_in_the_order, "order.num_post == 0"},
        {run_a_unit_that_is_not_there, "are_units(order, order->post"},
        {order_a_unit_that_is_not_there, "are_units(order, order->pre"},
        {order_more_units_than_there_are, "order->num_pre <= order->num_units"},
        {forget_a_unit_in_the_order, "is_at(order->pre"},
        {look_back_in_the_order, "backward_prefetch_limit >= 0"},
        {pack_beside_without_streams, "!schedule->packs_beside"},
        {limit_without_streams, "!schedule->limiter_count"},
        {limit_more_than_there_is_room_for, "<= LIMITER_DEPTH"},
        {limit_more_than_was_freed, "<= schedule->num_frees"},
        {keep_the_output_of_a_reduction_that_is_over, "schedule->all_reducing ||"},
        {leave_gradients_packed, "schedule_is_flushed("},
        {hold_back_a_buffer, "schedule_is_flushed("},
        {leave_an_all_reduce_in_flight, "schedule_is_flushed("},
        {replace_an_operation_in_name_alone, "!memcmp(&expected"},
        {call_what_was_put_nowhere, "!memcmp(&expected"},
        {leave_out_an_operation, "!memcmp(&expected"},
    };
    char said[1024];
    CHECK(!aborts_after(nothing, said, sizeof said));
    CHECK(!aborts_after(use_streams, said, sizeof said));
    for (size_t i = 0; i < sizeof broken / sizeof *broken; i++) {
        CHECK(aborts_after(broken[i].break_it, said, sizeof said));
        if (!strstr(said, broken[i].invariant))
            fprintf(stderr, "expected %s in: %s", broken[i].invariant, said);
        CHECK(strstr(said, broken[i].invariant));
    }
}

int main(void) {
    RUN(test_param_state_refuses_every_illegal_transition);
    RUN(test_shown_refuses_every_illegal_transition);
    RUN(test_gradients_refuse_every_illegal_transition);
    RUN(test_training_state_refuses_every_illegal_transition);
    RUN(test_phase_refuses_every_illegal_transition);
    RUN(test_a_reduction_refuses_every_illegal_transition);
    RUN(test_an_illegal_transition_names_both_states);
    RUN(test_what_takes_the_place_of_an_operation_is_called_until_it_is_given_back);
    RUN(test_a_broken_invariant_ends_the_process_and_is_named);
    return 0;
}
