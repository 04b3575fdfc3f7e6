/* Prefetch: choice of the next unit, in the order of units or by other code, and memory for the units that
 * are unsharded at a time. */
#include "runtime/operations.h"
#include "runtime/runtime.h"
#include "torch/py_torch.h"

/* ---- choice of the next unit ---- */

static bool can_prefetch(const struct unit *unit) {
    return !unit->unsharded.prefetched && unit->handle->storage.param_state == PARAM_SHARDED;
}

struct unit *unit_next_to_prefetch(const struct unit *unit, enum training_state state) {
    const struct order *order = &unit->runtime->order;
    const struct order_place *place = &unit->place;
    bool in_forward = state == USE_FORWARD;
    enum backward_prefetch policy = state == USE_BACKWARD_PRE    ? PREFETCH_BACKWARD_PRE
                                    : state == USE_BACKWARD_POST ? PREFETCH_BACKWARD_POST
                                                                 : PREFETCH_NONE;
    bool enabled = in_forward ? unit->options.forward_prefetch
                              : policy && unit->options.backward_prefetch == (int)policy;
    int64_t limit = in_forward ? order->forward_prefetch_limit : order->backward_prefetch_limit;
    for (int64_t distance = 1; enabled && distance <= limit; distance++) {
        int64_t index = in_forward ? place->pre_forward + distance : place->post_forward - distance;
        if (index < 0 || (in_forward && (place->pre_forward < 0 || index >= order->num_pre)))
            return NULL;
        struct unit *candidate = unit->runtime->units[in_forward ? order->pre[index] : order->post[index]];
        if ((in_forward || candidate->needs_pre_backward_unshard) && can_prefetch(candidate))
            return candidate;
    }
    return NULL;
}

/* Call the replacement of _get_handle_to_prefetch. *chosen is NULL if it returns None. Return 0 or -1. */
static int choose(struct unit *unit, struct unit **chosen) {
    const struct runtime *runtime = unit->runtime;
    OWNED *handle =
        operations_call(unit, REPLACEABLE_GET_HANDLE_TO_PREFETCH, unit->handle_object, NULL, NULL);
    *chosen = NULL;
    for (int64_t i = 0; handle && !*chosen && i < runtime->num_units; i++)
        if (runtime->units[i]->handle_object == handle)
            *chosen = runtime->units[i];
    if (!handle || handle == Py_None || *chosen)
        return handle ? 0 : -1;
    return unit_error(PyExc_TypeError, unit->handle->param.layout.rank, unit->name,
                      "the function in place of _get_handle_to_prefetch returned %R. Return the handle of a "
                      "unit below the same root, or None.",
                      handle);
}

/* ---- prefetch ---- */

void unit_set_prefetched(struct unit *unit, bool prefetched) {
    FOR_EACH_FLAT_PARAM(part, unit)
        part->unsharded.prefetched = prefetched;
}

/* A gradient may reach the parameters of a prefetched unit before its outputs, through a loss that its forward
 * keeps instead of returning. Without streams, no event orders that after the all-gather. */
static int wait_without_streams(struct unit *prefetched) {
    if (streams_are_real(&prefetched->runtime->schedule.streams))
        return 0;
    TRACE(TRACED_BACKWARD_GATHER, prefetched->name_index);
    return unit_wait_unshard(prefetched);
}

int unit_prefetch_next(struct unit *unit, enum training_state state) {
    static const enum traced parts[USE_STATES] = {[USE_FORWARD] = TRACED_PRE_FORWARD_PREFETCH,
                                                  [USE_BACKWARD_PRE] = TRACED_PRE_BACKWARD_PREFETCH,
                                                  [USE_BACKWARD_POST] = TRACED_POST_BACKWARD_PREFETCH};
    TRACE(parts[state], unit->name_index);
    const struct order *order = &unit->runtime->order;
    bool in_forward = state == USE_FORWARD;
    int64_t limit = in_forward ? order->forward_prefetch_limit : order->backward_prefetch_limit;
    for (int64_t i = 0; i < limit; i++) {
        struct unit *next;
        if (!operations_replaced[REPLACEABLE_GET_HANDLE_TO_PREFETCH])
            next = unit_next_to_prefetch(unit, state);
        else if (choose(unit, &next) < 0)
            return -1;
        if (!next)
            return 0;
        if (!can_prefetch(next))
            continue;
        if ((in_forward ? unit_precision_for_forward(next) : unit_precision_for_backward(next)) < 0 ||
            unit_unshard(next) < 0)
            return -1;
        unit_set_prefetched(next, true);
        /* This unit's own backward ends after that of a unit inside it. */
        bool is_inside = next->place.pre_forward > unit->place.pre_forward;
        if (!in_forward && is_inside && wait_without_streams(next) < 0)
            return -1;
    }
    return 0;
}

