/* What `.grad` holds between backwards: the table, and the only writer. */
#include "handle/gradients.h"
#include "handle/transition.h"

#include "base/check.h"

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
        return transition_refuse(gradients->param->layout.rank, gradients->param->name, grad_names[gradients->kind],
                                 grad_names[kind], "");
    gradients->kind = kind;
    CHECKED(gradients_check(gradients));
    return 0;
}

void gradients_check(const struct gradients *gradients) {
    (void)gradients; /* without FSDP_C_CHECK */
    INVARIANT(gradients->kind != GRAD_SHARDED || !gradients->in_backward);
    INVARIANT(gradients->kind != GRAD_UNSHARDED || gradients->param->sharded);
    INVARIANT(!gradients->work || gradients->reduce_output);
    INVARIANT(!gradients->offloaded || gradients->storage->offload);
    INVARIANT(!gradients->shown || gradients->kind == GRAD_SHARDED);
}
