/* Execution order and prefetch (D-110 to D-116). */
#include "runtime/runtime.h"

void order_record_pre_forward(struct unit *unit) {
    struct runtime *runtime = unit->runtime;
    if (runtime->iteration > 0 || unit->pre_forward_index >= 0)
        return;
    unit->pre_forward_index = runtime->num_pre;
    runtime->pre_order[runtime->num_pre++] = unit;
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

static int prefetch(struct unit *candidate) {
    if (candidate->prefetched || candidate->handle->param_state != PARAM_SHARDED)
        return 0;
    if (schedule_unshard(candidate) < 0)
        return -1;
    candidate->prefetched = true;
    return 0;
}

int order_prefetch_forward(struct unit *unit) {
    struct runtime *runtime = unit->runtime;
    int64_t next = unit->pre_forward_index + 1;
    if (!unit->forward_prefetch || next == 0 || next >= runtime->num_pre)
        return 0;
    return prefetch(runtime->pre_order[next]);
}

int order_prefetch_backward(struct unit *unit) {
    struct unit *candidate;
    if (unit->post_forward_index < 1)
        return 0;
    candidate = unit->runtime->post_order[unit->post_forward_index - 1];
    return candidate->needs_pre_backward_unshard ? prefetch(candidate) : 0;
}

void order_next_iteration(struct runtime *runtime) {
    runtime->iteration++;
    runtime->num_post = 0;
}