int unit_wait_prefetched(const struct unit *unit) {
    const struct order *order = &unit->runtime->order;
    for (int64_t distance = 1; distance <= order->backward_prefetch_limit; distance++) {
        int64_t index = unit->place.post_forward - distance;
        struct unit *next = index < 0 ? NULL : unit->runtime->units[order->post[index]];
        if (!next)
            return 0;
        if (next->unsharded.prefetched && wait_without_streams(next) < 0)
            return -1;
    }
    return 0;
}

int unit_prefetch_by_user(struct unit *unit) {
    struct handle *handle = unit->handle;
    struct runtime *runtime = unit->runtime;
    if (!handle || !runtime)
        return 0;
    if (handle->training_state == USE_SUMMON_FULL_PARAMS)
        return unit_error(
            PyExc_RuntimeError, handle->param.layout.rank, unit->name,
            "its full parameters are summoned. Prefetch the unit outside of summon_full_params.");
    if (runtime_begin_step_alone(runtime) < 0 || unit_precision_for_forward(unit) < 0)
        return -1;
    /* parameters left by the last forward may be stale for the next one */
    bool is_for_next = !runtime->num_in_forward || !runtime->num_forwards;
    if (is_for_next && unit->unsharded.for_forward != FOR_NEXT_FORWARD)
        unit->unsharded.for_forward = 0;
    if (unit_reshard_stale(unit) < 0 || unit_unshard(unit) < 0)
        return -1;
    unit->unsharded.for_forward = is_for_next ? FOR_NEXT_FORWARD : runtime->num_forwards;
    FOR_EACH_FLAT_PARAM(part, unit)
        if (handle_expose_views(part->handle) < 0)
            return -1;
    return 0;
}

/* ---- memory of unsharded parameters ---- */

/* [Note: one piece] Before the first step the pool reserves memory for all units that are unsharded at a
 * time. The memory is one block, from which torch's allocator splits the storage of a unit at a granularity
 * of 512 bytes. A block per unit would waste up to 1 MiB each, and two small blocks could not hold one large
 * unit. The input of a backward's last reduction uses the same memory, when no unit is unsharded any more. */

/* Return true if an unshard of the flat parameter would allocate. */
static bool needs_storage(const struct unit *part) {
    const struct storage *storage = part->handle ? &part->handle->storage : NULL;
    return storage && !storage->copy->is_local && storage->param_state == PARAM_SHARDED &&
           !storage->copy->full.allocated;
}

/* Return true if the flat parameter stays unsharded between forward and backward. The root always does. */
static bool stays_unsharded(struct unit *part) {
    const struct unit *unit = unit_of_part(part);
    return unit->is_root || flat_param_stays_unsharded(&unit->handle->param);
}

static int64_t unsharded_nbytes(struct unit *unit) {
    int64_t nbytes = 0;
    FOR_EACH_FLAT_PARAM(part, unit)
        nbytes += part->handle->storage.copy->full.nbytes;
    return nbytes;
}

static bool is_larger(struct unit *unit, struct unit *other) {
    int64_t nbytes = unsharded_nbytes(unit), nbytes_of_other = unsharded_nbytes(other);
    return nbytes > nbytes_of_other || (nbytes == nbytes_of_other && unit->place.unit < other->place.unit);
}

/* Return the largest unit that is resharded in a step, after `previous` in descending order; NULL at the
 * end. */
static struct unit *next_largest(const struct runtime *runtime, struct unit *previous) {
    struct unit *largest = NULL;
    FOR_EACH_UNIT(unit, runtime) {
        if (unit->leader || !needs_storage(unit) || stays_unsharded(unit))
            continue;
        if ((!previous || is_larger(previous, unit)) && (!largest || is_larger(unit, largest)))
            largest = unit;
    }
    return largest;
}

