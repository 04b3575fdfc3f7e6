/* What the slots show: the table, and the only writer. */
#include "handle/slots.h"
#include "handle/transition.h"

#include "base/check.h"

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

int slots_set_shown(struct slots *slots, enum shown shown) {
    if (!shown_allowed[slots->shown][shown])
        return transition_refuse(slots->param->layout.rank, slots->param->name, shown_names[slots->shown],
                                 shown_names[shown], "");
    slots->shown = shown;
    CHECKED(slots_check(slots));
    return 0;
}

void slots_check(const struct slots *slots) {
    (void)slots; /* without FSDP_C_CHECK */
    INVARIANT(slots->count >= slots->param->num_params);
    INVARIANT(slots->shown != SHOWN_SHARDED || slots->param->use_orig_params);
    INVARIANT(!slots->wrapped_views || slots->wrap_views);
}
