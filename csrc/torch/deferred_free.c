#include "torch/deferred_free.h"

/* What the memory is taken for from now on comes after the last use. */
static int wait_for_last_use(struct deferred_free *deferred) {
    if (stream_wait(deferred->streams, deferred->writer, deferred->last_use) < 0)
        return -1;
    return stream_wait(deferred->streams, deferred->owner, deferred->last_use);
}

int deferred_free_settle(struct deferred_free *deferred) {
    struct buffer *held = deferred->held;
    if (!held)
        return 0;
    deferred->held = NULL;
    return wait_for_last_use(deferred) < 0 ? -1 : buffer_free(held);
}

int deferred_free_add(struct deferred_free *deferred, struct buffer *buffer) {
    if (!buffer->allocated)
        return 0;
    if (deferred->held != buffer && deferred_free_settle(deferred) < 0)
        return -1;
    deferred->held = buffer;
    return stream_record(deferred->streams, deferred->user, &deferred->last_use);
}

int deferred_free_take_back(struct deferred_free *deferred, const struct buffer *buffer) {
    if (deferred->held != buffer)
        return 0;
    deferred->held = NULL;
    return wait_for_last_use(deferred);
}

int deferred_free_forget(struct deferred_free *deferred, const struct buffer *buffer) {
    return deferred_free_holds(deferred, buffer) ? deferred_free_settle(deferred) : 0;
}
