/* What holds of a handle, and of those of its components that have no states. */
#include "handle/handle.h"
#include "torch/names.h"

#include "base/check.h"

#ifdef FSDP_C_CHECK
static bool may_have_replicas(enum sharding_strategy strategy) {
    return strategy != FULL_SHARD && strategy != SHARD_GRAD_OP;
}

/* The entry is `value`, or is not there where that is NULL. */
static bool is_published(const struct published *published, const char *name, PyObject *value) {
    return PyDict_GetItemString(published->dict, name) == value;
}
#endif

void flat_param_check(const struct flat_param *param) {
    (void)param; /* without FSDP_C_CHECK, here and below */
    INVARIANT(param->sharded == (param->strategy != NO_SHARD) && param->sharded == param->layout.sharded);
    INVARIANT(may_have_replicas(param->strategy) || !param->replicate_group.group);
    INVARIANT(!param->node_group.group || param->layout.padded_numel % param->node_group.world_size == 0);
    INVARIANT(param->layout.rank == param->shard_group.rank);
    INVARIANT(param->layout.num_params == param->num_params);
    INVARIANT(PyTuple_Size(param->shapes) == param->num_params && PyTuple_Size(param->strides) == param->num_params);
    INVARIANT(PyList_Size(param->slots) >= param->num_params);
    INVARIANT(param->use_orig_params == (param->params != NULL));
    INVARIANT(!param->params || PyList_Size(param->params) == param->num_params);
}

void published_check(const struct published *published, const struct storage *storage) {
    (void)published;
    (void)storage;
    INVARIANT(!published->dict || is_published(published, "_local_shard", storage->local_shard));
    INVARIANT(!published->dict || is_published(published, "_full_param_padded", published_full(storage)));
    INVARIANT(!published->dict || is_published(published, "_mp_shard", published_low_precision_shard(storage)));
}

void edits_check(const struct edits *edits) {
    (void)edits;
    INVARIANT(!edits->taken || edits->storage->param_state == PARAM_SHARDED);
    INVARIANT(edits->unheld_turn == 0 || (edits->unheld_turn > 0 && edits->unheld_turn < edits->param->num_params));
}

void layer_calls_check(const struct layer_calls *layers) {
    (void)layers;
    for (int64_t i = 0; layers->placed && i < layers->count; i++)
        INVARIANT(layers->all[i].compiled ||
                  PyDict_GetItemWithError(layers->all[i].attributes, torch_names._compiled_call_impl));
}

void handle_check(const struct handle *handle) {
    (void)handle;
    INVARIANT(handle->storage.param == &handle->param && handle->slots.param == &handle->param);
    INVARIANT(handle->gradients.param == &handle->param && handle->gradients.storage == &handle->storage);
    INVARIANT(handle->edits.storage == &handle->storage && handle->edits.slots == &handle->slots);
    INVARIANT(!handle->summon.full || handle->training_state == USE_SUMMON_FULL_PARAMS);
    flat_param_check(&handle->param);
    storage_check(&handle->storage);
    slots_check(&handle->slots);
    published_check(&handle->published, &handle->storage);
    gradients_check(&handle->gradients);
    edits_check(&handle->edits);
    layer_calls_check(&handle->layer_calls);
}