/* Collect the flat parameters whose storage is held at the same time in `held`. Return their number. */
static int64_t collect_held(const struct runtime *runtime, struct unit **held) {
    int64_t count = 0, forward = 2, backward = 1;
    /* units unsharded at a time: in use, prefetched, and in forward held until the last use is over */
    FOR_EACH_UNIT(unit, runtime) {
        if (unit->options.forward_prefetch)
            forward = 2 + runtime->order.forward_prefetch_limit;
        if (unit->options.backward_prefetch != PREFETCH_NONE)
            backward = 1 + runtime->order.backward_prefetch_limit;
        if (needs_storage(unit) && stays_unsharded(unit))
            held[count++] = unit;
    }
    struct unit *unit = NULL;
    for (int64_t i = forward > backward ? forward : backward; i > 0 && (unit = next_largest(runtime, unit));
         i--)
        FOR_EACH_FLAT_PARAM(part, unit)
            held[count++] = part;
    return count;
}

/* Return the input size of a backward's last reduction, which reuses all of the pool: usually the root's,
 * whose forward begins first. -1 with an exception. */
static int64_t last_input_nbytes(const struct runtime *runtime) {
    int64_t first = 0, most = 0;
    while (first < runtime->num_units && !runtime->units[first]->handle)
        first++;
    if (first == runtime->num_units || !runtime->grad_enabled)
        return 0;
    FOR_EACH_FLAT_PARAM(part, runtime->units[first]) {
        struct handle *handle = part->handle;
        int trains = handle->param.sharded ? flat_param_is_trainable(&handle->param) : 0;
        if (trains < 0)
            return -1;
        int64_t nbytes = trains ? pool_block_nbytes(grads_reduce_input_nbytes(&handle->grads)) : 0;
        most = nbytes > most ? nbytes : most;
    }
    return most;
}

/* Allocate and free the storage of each held flat parameter once. Return 1 if the pool's block provides any
 * of it, 0 if not, -1 with an exception. */
static int reserve_storages(struct runtime *runtime, struct unit **held, int64_t count) {
    int uses_arena = 0;
    for (int64_t i = 0; uses_arena >= 0 && i < count; i++) {
        struct storage *storage = &held[i]->handle->storage;
        if (storage->param_state == PARAM_SHARDED && storage_alloc_unsharded(storage) < 0)
            uses_arena = unit_explain_failure(held[i], TRACED_FORWARD_GATHER, false);
        else if (pool_arena_contains(&runtime->schedule.pool, storage->copy->full.view.data))
            uses_arena = 1;
    }
    PyObject *error = PyErr_GetRaisedException();
    FOR_EACH_UNIT(unit, runtime) { /* return the memory to the pool */
        struct storage *storage = unit->handle ? &unit->handle->storage : NULL;
        if (storage && !storage->copy->is_local && storage->param_state == PARAM_SHARDED &&
            buffer_free(&storage->copy->full) < 0)
            uses_arena = -1;
    }
    if (error)
        PyErr_SetRaisedException(error);
    return uses_arena;
}

/* Runs on the stream of the all-gathers, which owns the memory. */
int runtime_reserve(struct runtime *runtime) {
    struct streams *streams = &runtime->schedule.streams;
    struct pool *pool = &runtime->schedule.pool;
    if (pool->reserved || !streams_are_real(streams))
        return 0;
    pool->reserved = true;
    struct unit **held = PyMem_Calloc((size_t)runtime->num_units + 1, sizeof *held);
    if (!held) {
        PyErr_NoMemory();
        return -1;
    }
    int result = stream_enter(streams, STREAM_UNSHARD);
    if (!result) {
        int64_t nbytes = 0, count = collect_held(runtime, held), input = last_input_nbytes(runtime);
        for (int64_t i = 0; i < count; i++)
            nbytes += pool_block_nbytes(held[i]->handle->storage.copy->full.nbytes);
        nbytes = pool_arena_nbytes(nbytes && input > nbytes ? input : nbytes);
        int uses_arena =
            input < 0 || pool_alloc_arena(pool, nbytes) < 0 ? -1 : reserve_storages(runtime, held, count);
        /* torch cannot split the block: free it, and give each storage a block of its own */
        if (uses_arena == 0 && pool->arena_nbytes &&
            (pool_recreate(pool) < 0 || reserve_storages(runtime, held, count) < 0))
            uses_arena = -1;
        result = stream_leave(streams) < 0 || uses_arena < 0 ? -1 : 0;
    }
    PyMem_Free(held);
    return result;
}
