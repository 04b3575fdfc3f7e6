/* Before the first step: the pool holds what as many units want as are gathered at a time. It is one piece,
 * so that torch's allocator cuts off what a unit wants, to 512 bytes; from pieces of their own units would be
 * given up to 1 MiB more, and no two of them could make room for a larger one. At the end of a backward, when
 * nothing gathered is left in it, its last reduction reads the same memory. */
#include "runtime/runtime.h"

/* In use, prefetched, and in forward held until its last use is over. */
static int64_t units_at_a_time(const struct runtime *runtime) {
    int64_t forward = 2, backward = 1;
    for (int64_t i = 0; i < runtime->num_units; i++) {
        const struct unit *unit = runtime->units[i];
        if (unit->forward_prefetch)
            forward = 2 + runtime->order.forward_prefetch_limit;
        if (unit->backward_prefetch != PREFETCH_NONE)
            backward = 1 + runtime->order.backward_prefetch_limit;
    }
    return forward > backward ? forward : backward;
}

static bool has_storage_to_take(const struct unit *unit) {
    return unit->handle && storage_wants_memory(&unit->handle->storage);
}

/* The root stays gathered until its backward, as every unit does that is not resharded after its forward. */
static bool stays_gathered(struct unit *part) {
    const struct unit *unit = unit_of_part(part);
    return unit->is_root ||
           (unit->handle->param.sharded && !flat_param_reshards_after_forward(&unit->handle->param));
}

static int64_t gathered_nbytes(struct unit *unit) {
    int64_t nbytes = 0;
    FOR_PARTS(part, unit)
        nbytes += part->handle->storage.copy->full.nbytes;
    return nbytes;
}

static bool is_larger(struct unit *unit, struct unit *other) {
    int64_t nbytes = gathered_nbytes(unit), nbytes_of_other = gathered_nbytes(other);
    return nbytes > nbytes_of_other || (nbytes == nbytes_of_other && unit->place.unit < other->place.unit);
}

/* The largest among the units that give their storage back in a step, after `previous`; NULL when there is
 * none. */
static struct unit *next_largest(const struct runtime *runtime, struct unit *previous) {
    struct unit *largest = NULL;
    for (int64_t i = 0; i < runtime->num_units; i++) {
        struct unit *unit = runtime->units[i];
        if (unit->leader || !has_storage_to_take(unit) || stays_gathered(unit))
            continue;
        if ((!previous || is_larger(previous, unit)) && (!largest || is_larger(unit, largest)))
            largest = unit;
    }
    return largest;
}

/* `visit` each part whose storage is held at a time: 0 or -1. */
static int for_all_held(const struct runtime *runtime, int (*visit)(struct unit *, void *), void *arg) {
    for (int64_t i = 0; i < runtime->num_units; i++) {
        struct unit *unit = runtime->units[i];
        if (has_storage_to_take(unit) && stays_gathered(unit) && visit(unit, arg) < 0)
            return -1;
    }
    struct unit *unit = NULL;
    for (int64_t i = units_at_a_time(runtime); i > 0 && (unit = next_largest(runtime, unit)); i--)
        FOR_PARTS(part, unit)
            if (visit(part, arg) < 0)
                return -1;
    return 0;
}

static int add_to_piece(struct unit *part, void *nbytes) {
    *(int64_t *)nbytes += pool_nbytes_of_piece(part->handle->storage.copy->full.nbytes);
    return 0;
}

/* What the last reduction of a backward reads, which takes the place of all that was gathered: mostly the
 * root's, whose forward was the first to begin. -1 with an exception. */
static int64_t last_input_nbytes(const struct runtime *runtime) {
    int64_t first = 0, most = 0;
    while (first < runtime->num_units && !runtime->units[first]->handle)
        first++;
    if (first == runtime->num_units || !runtime->trains)
        return 0;
    FOR_PARTS(part, runtime->units[first]) {
        struct handle *handle = part->handle;
        int trains = handle->param.sharded ? flat_param_is_trainable(&handle->param) : 0;
        if (trains < 0)
            return -1;
        int64_t nbytes = trains ? pool_nbytes_of_piece(gradients_reduce_input_nbytes(&handle->gradients)) : 0;
        most = nbytes > most ? nbytes : most;
    }
    return most;
}

int64_t runtime_piece_nbytes(const struct runtime *runtime) {
    int64_t held = 0, input = last_input_nbytes(runtime);
    if (input < 0)
        return -1;
    for_all_held(runtime, add_to_piece, &held);
    return pool_piece_nbytes(held && input > held ? input : held);
}

struct taken {
    const struct pool *pool;
    bool cuts_piece;
};

static int take(struct unit *part, void *arg) {
    struct storage *storage = &part->handle->storage;
    struct taken *taken = arg;
    if (storage->param_state == PARAM_SHARDED && storage_alloc_unsharded(storage) < 0)
        return unit_explain_failure(part, TRACED_FORWARD_GATHER, false);
    taken->cuts_piece = taken->cuts_piece || pool_is_cut(taken->pool, storage->copy->full.view.data);
    return 0;
}

int runtime_take_memory(struct runtime *runtime) {
    struct taken taken = {.pool = &runtime->schedule.pool};
    int result = for_all_held(runtime, take, &taken);
    for (int64_t i = 0; i < runtime->num_units; i++)
        if (runtime->units[i]->handle && storage_release_reserved(&runtime->units[i]->handle->storage) < 0)
            result = -1;
    return result < 0 ? -1 : taken.cuts_piece;
}

int runtime_reserve(struct runtime *runtime) {
    struct schedule *schedule = &runtime->schedule;
    struct pool *pool = &schedule->pool;
    if (!schedule_wants_memory(schedule))
        return 0;
    if (schedule_begin_reserve(schedule) < 0)
        return -1;
    int64_t nbytes = runtime_piece_nbytes(runtime);
    int cuts_piece = nbytes < 0 || pool_grow(pool, nbytes) < 0 ? -1 : runtime_take_memory(runtime);
    /* a piece that nothing can be cut of would lie idle: then each storage has one of its own */
    if (cuts_piece == 0 && pool->piece && (pool_renew(pool) < 0 || runtime_take_memory(runtime) < 0))
        cuts_piece = -1;
    return schedule_end_reserve(schedule, cuts_piece < 0 ? -1 : 0);
}
