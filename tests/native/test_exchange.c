/* links: layout/exchange.c layout/partition.c base/memory.c */
#include "base/memory.h"
#include "harness.h"
#include "layout/exchange.h"

enum { TENSORS = 3, WORLD = 4, BYTES = 512 };

static uint64_t random_state = 7;

static struct partition random_partition(int64_t numel) {
    struct partition partition = {numel, 1, random_below(&random_state, 20)};
    /* long enough that the world's ranks hold all elements */
    partition.step = (numel + partition.offset) / WORLD + 1 + random_below(&random_state, 20);
    return partition;
}

/* Byte `at` of tensor `tensor`: all differ within what one test moves. */
static unsigned char byte_of(int64_t tensor, int64_t at) {
    return (unsigned char)(tensor * 83 + at);
}

static void fill_piece(unsigned char *piece, const struct exchange_tensor *tensor, int64_t index,
                       int64_t rank) {
    const struct partition_range own = partition_of_rank(&tensor->source, rank);
    for (int64_t at = own.start * tensor->element_nbytes; at < own.end * tensor->element_nbytes; at++)
        *piece++ = byte_of(index, at);
}

/* What `rank` sends to `peer`, appended to `buffer`. */
static int64_t send(const struct exchange *plan, unsigned char pieces[TENSORS][BYTES], int64_t peer,
                    unsigned char *buffer) {
    size_t at = 0;
    for (int64_t sum = 0, before = 0; before < peer; before++) {
        for (sum = 0; sum < plan->sent_nbytes[before]; at++)
            sum += plan->sent.items[at].nbytes;
    }
    int64_t end = 0;
    while (end < plan->sent_nbytes[peer]) {
        const struct exchange_range *range = &plan->sent.items[at++];
        for (int64_t i = 0; i < range->nbytes; i++)
            buffer[end++] = pieces[range->source][range->start + i];
    }
    return end;
}

static void check_made(const struct exchange *plan, const struct exchange_tensor *tensors,
                       unsigned char pieces[TENSORS][BYTES], const unsigned char *received, int64_t rank) {
    size_t part = 0;
    for (int64_t i = 0; i < TENSORS; i++) {
        const struct partition_range own = partition_of_rank(&tensors[i].target, rank);
        int64_t at = own.start * tensors[i].element_nbytes;
        for (int64_t count = 0; count < plan->part_counts[i]; count++, part++) {
            const struct exchange_range *range = &plan->parts.items[part];
            const unsigned char *source =
                range->source == EXCHANGE_RECEIVED ? received : pieces[range->source - 1];
            for (int64_t byte = 0; byte < range->nbytes; byte++)
                CHECK_EQUAL(source[range->start + byte], byte_of(i, at++));
        }
        CHECK_EQUAL(at, own.end * tensors[i].element_nbytes);
        CHECK_EQUAL(plan->made_nbytes[i], (own.end - own.start) * tensors[i].element_nbytes);
    }
    CHECK_EQUAL(part, plan->parts.count);
}

static void exchange_once(const struct exchange_tensor *tensors) {
    struct exchange plans[WORLD];
    static unsigned char pieces[WORLD][TENSORS][BYTES];
    for (int64_t rank = 0; rank < WORLD; rank++) {
        CHECK_EQUAL(exchange_init(&plans[rank], tensors, TENSORS, rank, WORLD, false), STATUS_OK);
        for (int64_t i = 0; i < TENSORS; i++)
            fill_piece(pieces[rank][i], &tensors[i], i, rank);
    }
    for (int64_t rank = 0; rank < WORLD; rank++) {
        unsigned char received[TENSORS * BYTES];
        int64_t end = 0;
        for (int64_t peer = 0; peer < WORLD; peer++) {
            const int64_t sent = send(&plans[peer], pieces[peer], rank, received + end);
            CHECK_EQUAL(sent, plans[rank].received_nbytes[peer]);
            CHECK(peer != rank || sent == 0);
            end += sent;
        }
        check_made(&plans[rank], tensors, pieces[rank], received, rank);
    }
    for (int64_t rank = 0; rank < WORLD; rank++)
        exchange_free(&plans[rank]);
}

