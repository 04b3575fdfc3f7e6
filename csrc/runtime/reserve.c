/* Before the first step: the pool holds what as many units want as are gathered at a time. */
#include "runtime/runtime.h"

/* In use, gathered ahead, and in forward held until its last use is settled. */
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
static bool stays_gathered(const struct unit *part) {
    const struct unit *unit = part->leader ? part->leader : part;
    return unit->is_root || (unit->handle->param.sharded && !flat_param_reshards_after_forward(&unit->handle->param));
}

static int64_t gathered_nbytes(struct unit *unit) {
    int64_t nbytes = 0;
    FOR_PARTS(part, unit)
        nbytes += part->handle->storage.copy->full.nbytes;
    return nbytes;
}

static int take(struct unit *unit) {
    FOR_PARTS(part, unit)
        if (storage_reserve(&part->handle->storage) < 0)
            return -1;
    return 0;
}

/* The largest among the units that give their storage back in a step; NULL when all have some. */
static struct unit *next_to_take(const struct runtime *runtime) {
    struct unit *largest = NULL;
    for (int64_t i = 0; i < runtime->num_units; i++) {
        struct unit *unit = runtime->units[i];
        if (unit->leader || !has_storage_to_take(unit) || stays_gathered(unit))
            continue;
        if (!largest || gathered_nbytes(unit) > gathered_nbytes(largest))
            largest = unit;
    }
    return largest;
}

static int take_all(struct runtime *runtime) {
    struct unit *unit;
    for (int64_t i = 0; i < runtime->num_units; i++) {
        unit = runtime->units[i];
        if (has_storage_to_take(unit) && stays_gathered(unit) && storage_reserve(&unit->handle->storage) < 0)
            return -1;
    }
    for (int64_t i = units_at_a_time(runtime); i > 0 && (unit = next_to_take(runtime)); i--)
        if (take(unit) < 0)
            return -1;
    return 0;
}

static int give_all_back(struct runtime *runtime) {
    int result = 0;
    for (int64_t i = 0; i < runtime->num_units; i++)
        if (runtime->units[i]->handle && storage_release_reserved(&runtime->units[i]->handle->storage) < 0)
            result = -1;
    return result;
}

int runtime_take_memory(struct runtime *runtime) {
    int result = take_all(runtime);
    return give_all_back(runtime) < 0 ? -1 : result;
}

int runtime_reserve(struct runtime *runtime) {
    struct schedule *schedule = &runtime->schedule;
    if (!schedule_wants_memory(schedule))
        return 0;
    if (schedule_begin_reserve(schedule) < 0)
        return -1;
    return schedule_end_reserve(schedule, runtime_take_memory(runtime));
}
