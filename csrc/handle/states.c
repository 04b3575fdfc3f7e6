/* The states of a handle and its components: for each the table of legal transitions and its only writer.
 * What holds of them meanwhile, for those without states as well. */
#include "handle/gradients.h"
#include "handle/handle.h"
#include "handle/param_views.h"
#include "handle/storage.h"
#include "handle/unit_error.h"
#include "torch/names.h"

#include "base/check.h"

static int refuse(const struct flat_param *param, const char *from, const char *to, const char *remedy) {
    return unit_error(PyExc_RuntimeError, param->layout.rank, param->name,
                      "illegal transition from %s to %s%s", from, to, remedy);
}

/* ---- what the storage of the unsharded parameters holds ---- */

static const bool param_allowed[PARAM_STATES][PARAM_STATES] = {
    [PARAM_SHARDED] = {[PARAM_UNSHARDING] = true},  /* all-gather enqueued */
    [PARAM_UNSHARDING] = {[PARAM_UNSHARDED] = true, /* compute waits for it */
                          [PARAM_SHARDED] = true},  /* prefetched, then not needed */
    [PARAM_UNSHARDED] = {[PARAM_SHARDED] = true},   /* full storage freed */
};

static const char *const param_names[PARAM_STATES] = {"SHARDED", "UNSHARDING", "UNSHARDED"};

int storage_set_state(struct storage *storage, enum param_state state) {
    if (!param_allowed[storage->param_state][state])
        return refuse(storage->param, param_names[storage->param_state], param_names[state], "");
    storage->param_state = state;
    CHECKED(storage_check(storage));
    return 0;
}

void storage_check(const struct storage *storage) {
    const struct precision_copy *copy = storage->copy;
    bool gathered = storage->param_state != PARAM_SHARDED;
    INVARIANT(copy >= storage->copies && copy < storage->copies + PRECISIONS);
    INVARIANT(!gathered || copy->is_local || copy->full.allocated);
    INVARIANT(storage->param_state == PARAM_UNSHARDING || !storage->unshard_work);
    INVARIANT(!storage_gathers_in_node(storage) || storage_keeps_secondary_shards(storage));
    for (int i = 0; i < PRECISIONS; i++)
        INVARIANT(&storage->copies[i] == copy || !storage->copies[i].full.allocated ||
                  deferred_free_holds(storage->full_free, &storage->copies[i].full));
}

/* ---- what the param_views show ---- */

static const bool shown_allowed[SHOWN_KINDS][SHOWN_KINDS] = {
    [SHOWN_NOTHING] = {[SHOWN_NOTHING] = true, /* failed half-way, and tried again */
                       [SHOWN_SHARDED] = true,
                       [SHOWN_VIEWS] = true,
                       [SHOWN_FULL_PARAMS] = true},
    [SHOWN_SHARDED] = {[SHOWN_NOTHING] = true}, /* a change begins */
    [SHOWN_VIEWS] = {[SHOWN_NOTHING] = true},
    [SHOWN_FULL_PARAMS] = {[SHOWN_NOTHING] = true},
};

static const char *const shown_names[SHOWN_KINDS] = {"NOTHING", "SHARDED", "VIEWS", "FULL_PARAMS"};

int param_views_set_shown(struct param_views *param_views, enum shown shown) {
    if (!shown_allowed[param_views->shown][shown])
        return refuse(param_views->param, shown_names[param_views->shown], shown_names[shown], "");
    param_views->shown = shown;
    CHECKED(param_views_check(param_views));
    return 0;
}

void param_views_check(const struct param_views *param_views) {
    INVARIANT(param_views->count >= param_views->param->num_params);
    INVARIANT(param_views->shown != SHOWN_SHARDED || param_views->param->use_orig_params);
    INVARIANT(!param_views->wrapped_views || param_views->wrap_views);
    for (int64_t i = 0; param_views->guards_placed && i < param_views->num_guards; i++)
        INVARIANT(
            param_views->guards[i].compiled ||
            PyDict_GetItemWithError(param_views->guards[i].attributes, torch_names._compiled_call_impl));
}

/* ---- what `.grad` holds between backwards ---- */

static const bool grad_allowed[GRAD_KINDS][GRAD_KINDS] = {
    [GRAD_NONE] = {[GRAD_NONE] = true,        /* the user has set none */
                   [GRAD_SHARDED] = true,     /* a reduced one is handed over */
                   [GRAD_UNSHARDED] = true},  /* after no_sync */
    [GRAD_SHARDED] = {[GRAD_NONE] = true,     /* set aside in a backward, or cleared by the user */
                      [GRAD_SHARDED] = true}, /* the user has set others */
    [GRAD_UNSHARDED] = {[GRAD_NONE] = true,   /* packed, cleared by the user, or by the user's hooks */
                        [GRAD_SHARDED] = true /* the user has set others */},
};

static const char *const grad_names[GRAD_KINDS] = {"GRAD_NONE", "GRAD_SHARDED", "GRAD_UNSHARDED"};

int gradients_set_kind(struct gradients *gradients, enum grad_kind kind) {
    if (!grad_allowed[gradients->kind][kind])
        return refuse(gradients->param, grad_names[gradients->kind], grad_names[kind], "");
    gradients->kind = kind;
    CHECKED(gradients_check(gradients));
    return 0;
}

