#include "torch/retirement.h"

/* What the owner does from now on comes after the last use. */
static int wait_for_last_use(struct retirement *retirement) {
    return stream_wait(retirement->streams, retirement->owner, retirement->last_use);
}

int retirement_settle(struct retirement *retirement) {
    struct buffer *held = retirement->held;
    if (!held)
        return 0;
    retirement->held = NULL;
    return wait_for_last_use(retirement) < 0 ? -1 : buffer_free(held);
}

int retirement_add(struct retirement *retirement, struct buffer *buffer) {
    if (!buffer->allocated)
        return 0;
    if (retirement->held != buffer && retirement_settle(retirement) < 0)
        return -1;
    retirement->held = buffer;
    return stream_record(retirement->streams, retirement->user, &retirement->last_use);
}

int retirement_take_back(struct retirement *retirement, const struct buffer *buffer) {
    if (retirement->held != buffer)
        return 0;
    retirement->held = NULL;
    return wait_for_last_use(retirement);
}

int retirement_forget(struct retirement *retirement, const struct buffer *buffer) {
    return retirement_holds(retirement, buffer) ? retirement_settle(retirement) : 0;
}
