#include "torch/deferred_free.h"

/* What the memory is taken for from now on comes after the last use. */
static int wait_for_last_use(struct deferred_free *deferred) {
    if (stream_wait(deferred->streams, deferred->writer, deferred->last_use) < 0)
        return -1;
    return stream_wait(deferred->streams, deferred->owner, deferred->last_use);
}

/* The link that leads to `buffer`, or the last one. */
static struct buffer **link_to(struct deferred_free *deferred, const struct buffer *buffer) {
    struct buffer **link = &deferred->held;
    while (*link && *link != buffer)
        link = &(*link)->next_held;
    return link;
}

static struct buffer *take_out(struct buffer **link) {
    struct buffer *buffer = *link;
    *link = buffer->next_held;
    buffer->next_held = NULL;
    return buffer;
}

bool deferred_free_holds(const struct deferred_free *deferred, const struct buffer *buffer) {
    const struct buffer *held = deferred ? deferred->held : NULL;
    while (held && held != buffer)
        held = held->next_held;
    return held;
}

int deferred_free_flush(struct deferred_free *deferred) {
    if (!deferred->held)
        return 0;
    bool waits = wait_for_last_use(deferred) == 0;
    int result = waits ? 0 : -1;
    while (deferred->held) {
        struct buffer *buffer = take_out(&deferred->held);
        if (waits && buffer_free(buffer) < 0)
            result = -1;
    }
    return result;
}

int deferred_free_add(struct deferred_free *deferred, struct buffer *buffer, bool beside) {
    if (!buffer->allocated)
        return 0;
    if (!deferred_free_holds(deferred, buffer)) {
        if (!beside && deferred_free_flush(deferred) < 0)
            return -1;
        buffer->next_held = deferred->held;
        deferred->held = buffer;
    }
    return stream_record(deferred->streams, deferred->user, &deferred->last_use);
}

int deferred_free_take_back(struct deferred_free *deferred, struct buffer *buffer) {
    struct buffer **link = link_to(deferred, buffer);
    if (!*link)
        return 0;
    take_out(link);
    return wait_for_last_use(deferred);
}

int deferred_free_forget(struct deferred_free *deferred, struct buffer *buffer) {
    return deferred_free_holds(deferred, buffer) ? deferred_free_flush(deferred) : 0;
}