void gradients_check(const struct gradients *gradients) {
    INVARIANT(gradients->kind != GRAD_SHARDED || !gradients->in_backward);
    INVARIANT(gradients->kind != GRAD_UNSHARDED || gradients->param->sharded);
    INVARIANT(!gradients->work || gradients->reduce_output);
    INVARIANT(!gradients->offloaded || gradients->storage->offload);
    INVARIANT(!gradients->shown || gradients->kind == GRAD_SHARDED);
}

/* ---- who is using a unit's parameters ---- */

static const bool training_allowed[USE_STATES][USE_STATES] = {
    [USE_IDLE] = {[USE_IDLE] = true,
                  [USE_FORWARD] = true,       /* pre-forward */
                  [USE_BACKWARD_PRE] = true,  /* pre-backward hook */
                  [USE_BACKWARD_POST] = true, /* gradients without a pre-backward: no output carried a hook */
                  [USE_SUMMON_FULL_PARAMS] = true},
    [USE_FORWARD] = {[USE_IDLE] = true},               /* post-forward */
    [USE_BACKWARD_PRE] = {[USE_BACKWARD_POST] = true,  /* all gradients have come */
                          [USE_IDLE] = true},          /* final callback, no gradient came */
    [USE_BACKWARD_POST] = {[USE_BACKWARD_POST] = true, /* a second graph over the unit in the same backward */
                           [USE_BACKWARD_PRE] = true,
                           /* recomputed by a reentrant checkpoint after its gradients came */
                           [USE_FORWARD] = true,
                           [USE_IDLE] = true}, /* final callback */
    [USE_SUMMON_FULL_PARAMS] = {[USE_IDLE] = true},
};

static const char *const training_names[USE_STATES] = {"IDLE", "FORWARD", "BACKWARD_PRE", "BACKWARD_POST",
                                                       "SUMMON_FULL_PARAMS"};

const char *training_state_name(enum training_state state) {
    return training_names[state];
}

/* What to do instead of a backward that comes too early. */
static const char *remedy_for(enum training_state from, enum training_state to) {
    bool in_own_forward = from == USE_FORWARD && (to == USE_BACKWARD_PRE || to == USE_BACKWARD_POST);
    return in_own_forward
               ? ": a backward inside its own forward has come to its parameters, which the rest of the "
                 "forward needs. Call backward() on what the forward returns, after it, or wrap "
                 "the modules that the backward inside passes through as units of their own"
               : "";
}

int handle_set_training_state(struct handle *handle, enum training_state state) {
    if (!training_allowed[handle->training_state][state])
        return refuse(&handle->param, training_names[handle->training_state], training_names[state],
                      remedy_for(handle->training_state, state));
    handle->training_state = state;
    return 0;
}

/* ---- what holds of a handle, and of those of its components that have no states ---- */

/* The entry is `value`, or is not there where that is NULL. */
static bool has_attribute(const struct storage *storage, const char *name, PyObject *value) {
    return !storage->attributes || PyDict_GetItemString(storage->attributes, name) == value;
}

void flat_param_check(const struct flat_param *param) {
    INVARIANT(param->sharded == (param->strategy != NO_SHARD) && param->sharded == param->layout.sharded);
    INVARIANT((param->strategy != FULL_SHARD && param->strategy != SHARD_GRAD_OP) ||
              !param->replicate_group.group);
    INVARIANT(!param->node_group.group || param->layout.padded_numel % param->node_group.world_size == 0);
    INVARIANT(param->layout.rank == param->shard_group.rank);
    INVARIANT(param->layout.num_params == param->num_params);
    INVARIANT(PyTuple_Size(param->shapes) == param->num_params &&
              PyTuple_Size(param->strides) == param->num_params);
    INVARIANT(PyList_Size(param->param_views) >= param->num_params);
    INVARIANT(param->use_orig_params == (param->params != NULL));
    INVARIANT(!param->params || PyList_Size(param->params) == param->num_params);
}

static void check_attributes(const struct storage *storage) {
    INVARIANT(has_attribute(storage, "_local_shard", storage->local_shard));
    INVARIANT(has_attribute(storage, "_full_param_padded", storage_full_attribute(storage)));
    INVARIANT(has_attribute(storage, "_mp_shard", storage_low_precision_attribute(storage)));
}

void writeback_check(const struct writeback *writeback) {
    INVARIANT(!writeback->taken || writeback->storage->param_state == PARAM_SHARDED);
    INVARIANT(writeback->unheld_turn == 0 ||
              (writeback->unheld_turn > 0 && writeback->unheld_turn < writeback->param->num_params));
}

void handle_check(const struct handle *handle) {
    INVARIANT(handle->storage.param == &handle->param && handle->param_views.param == &handle->param);
    INVARIANT(handle->gradients.param == &handle->param && handle->gradients.storage == &handle->storage);
    INVARIANT(handle->writeback.storage == &handle->storage &&
              handle->writeback.param_views == &handle->param_views);
    INVARIANT(!handle->summon.full || handle->training_state == USE_SUMMON_FULL_PARAMS);
    flat_param_check(&handle->param);
    storage_check(&handle->storage);
    param_views_check(&handle->param_views);
    check_attributes(&handle->storage);
    gradients_check(&handle->gradients);
    writeback_check(&handle->writeback);
}
