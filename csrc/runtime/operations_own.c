/* The operations of a step as the runtime has them. */
#include "runtime/operations.h"
#include "runtime/runtime.h"

static int own_reshard(struct unit *unit, bool free_storage) {
    return storage_reshard(&unit->handle->storage, free_storage);
}

static int own_register_pre_backward_hooks(struct unit *unit, PyObject **outputs) {
    return unit_register_pre_backward_hooks(unit, *outputs);
}

const struct operations operations_own = {
    .is_there = unit_is_there,
    .prepare_gather = unit_prepare_gather,
    .gather = unit_enqueue_gather,
    .reshard = own_reshard,
    .post_backward_reshard = unit_post_backward_reshard,
    .prefetch = unit_prefetch_in_order,
    .register_pre_backward_hooks = own_register_pre_backward_hooks,
    .register_post_backward_hook = unit_register_post_backward_hook,
};
