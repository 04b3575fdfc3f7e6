/* How far a reduction has come: the table, and the only writer. What else holds of a schedule. */
#include "handle/transition.h"
#include "runtime/schedule.h"

#include "base/check.h"

static const bool reduction_allowed[REDUCTION_STATES][REDUCTION_STATES] = {
    [REDUCTION_NONE] = {[REDUCTION_NONE] = true, /* after an exception */
                        [REDUCTION_PACKED] = true},
    [REDUCTION_PACKED] = {[REDUCTION_ENQUEUED] = true, [REDUCTION_NONE] = true /* after an exception */},
    [REDUCTION_ENQUEUED] = {[REDUCTION_NONE] = true}, /* finished, or after an exception */
};

static const char *const reduction_names[REDUCTION_STATES] = {"REDUCTION_NONE", "REDUCTION_PACKED",
                                                              "REDUCTION_ENQUEUED"};

int schedule_set_reduction(struct schedule *schedule, enum reduction_state state, const struct flat_param *param) {
    if (!reduction_allowed[schedule->reduction][state])
        return transition_refuse(param->layout.rank, param->name, reduction_names[schedule->reduction],
                                 reduction_names[state], "");
    schedule->reduction = state;
    CHECKED(schedule_check(schedule));
    return 0;
}

bool schedule_is_settled(const struct schedule *schedule) {
    return schedule->reduction == REDUCTION_NONE && !schedule->packed_gradients && !schedule->reducing &&
           !schedule->all_reducing && !schedule->scattered_output && !schedule->uploading && !schedule->unsharded.held;
}

#ifdef FSDP_C_CHECK
static bool needs_no_streams(const struct schedule *schedule) {
    return !schedule->limiter_count && !schedule->packs_beside && !schedule->packed_gradients && !schedule->reducing &&
           !schedule->all_reducing && !schedule->uploading && !schedule->unsharded.held;
}
#endif

void schedule_check(const struct schedule *schedule) {
    (void)schedule; /* without FSDP_C_CHECK */
    INVARIANT(streams_are_real(&schedule->streams) || needs_no_streams(schedule));
    INVARIANT(schedule->limiter_count >= 0 && schedule->limiter_count <= LIMITER_DEPTH);
    INVARIANT(schedule->limiter_count <= schedule->num_frees);
    INVARIANT(schedule->all_reducing || !schedule->scattered_output);
}
