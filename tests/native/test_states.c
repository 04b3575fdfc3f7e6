/* links: handle/storage_state.c handle/slots_state.c handle/gradients_state.c handle/handle_state.c handle/layer_calls_check.c runtime/unit_state.c runtime/runtime_check.c */
#include <signal.h>
#include <stdarg.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include "harness.h"

#include "runtime/runtime.h"

/* Of Python, the tables need what raises an exception alone. */
PyObject *PyExc_RuntimeError;
static int num_raised;
static const char *from_in_error, *to_in_error;

PyObject *PyErr_Format(PyObject *type, const char *format, ...) {
    va_list arguments;
    (void)type;
    CHECK(strstr(format, "illegal transition from %s to %s"));
    va_start(arguments, format);
    (void)va_arg(arguments, long long);
    (void)va_arg(arguments, PyObject *);
    from_in_error = va_arg(arguments, const char *);
    to_in_error = va_arg(arguments, const char *);
    va_end(arguments);
    num_raised++;
    return NULL;
}

/* A layer's __dict__ is what it holds under the one name that is asked for. */
struct torch_names torch_names;

PyObject *PyDict_GetItemWithError(PyObject *dict, PyObject *key) {
    (void)key;
    return *(PyObject **)(void *)dict;
}

/* ---- one table each: `put` is what no code of the library may do ---- */

static struct handle handle;
static PyObject *held_by_layer;
static struct layer_call layer;

static void begin(void) {
    memset(&handle, 0, sizeof handle);
    held_by_layer = (PyObject *)&handle;
    layer = (struct layer_call){.attributes = (PyObject *)(void *)&held_by_layer};
    handle.layer_calls = (struct layer_calls){.all = &layer, .count = 1, .placed = true};
    handle.param.sharded = handle.param.use_orig_params = true;
    handle.storage.param = handle.slots.param = handle.gradients.param = &handle.param;
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
    handle.slots.shown = (enum shown)shown;
}

static int move_shown(int shown) {
    return slots_set_shown(&handle.slots, (enum shown)shown);
}

static int shown_now(void) {
    return handle.slots.shown;
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
    static const struct machine machine = {put_training_state, move_training_state, training_state_now, USE_STATES};
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

static void test_an_illegal_transition_names_both_states(void) {
    begin();
    CHECK_EQUAL(storage_set_state(&handle.storage, PARAM_UNSHARDED), -1);
    CHECK(!strcmp(from_in_error, "SHARDED") && !strcmp(to_in_error, "UNSHARDED"));
    handle.slots.shown = SHOWN_VIEWS;
    CHECK_EQUAL(slots_set_shown(&handle.slots, SHOWN_FULL_PARAMS), -1);
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
    handle.slots.shown = SHOWN_SHARDED;
}

static void keep_wrapped_views_of_nobody(void) {
    handle.slots.wrapped_views = (PyObject *)&handle;
}

static void hand_over_amid_a_backward(void) {
    handle.gradients.in_backward = true;
    handle.gradients.kind = GRAD_SHARDED;
}

static void reduce_without_an_output(void) {
    handle.gradients.work = (PyObject *)&handle;
}

static void keep_an_unsharded_gradient_of_what_is_not_sharded(void) {
    handle.param.sharded = false;
    handle.gradients.kind = GRAD_UNSHARDED;
}

static void share_a_component_with_another_handle(void) {
    static struct flat_param stranger;
    handle.slots.param = &stranger;
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
    unit.place.post_forward = -1;
    runtime = (struct runtime){.units = all_units, .num_units = 1};
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
    unit.place.post_forward = 3;
}

static void leave_a_reduction_in_flight(void) {
    runtime.reducing = &unit;
}

static void leave_a_hook_on_inputs(void) {
    unit.reshard_hook = (PyObject *)&unit;
}

/* In a process of its own, as it is to end. */
static bool aborts_after(void (*break_it)(void)) {
    int status = 0;
    fflush(NULL);
    pid_t child = fork();
    if (child == 0) {
        begin();
        begin_runtime();
        break_it();
        if (!freopen("/dev/null", "w", stderr))
            _exit(2);
        handle_check(&handle);
        runtime_check(&runtime);
        _exit(0);
    }
    CHECK(child > 0 && waitpid(child, &status, 0) == child);
    return WIFSIGNALED(status) && WTERMSIG(status) == SIGABRT;
}

static void nothing(void) {
}

static void test_a_broken_invariant_ends_the_process(void) {
    static void (*const broken[])(void) = {gather_without_storage,
                                           keep_a_collective_in_flight,
                                           gather_in_two_precisions,
                                           use_a_copy_of_another_handle,
                                           show_shards_without_original_parameters,
                                           keep_wrapped_views_of_nobody,
                                           hand_over_amid_a_backward,
                                           reduce_without_an_output,
                                           keep_an_unsharded_gradient_of_what_is_not_sharded,
                                           share_a_component_with_another_handle,
                                           place_no_call_in_a_layer,
                                           leave_a_unit_in_a_step,
                                           leave_a_handle_in_use,
                                           leave_a_gradient_behind,
                                           leave_a_gather_in_flight,
                                           leave_a_unit_in_the_order,
                                           leave_a_reduction_in_flight,
                                           leave_a_hook_on_inputs};
    CHECK(!aborts_after(nothing));
    for (size_t i = 0; i < sizeof broken / sizeof *broken; i++)
        CHECK(aborts_after(broken[i]));
}

int main(void) {
    RUN(test_param_state_refuses_every_illegal_transition);
    RUN(test_shown_refuses_every_illegal_transition);
    RUN(test_gradients_refuse_every_illegal_transition);
    RUN(test_training_state_refuses_every_illegal_transition);
    RUN(test_phase_refuses_every_illegal_transition);
    RUN(test_an_illegal_transition_names_both_states);
    RUN(test_a_broken_invariant_ends_the_process);
    return 0;
}
