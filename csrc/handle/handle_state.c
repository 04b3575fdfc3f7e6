/* Who is using a unit's parameters: the table, and the only writer. */
#include "handle/handle.h"
#include "handle/transition.h"

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

static const char *const training_names[USE_STATES] = {"IDLE", "FORWARD", "BACKWARD_PRE", "BACKWARD_POST",
                                                       "SUMMON_FULL_PARAMS"};

const char *training_state_name(enum training_state state) {
    return training_names[state];
}

/* What to do instead of a backward that comes too early. */
static const char *remedy_for(enum training_state from, enum training_state to) {
    bool in_own_forward = from == USE_FORWARD && (to == USE_BACKWARD_PRE || to == USE_BACKWARD_POST);
    return in_own_forward ? ": a backward inside its own forward has come to its parameters, which the rest of the "
                            "forward needs. Call backward() on what the forward returns, after it, or wrap the modules "
                            "that the backward inside passes through as units of their own"
                          : "";
}

int handle_set_training_state(struct handle *handle, enum training_state state) {
    if (!training_allowed[handle->training_state][state])
        return transition_refuse(handle->param.layout.rank, handle->param.name, training_names[handle->training_state],
                                 training_names[state], remedy_for(handle->training_state, state));
    handle->training_state = state;
    return 0;
}
