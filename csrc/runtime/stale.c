/* What an earlier forward has left gathered. */
#include "runtime/runtime.h"

/* [Note: stale parameters] A forward may leave gathered what its backward will read: the root, all units of a
 * strategy that does not reshard after forward, what was prefetched and not run. The backward may never
 * come, and parameters change: by an optimizer, by a state dict that is loaded, by the user's own hand. All
 * of that goes to the shards. A change through `.data` leaves no trace, and ranks that hold nothing of a
 * parameter may be left out of one: so it is not asked whether there was any, as all ranks must gather or
 * none. Each unit knows for which forward it was gathered, and another one gathers anew: forwards are counted
 * where none is on its way yet, on each rank alike. Within one forward a unit that runs again, or that was
 * prefetched, is gathered once.
 *
 * What is gathered on the user's word is for the next forward that it runs in. So is what a backward under
 * no_sync keeps, whose use is that nothing is sent: it goes where any parameter of the root, empty or not,
 * has been written to in a way that can be seen. */
static bool is_stale(const struct unit *unit) {
    bool gathered = unit->handle && unit->handle->storage.param_state != PARAM_SHARDED;
    return gathered && unit->gathered_for != unit->runtime->num_forwards &&
           unit->gathered_for != FOR_NEXT_FORWARD;
}

static int give_back(struct unit *unit) {
    FOR_PARTS(part, unit) {
        struct handle *handle = part->handle;
        order_place_set_prefetched(&part->place, false);
        if (writeback_check_views(&handle->writeback) < 0 || handle_take_over_views(handle) < 0 ||
            unit_reshard(part, true) < 0 || handle_show_sharded(handle) < 0)
            return -1;
    }
    return 0;
}

int unit_give_back_stale(struct unit *unit) {
    return is_stale(unit) && !unit->runtime->callback_queued ? give_back(unit) : 0;
}

void unit_note_used(struct unit *unit) {
    unit->gathered_for = unit->runtime->num_forwards;
}

/* For the memory, but for what a graph of a backward reads, which nobody would gather again. */
int runtime_give_back_stale(struct runtime *runtime) {
    for (int64_t i = 0; i < runtime->num_units; i++) {
        struct unit *unit = runtime->units[i];
        bool comes_back = (unit->needs_pre_backward_unshard || unit->place.prefetched) && !unit->graph_reads;
        if (comes_back && !unit->leader && unit_give_back_stale(unit) < 0)
            return -1;
    }
    return 0;
}

int runtime_give_back_unused(struct runtime *runtime) {
    for (int64_t i = 0; i < runtime->num_units && !runtime->callback_queued; i++) {
        struct unit *unit = runtime->units[i];
        if (unit->place.prefetched && !unit->leader && give_back(unit) < 0)
            return -1;
    }
    return 0;
}

void unit_forget_graph(struct unit *unit) {
    unit->graph_reads = false;
}

/* ---- under no_sync ---- */

void unit_keep_for_next(struct unit *part) {
    struct unit *unit = unit_of_part(part);
    if (unit->runtime->num_in_forward || part->handle->storage.param_state == PARAM_SHARDED || is_stale(unit))
        return;
    unit->gathered_for = FOR_NEXT_FORWARD;
    unit->runtime->keeps = true;
}

static int64_t count_writes(const struct runtime *runtime) {
    int64_t sum = 0;
    for (int64_t i = 0; i < runtime->num_units; i++) {
        const struct handle *handle = runtime->units[i]->handle;
        int64_t writes = handle ? writeback_count_writes(&handle->writeback) : 0;
        if (writes < 0)
            return -1;
        sum += writes;
    }
    return sum;
}

int runtime_note_kept(struct runtime *runtime) {
    runtime->num_writes = runtime->keeps ? count_writes(runtime) : 0;
    return runtime->num_writes < 0 ? -1 : 0;
}

int runtime_check_kept(struct runtime *runtime) {
    if (!runtime->keeps || runtime->num_in_forward > 1)
        return 0;
    int64_t writes = count_writes(runtime);
    for (int64_t i = 0; i < runtime->num_units && writes != runtime->num_writes; i++)
        if (runtime->units[i]->gathered_for == FOR_NEXT_FORWARD)
            runtime->units[i]->gathered_for = 0;
    return writes < 0 ? -1 : 0;
}
