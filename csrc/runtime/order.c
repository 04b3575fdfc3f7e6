/* Execution order and prefetch (D-110 to D-116). */
#include "runtime/replaced.h"
#include "runtime/runtime.h"
#include "torch/profile.h"

int order_record_pre_forward(struct unit *unit) {
    struct runtime *runtime = unit->runtime;
    if (runtime->order_check && order_check_pre_forward(runtime->order_check, unit) < 0)
        return -1;
    if (runtime->iteration > 0 || unit->pre_forward_index >= 0)
        return 0;
    unit->pre_forward_index = runtime->num_pre;
    runtime->pre_order[runtime->num_pre++] = unit;
    return 0;
}

static int grow(struct runtime *runtime) {
    int64_t capacity = runtime->capacity * 2;
    struct unit **order = PyMem_Realloc(runtime->post_order, (size_t)capacity * sizeof *order);
    if (!order) {
        PyErr_NoMemory();
        return -1;
    }
    runtime->post_order = order;
    runtime->capacity = capacity;
    return 0;
}

int order_record_post_forward(struct unit *unit) {
    struct runtime *runtime = unit->runtime;
    if (unit->post_forward_index > 0)
        return 0; /* the unit at index 0 is recorded again, as upstream does (D-111) */
    if (runtime->num_post == runtime->capacity && grow(runtime) < 0)
        return -1;
    unit->post_forward_index = runtime->num_post;
    runtime->post_order[runtime->num_post++] = unit;
    return 0;
}

static bool can_prefetch(const struct unit *unit) {
    return !unit->prefetched && unit->handle->storage.param_state == PARAM_SHARDED;
}

static struct unit *next_forward(const struct unit *unit) {
    struct runtime *runtime = unit->runtime;
    int64_t here = unit->pre_forward_index, last = here + runtime->forward_prefetch_limit;
    if (!unit->forward_prefetch || here < 0)
        return NULL;
    for (int64_t next = here + 1; next <= last && next < runtime->num_pre; next++)
        if (can_prefetch(runtime->pre_order[next]))
            return runtime->pre_order[next];
    return NULL;
}

static struct unit *next_backward(const struct unit *unit) {
    struct runtime *runtime = unit->runtime;
    int64_t here = unit->post_forward_index, last = here - runtime->backward_prefetch_limit;
    for (int64_t next = here - 1; next >= last && next >= 0; next--) {
        struct unit *candidate = runtime->post_order[next];
        if (candidate->needs_pre_backward_unshard && can_prefetch(candidate))
            return candidate;
    }
    return NULL;
}

struct unit *order_next(const struct unit *unit, enum training_state state) {
    if (state == USE_FORWARD)
        return next_forward(unit);
    if (state == USE_BACKWARD_PRE && unit->backward_prefetch == PREFETCH_BACKWARD_PRE)
        return next_backward(unit);
    if (state == USE_BACKWARD_POST && unit->backward_prefetch == PREFETCH_BACKWARD_POST)
        return next_backward(unit);
    return NULL;
}

static int prefetch(struct unit *candidate, int (*choose_precision)(struct unit *)) {
    if (choose_precision(candidate) < 0 || schedule_unshard(candidate) < 0)
        return -1;
    candidate->prefetched = true;
    return 0;
}

/* What the replacement of _get_handle_to_prefetch chooses, instead. */
static int prefetch_chosen(struct unit *unit, int (*choose_precision)(struct unit *), int64_t limit) {
    for (int64_t i = 0; i < limit; i++) {
        struct unit *chosen;
        if (replaced_get_handle_to_prefetch(unit, &chosen) < 0)
            return -1;
        if (!chosen)
            return 0;
        if (can_prefetch(chosen) && prefetch(chosen, choose_precision) < 0)
            return -1;
    }
    return 0;
}

static int prefetch_forward(struct unit *unit) {
    if (replaced[REPLACED_GET_HANDLE_TO_PREFETCH])
        return prefetch_chosen(unit, precision_for_forward, unit->runtime->forward_prefetch_limit);
    for (struct unit *next; (next = next_forward(unit)) != NULL;)
        if (prefetch(next, precision_for_forward) < 0)
            return -1;
    return 0;
}

int order_prefetch_forward(struct unit *unit) {
    PyObject *range = profile_begin_inner("FullyShardedDataParallel._pre_forward_prefetch");
    bool wanted = unit->forward_prefetch || replaced[REPLACED_GET_HANDLE_TO_PREFETCH];
    int result = wanted ? prefetch_forward(unit) : 0;
    profile_end(range);
    return result;
}

int order_prefetch_backward(struct unit *unit) {
    if (replaced[REPLACED_GET_HANDLE_TO_PREFETCH])
        return prefetch_chosen(unit, precision_for_backward, unit->runtime->backward_prefetch_limit);
    for (struct unit *next; (next = next_backward(unit)) != NULL;)
        if (prefetch(next, precision_for_backward) < 0)
            return -1;
    return 0;
}

int begin_step_alone(struct unit *unit) {
    struct runtime *runtime = unit->runtime;
    return runtime->units[0]->training_state == USE_IDLE ? schedule_begin_step(&runtime->schedule) : 0;
}

int unit_unshard(struct unit *unit) {
    struct handle *handle = unit->handle;
    if (!handle || !unit->runtime)
        return 0;
    if (handle->training_state == USE_SUMMON_FULL_PARAMS) {
        PyErr_Format(PyExc_RuntimeError,
                     "rank %lld, unit %S: its full parameters are summoned: gather it ahead outside "
                     "of summon_full_params",
                     (long long)handle->param.layout.rank, unit->name);
        return -1;
    }
    if (begin_step_alone(unit) < 0 || precision_for_forward(unit) < 0 || schedule_unshard(unit) < 0)
        return -1;
    unit->prefetched = true;
    return handle_show_views(handle);
}

int unit_wait_unsharded(struct unit *unit) {
    return unit->handle && unit->runtime ? schedule_wait_unsharded(unit) : 0;
}

void order_next_iteration(struct runtime *runtime) {
    runtime->iteration++;
    runtime->num_post = 0;
    if (runtime->order_check)
        order_check_next_iteration(runtime->order_check);
}
