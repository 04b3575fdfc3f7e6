/* The only writers of a handle's two enums, each against its table of legal transitions. */
#include "handle/handle.h"

static const bool param_allowed[PARAM_STATES][PARAM_STATES] = {
    [PARAM_SHARDED] = {[PARAM_UNSHARDING] = true},  /* all-gather enqueued */
    [PARAM_UNSHARDING] = {[PARAM_UNSHARDED] = true, /* compute waits for it */
                          [PARAM_SHARDED] = true},  /* prefetched, then not needed */
    [PARAM_UNSHARDED] = {[PARAM_SHARDED] = true},   /* full storage freed */
};

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
                           [USE_FORWARD] = true, /* recomputed by a reentrant checkpoint after its gradients came */
                           [USE_IDLE] = true},   /* final callback */
    [USE_SUMMON_FULL_PARAMS] = {[USE_IDLE] = true},
};

static const char *const param_names[PARAM_STATES] = {"SHARDED", "UNSHARDING", "UNSHARDED"};
static const char *const training_names[USE_STATES] = {"IDLE", "FORWARD", "BACKWARD_PRE", "BACKWARD_POST",
                                                       "SUMMON_FULL_PARAMS"};

const char *training_state_name(enum training_state state) {
    return training_names[state];
}

static int refuse(const struct handle *handle, const char *from, const char *to, const char *remedy) {
    PyErr_Format(PyExc_RuntimeError, "rank %lld, unit %S: illegal transition from %s to %s%s",
                 (long long)handle->layout.rank, handle->name, from, to, remedy);
    return -1;
}

/* What to do instead of a backward that comes too early. */
static const char *remedy_for(enum training_state from, enum training_state to) {
    bool in_own_forward = from == USE_FORWARD && (to == USE_BACKWARD_PRE || to == USE_BACKWARD_POST);
    return in_own_forward ? ": a backward inside its own forward has come to its parameters, which the rest of the "
                            "forward needs. Call backward() on what the forward returns, after it, or wrap the modules "
                            "that the backward inside passes through as units of their own"
                          : "";
}

static void write_param_state(struct handle *handle, enum param_state state) {
    handle->param_state = state;
}

static void write_training_state(struct handle *handle, enum training_state state) {
    handle->training_state = state;
}

int handle_set_param_state(struct handle *handle, enum param_state state) {
    if (!param_allowed[handle->param_state][state])
        return refuse(handle, param_names[handle->param_state], param_names[state], "");
    write_param_state(handle, state);
    return 0;
}

int handle_set_training_state(struct handle *handle, enum training_state state) {
    if (!training_allowed[handle->training_state][state])
        return refuse(handle, training_names[handle->training_state], training_names[state],
                      remedy_for(handle->training_state, state));
    write_training_state(handle, state);
    return 0;
}

void handle_force_idle(struct handle *handle) {
    write_training_state(handle, USE_IDLE);
}