static void gather_once(struct exchange_tensor *tensors) {
    struct exchange plan;
    unsigned char pieces[TENSORS][BYTES], received[WORLD * TENSORS * BYTES];
    for (int64_t i = 0; i < TENSORS; i++) {
        const int64_t numel = tensors[i].source.numel;
        tensors[i].target = (struct partition){numel, numel > 0 ? numel : 1, 0};
    }
    CHECK_EQUAL(exchange_init(&plan, tensors, TENSORS, 0, WORLD, true), STATUS_OK);
    CHECK_EQUAL(plan.sent.count, 0);
    int64_t longest = 0;
    for (int64_t peer = 0; peer < WORLD; peer++)
        longest = plan.received_nbytes[peer] > longest ? plan.received_nbytes[peer] : longest;
    for (int64_t peer = 0; peer < WORLD; peer++) {
        unsigned char *row = received + peer * longest;
        for (int64_t i = 0; i < TENSORS; i++) {
            const struct partition_range own = partition_of_rank(&tensors[i].source, peer);
            fill_piece(row, &tensors[i], i, peer);
            row += (own.end - own.start) * tensors[i].element_nbytes;
        }
    }
    check_made(&plan, tensors, pieces, received, 0);
    exchange_free(&plan);
}

static void test_every_byte_arrives_where_it_belongs(void) {
    for (int round = 0; round < 5000; round++) {
        struct exchange_tensor tensors[TENSORS];
        for (int i = 0; i < TENSORS; i++) {
            const int64_t numel = random_below(&random_state, 60);
            tensors[i] = (struct exchange_tensor){random_partition(numel), random_partition(numel),
                                                  (int64_t)1 << random_below(&random_state, 4)};
        }
        exchange_once(tensors);
        gather_once(tensors);
    }
    CHECK_EQUAL(mem_live_count(), 0);
}

static void test_each_failed_allocation_leaves_nothing_behind(void) {
    const struct exchange_tensor tensors[1] = {{{100, 25, 0}, {100, 30, 0}, 4}};
    struct exchange plan;
    size_t nth = 1;
    for (mem_fail_at(nth); exchange_init(&plan, tensors, 1, 1, WORLD, false) == STATUS_NO_MEMORY;
         mem_fail_at(++nth))
        CHECK_EQUAL(mem_live_count(), 0);
    mem_fail_at(0);
    CHECK(nth > 8);
    exchange_free(&plan);
    CHECK_EQUAL(mem_live_count(), 0);
}

static void test_what_cannot_be_planned_is_invalid(void) {
    struct exchange plan;
    const struct partition ten = {10, 3, 0};
    const struct exchange_tensor behind = {ten, {10, 2, 0}, 4}, other = {ten, {11, 3, 0}, 4};
    const struct exchange_tensor huge = {
        {INT64_MAX / 2, INT64_MAX / 4, 0}, {INT64_MAX / 2, INT64_MAX / 4, 0}, 8};
    CHECK_EQUAL(exchange_init(&plan, &behind, 1, 0, WORLD, false), STATUS_OK);
    exchange_free(&plan);
    CHECK_EQUAL(exchange_init(&plan, &behind, 1, 3, WORLD, false), STATUS_INVALID);
    CHECK_EQUAL(exchange_init(&plan, &other, 1, 0, WORLD, false), STATUS_INVALID);
    CHECK_EQUAL(exchange_init(&plan, &huge, 1, 0, WORLD, false), STATUS_INVALID);
    CHECK_EQUAL(exchange_init(&plan, &behind, 1, WORLD, WORLD, false), STATUS_INVALID);
    CHECK_EQUAL(mem_live_count(), 0);
}

int main(void) {
    RUN(test_every_byte_arrives_where_it_belongs);
    RUN(test_each_failed_allocation_leaves_nothing_behind);
    RUN(test_what_cannot_be_planned_is_invalid);
    return 0;
}
