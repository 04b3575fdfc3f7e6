/* Execution order and prefetch (D-110 to D-116). */
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

static int prefetch(struct unit *candidate, int (*choose_precision)(struct unit *)) {
    if (candidate->prefetched || candidate->handle->param_state != PARAM_SHARDED)
        return 0;
    if (choose_precision(candidate) < 0 || schedule_unshard(candidate) < 0)
        return -1;
    candidate->prefetched = true;
    return 0;
}

int order_prefetch_forward(struct unit *unit) {
    struct runtime *runtime = unit->runtime;
    int64_t here = unit->pre_forward_index, last = here + runtime->forward_prefetch_limit;
    int result = 0;
    if (!unit->forward_prefetch || here < 0)
        return 0;
    PyObject *range = profile_begin("FullyShardedDataParallel._pre_forward_prefetch");
    for (int64_t next = here + 1; !result && next <= last && next < runtime->num_pre; next++)
        result = prefetch(runtime->pre_order[next], precision_for_forward);
    profile_end(range);
    return result;
}

int order_prefetch_backward(struct unit *unit) {
    struct runtime *runtime = unit->runtime;
    int64_t here = unit->post_forward_index, last = here - runtime->backward_prefetch_limit;
    for (int64_t next = here - 1; next >= last && next >= 0; next--) {
        struct unit *candidate = runtime->post_order[next];
        if (candidate->needs_pre_backward_unshard && prefetch(candidate, precision_for_backward) < 0)
            return -1;
    }
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
                     (long long)handle->layout.rank, unit->name);
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
