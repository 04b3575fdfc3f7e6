/* What the storage of the unsharded parameters holds: the table, and the only writer. */
#include "handle/storage.h"
#include "handle/transition.h"

#include "base/check.h"

static const bool param_allowed[PARAM_STATES][PARAM_STATES] = {
    [PARAM_SHARDED] = {[PARAM_UNSHARDING] = true},  /* all-gather enqueued */
    [PARAM_UNSHARDING] = {[PARAM_UNSHARDED] = true, /* compute waits for it */
                          [PARAM_SHARDED] = true},  /* prefetched, then not needed */
    [PARAM_UNSHARDED] = {[PARAM_SHARDED] = true},   /* full storage freed */
};

static const char *const param_names[PARAM_STATES] = {"SHARDED", "UNSHARDING", "UNSHARDED"};

int storage_set_state(struct storage *storage, enum param_state state) {
    if (!param_allowed[storage->param_state][state])
        return transition_refuse(storage->param->layout.rank, storage->param->name, param_names[storage->param_state],
                                 param_names[state], "");
    storage->param_state = state;
    CHECKED(storage_check(storage));
    return 0;
}

#ifdef FSDP_C_CHECK
static bool holds_nothing(const struct precision_copy *copy) {
    return !copy->full.allocated;
}
#endif

void storage_check(const struct storage *storage) {
    (void)storage;
#ifdef FSDP_C_CHECK
    const struct precision_copy *copy = storage->copy;
    bool gathered = storage->param_state != PARAM_SHARDED;
    INVARIANT(copy >= storage->copies && copy < storage->copies + PRECISIONS);
    INVARIANT(!gathered || copy->is_local || copy->full.allocated);
    INVARIANT(storage->param_state == PARAM_UNSHARDING || !storage->unshard_work);
    INVARIANT(!storage_gathers_in_node(storage) || storage_keeps_node_parts(storage));
    for (int i = 0; i < PRECISIONS; i++)
        INVARIANT(&storage->copies[i] == copy || holds_nothing(&storage->copies[i]) ||
                  deferred_free_holds(storage->full_free, &storage->copies[i].full));
#endif
}
