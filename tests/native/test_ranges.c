/* links: layout/partition.c layout/boxes.c */
#include "harness.h"
#include "layout/boxes.h"
#include "layout/partition.h"

static uint64_t random_state = 1;

static void test_random_partitions_divide_every_range_by_rank(void) {
    for (int round = 0; round < 200000; round++) {
        const struct partition partition = {random_below(&random_state, 100),
                                            1 + random_below(&random_state, 40),
                                            random_below(&random_state, 60)};
        CHECK(partition_is_valid(&partition));
        int64_t covered = 0;
        for (int64_t start = 0; start < partition.numel;) {
            const struct partition_range part = partition_next(&partition, start, partition.numel);
            const struct partition_range of_rank = partition_of_rank(&partition, part.rank);
            CHECK_EQUAL(part.start, start);
            CHECK_EQUAL(part.end, of_rank.end);
            CHECK(of_rank.start <= part.start && part.start < part.end);
            covered += part.end - part.start;
            start = part.end;
        }
        CHECK_EQUAL(covered, partition.numel);
    }
}

static void test_rank_behind_the_last_element_holds_nothing(void) {
    const struct partition partition = {10, 4, 2};
    const struct partition_range last = partition_of_rank(&partition, 2);
    CHECK_EQUAL(last.start, 6);
    CHECK_EQUAL(last.end, 10);
    CHECK_EQUAL(partition_of_rank(&partition, 3).end, 0);
    CHECK_EQUAL(partition_of_rank(&partition, INT64_MAX - 1).end, 0);
    CHECK_EQUAL(partition_of_rank(&partition, -1).end, 0);
}

static void test_partitions_whose_sums_leave_64_bits_are_invalid(void) {
    CHECK(!partition_is_valid(&(struct partition){INT64_MAX, 1, 1}));
    CHECK(!partition_is_valid(&(struct partition){INT64_MAX - 1, 2, 0}));
    CHECK(!partition_is_valid(&(struct partition){1, INT64_MAX, 0}));
    CHECK(!partition_is_valid(&(struct partition){1, 0, 0}));
    CHECK(!partition_is_valid(&(struct partition){-1, 1, 0}));
    CHECK(partition_is_valid(&(struct partition){INT64_MAX / 2, INT64_MAX / 2, 0}));
}

/* The flat index of a box's first element, and whether it lies in one piece. */
static int64_t flat_start(const int64_t *shape, int ndim, const struct box *box) {
    int64_t start = 0;
    for (int dim = 0; dim < ndim; dim++) {
        CHECK(box->offsets[dim] >= 0 && box->sizes[dim] >= 1);
        CHECK(box->offsets[dim] + box->sizes[dim] <= shape[dim]);
        start = start * shape[dim] + box->offsets[dim];
    }
    return start;
}

static bool in_one_piece(const int64_t *shape, int ndim, const struct box *box) {
    int dim = 0;
    while (dim < ndim && box->sizes[dim] == 1) {
        dim++;
    }
    for (dim++; dim < ndim; dim++) {
        if (box->sizes[dim] != shape[dim]) {
            return false;
        }
    }
    return true;
}

static void test_random_ranges_are_at_most_2n_minus_1_boxes(void) {
    for (int round = 0; round < 200000; round++) {
        const int ndim = 1 + (int)random_below(&random_state, 5);
        int64_t shape[5], numel = 1;
        for (int dim = 0; dim < ndim; dim++) {
            shape[dim] = 1 + random_below(&random_state, 6);
            numel *= shape[dim];
        }
        const int64_t begin = random_below(&random_state, numel),
                      end = begin + 1 + random_below(&random_state, numel - begin);
        int count = 0;
        for (int64_t start = begin; start < end; count++) {
            struct box box;
            const int64_t held = box_at(shape, ndim, start, end, &box);
            CHECK_EQUAL(flat_start(shape, ndim, &box), start);
            CHECK(held >= 1 && in_one_piece(shape, ndim, &box));
            start += held;
            CHECK(start <= end);
        }
        CHECK(count <= 2 * ndim - 1);
    }
}

int main(void) {
    RUN(test_random_partitions_divide_every_range_by_rank);
    RUN(test_rank_behind_the_last_element_holds_nothing);
    RUN(test_partitions_whose_sums_leave_64_bits_are_invalid);
    RUN(test_random_ranges_are_at_most_2n_minus_1_boxes);
    return 0;
}
