#include "layout/exchange.h"

#include <string.h>

#include "base/memory.h"

static enum status append(struct exchange_ranges *ranges, struct exchange_range range) {
    if (ranges->count == ranges->capacity) {
        const size_t capacity = ranges->capacity ? 2 * ranges->capacity : 64;
        struct exchange_range *items = mem_new_array(capacity, sizeof *items);
        if (!items)
            return STATUS_NO_MEMORY;
        if (ranges->count)
            memcpy(items, ranges->items, ranges->count * sizeof *items);
        mem_free(ranges->items);
        ranges->items = items;
        ranges->capacity = capacity;
    }
    ranges->items[ranges->count++] = range;
    return STATUS_OK;
}

/* A plan under construction. */
struct plan_builder {
    struct exchange *plan;
    int64_t rank;
    int64_t world_size;
    bool gathered;
    struct exchange_ranges outgoing;       /* owned; in the order of the tensors */
    struct exchange_ranges outgoing_peers; /* owned; `source` is the peer of outgoing.items[i] */
    struct exchange_ranges part_peers;     /* owned; `source` is the peer of plan->parts.items[i] */
};

static enum status plan_sent(struct plan_builder *builder, const struct exchange_tensor *tensor,
                             int64_t index) {
    const struct partition_range own = partition_of_rank(&tensor->source, builder->rank);
    const int64_t scale = tensor->element_nbytes;
    builder->plan->source_nbytes[index] = (own.end - own.start) * scale;
    for (int64_t start = own.start; start < own.end && !builder->gathered;) {
        const struct partition_range part = partition_next(&tensor->target, start, own.end);
        if (part.rank >= builder->world_size)
            return STATUS_INVALID;
        if (part.rank != builder->rank) {
            const struct exchange_range range = {index, (part.start - own.start) * scale,
                                                 (part.end - part.start) * scale};
            if (append(&builder->outgoing, range) ||
                append(&builder->outgoing_peers, (struct exchange_range){.source = part.rank}))
                return STATUS_NO_MEMORY;
            builder->plan->sent_nbytes[part.rank] += range.nbytes;
        }
        start = part.end;
    }
    return STATUS_OK;
}

static enum status plan_parts(struct plan_builder *builder, const struct exchange_tensor *tensor,
                              int64_t index) {
    struct exchange *plan = builder->plan;
    const struct partition_range own = partition_of_rank(&tensor->target, builder->rank);
    const struct partition_range source_range = partition_of_rank(&tensor->source, builder->rank);
    const int64_t scale = tensor->element_nbytes;
    plan->target_nbytes[index] = (own.end - own.start) * scale;
    for (int64_t start = own.start; start < own.end;) {
        const struct partition_range part = partition_next(&tensor->source, start, own.end);
        if (part.rank >= builder->world_size)
            return STATUS_INVALID;
        const bool stays = part.rank == builder->rank && !builder->gathered;
        const int64_t nbytes = (part.end - part.start) * scale;
        const struct exchange_range range = {
            stays ? index + 1 : EXCHANGE_RECEIVED,
            stays ? (part.start - source_range.start) * scale : plan->received_nbytes[part.rank], nbytes};
        if (append(&plan->parts, range) ||
            append(&builder->part_peers, (struct exchange_range){.source = part.rank}))
            return STATUS_NO_MEMORY;
        plan->received_nbytes[part.rank] += stays ? 0 : nbytes;
        plan->part_counts[index]++;
        start = part.end;
    }
    return STATUS_OK;
}

/* Group the outgoing ranges by peer. The order of the ranges of one peer is kept. */
static enum status sort_sent(struct plan_builder *builder) {
    struct exchange_ranges *sent = &builder->plan->sent;
    size_t *next = mem_new_array((size_t)builder->world_size + 1, sizeof *next);
    sent->items = mem_new_array(builder->outgoing.count, sizeof *sent->items);
    if (next && sent->items) {
        sent->count = sent->capacity = builder->outgoing.count;
        for (size_t i = 0; i < sent->count; i++)
            next[builder->outgoing_peers.items[i].source + 1]++;
        for (int64_t peer = 0; peer < builder->world_size; peer++)
            next[peer + 1] += next[peer];
        for (size_t i = 0; i < sent->count; i++)
            sent->items[next[builder->outgoing_peers.items[i].source]++] = builder->outgoing.items[i];
    }
    const bool failed = !next || !sent->items;
    mem_free(next);
    return failed ? STATUS_NO_MEMORY : STATUS_OK;
}

