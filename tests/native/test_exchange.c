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

TEST(test_every_byte_that_is_gathered_arrives_where_it_belongs) {
    for (int round = 0; round < 5000; round++) {
        struct exchange_tensor tensors[TENSORS];
        for (int i = 0; i < TENSORS; i++) {
            const int64_t numel = random_below(&random_state, 60);
            tensors[i] =
                (struct exchange_tensor){.source = random_partition(numel),
                                         .element_nbytes = (int64_t)1 << random_below(&random_state, 4)};
        }
        gather_once(tensors);
    }
    CHECK_EQUAL(mem_live_count(), 0);
}

TEST(test_each_failed_allocation_leaves_nothing_behind) {
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

TEST(test_what_cannot_be_planned_is_invalid) {
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

TEST(test_rank_behind_the_last_element_holds_nothing) {
    const struct partition partition = {10, 4, 2};
    const struct partition_range last = partition_of_rank(&partition, 2);
    CHECK_EQUAL(last.start, 6);
    CHECK_EQUAL(last.end, 10);
    CHECK_EQUAL(partition_of_rank(&partition, 3).end, 0);
    CHECK_EQUAL(partition_of_rank(&partition, INT64_MAX - 1).end, 0);
    CHECK_EQUAL(partition_of_rank(&partition, -1).end, 0);
}

TEST(test_partitions_whose_sums_leave_64_bits_are_invalid) {
    CHECK(!partition_is_valid(&(struct partition){INT64_MAX, 1, 1}));
    CHECK(!partition_is_valid(&(struct partition){INT64_MAX - 1, 2, 0}));
    CHECK(!partition_is_valid(&(struct partition){1, INT64_MAX, 0}));
    CHECK(!partition_is_valid(&(struct partition){1, 0, 0}));
    CHECK(!partition_is_valid(&(struct partition){-1, 1, 0}));
    CHECK(partition_is_valid(&(struct partition){INT64_MAX / 2, INT64_MAX / 2, 0}));
}

int main(void) {
    return run_tests();
}