/* Add to the start of each received part the position of its peer's bytes in the receive buffer. */
static enum status place_parts(struct plan_builder *builder) {
    struct exchange *plan = builder->plan;
    int64_t *peer_starts = mem_new_array((size_t)builder->world_size, sizeof *peer_starts);
    if (!peer_starts)
        return STATUS_NO_MEMORY;
    int64_t longest = 0, end = 0;
    for (int64_t peer = 0; peer < builder->world_size; peer++)
        longest = plan->received_nbytes[peer] > longest ? plan->received_nbytes[peer] : longest;
    for (int64_t peer = 0; peer < builder->world_size; peer++) {
        peer_starts[peer] = end;
        end += builder->gathered ? longest : plan->received_nbytes[peer];
    }
    for (size_t i = 0; i < plan->parts.count; i++)
        if (plan->parts.items[i].source == EXCHANGE_RECEIVED)
            plan->parts.items[i].start += peer_starts[builder->part_peers.items[i].source];
    mem_free(peer_starts);
    return STATUS_OK;
}

static bool tensor_is_valid(const struct exchange_tensor *tensor) {
    return partition_is_valid(&tensor->source) && partition_is_valid(&tensor->target) &&
           tensor->source.numel == tensor->target.numel && tensor->element_nbytes >= 1 &&
           tensor->source.numel <= INT64_MAX / tensor->element_nbytes;
}

static enum status build_plan(struct plan_builder *builder, const struct exchange_tensor *tensors,
                              size_t count) {
    struct exchange *plan = builder->plan;
    plan->part_counts = mem_new_array(count, sizeof *plan->part_counts);
    plan->source_nbytes = mem_new_array(count, sizeof *plan->source_nbytes);
    plan->target_nbytes = mem_new_array(count, sizeof *plan->target_nbytes);
    plan->sent_nbytes = mem_new_array((size_t)builder->world_size, sizeof *plan->sent_nbytes);
    plan->received_nbytes = mem_new_array((size_t)builder->world_size, sizeof *plan->received_nbytes);
    if (!plan->part_counts || !plan->source_nbytes || !plan->target_nbytes || !plan->sent_nbytes ||
        !plan->received_nbytes)
        return STATUS_NO_MEMORY;
    for (size_t i = 0; i < count; i++) {
        enum status status = tensor_is_valid(&tensors[i]) ? STATUS_OK : STATUS_INVALID;
        status = status ? status : plan_sent(builder, &tensors[i], (int64_t)i);
        status = status ? status : plan_parts(builder, &tensors[i], (int64_t)i);
        if (status)
            return status;
    }
    const enum status status = sort_sent(builder);
    return status ? status : place_parts(builder);
}

enum status exchange_init(struct exchange *plan, const struct exchange_tensor *tensors, size_t count,
                          int64_t rank, int64_t world_size, bool gathered) {
    struct plan_builder builder = {
        .plan = plan, .rank = rank, .world_size = world_size, .gathered = gathered};
    memset(plan, 0, sizeof *plan);
    if (rank < 0 || world_size < 1 || rank >= world_size)
        return STATUS_INVALID;
    const enum status status = build_plan(&builder, tensors, count);
    mem_free(builder.outgoing.items);
    mem_free(builder.outgoing_peers.items);
    mem_free(builder.part_peers.items);
    if (status)
        exchange_free(plan);
    return status;
}

void exchange_free(struct exchange *plan) {
    mem_free(plan->sent.items);
    mem_free(plan->parts.items);
    mem_free(plan->part_counts);
    mem_free(plan->source_nbytes);
    mem_free(plan->target_nbytes);
    mem_free(plan->sent_nbytes);
    mem_free(plan->received_nbytes);
    memset(plan, 0, sizeof *plan);
}
