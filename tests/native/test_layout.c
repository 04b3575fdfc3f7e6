/* links: base/memory.c layout/layout.c */
#include <string.h>

#include "base/memory.h"
#include "harness.h"
#include "layout/layout.h"

#define COUNT_OF(array) ((int64_t)(sizeof(array) / sizeof *(array)))

static struct layout_spec spec_of(const int64_t *numels, int64_t num_params, int64_t aligned_numel,
                                  int64_t world_size, int64_t rank) {
    return (struct layout_spec){numels, num_params, aligned_numel, world_size, rank, true};
}

static void check_range(struct layout_shard_range range, int64_t offset_in_shard, int64_t numel_in_shard,
                        int64_t offset_in_param) {
    CHECK(range.in_shard);
    CHECK_EQUAL(range.offset_in_shard, offset_in_shard);
    CHECK_EQUAL(range.numel_in_shard, numel_in_shard);
    CHECK_EQUAL(range.offset_in_param, offset_in_param);
}

static void check_refused(struct layout_spec spec, enum status expected) {
    struct flat_layout layout, zeroed;
    memset(&layout, 0xff, sizeof layout);
    memset(&zeroed, 0, sizeof zeroed);
    CHECK_EQUAL(layout_init(&layout, &spec), expected);
    CHECK(memcmp(&layout, &zeroed, sizeof layout) == 0);
    layout_fini(&layout);
}

TEST(test_arguments_outside_their_domain_are_invalid) {
    const int64_t numels[] = {3, 2}, negative[] = {3, -1};
    check_refused(spec_of(numels, 0, 4, 2, 0), STATUS_INVALID);
    check_refused(spec_of(numels, -1, 4, 2, 0), STATUS_INVALID);
    check_refused(spec_of(numels, INT64_MAX, 4, 2, 0), STATUS_INVALID);
    check_refused(spec_of(numels, 2, -1, 2, 0), STATUS_INVALID);
    check_refused(spec_of(numels, 2, 4, 0, 0), STATUS_INVALID);
    check_refused(spec_of(numels, 2, 4, 2, 2), STATUS_INVALID);
    check_refused(spec_of(numels, 2, 4, 2, -1), STATUS_INVALID);
    check_refused(spec_of(negative, 2, 4, 2, 0), STATUS_INVALID);
}

TEST(test_totals_beyond_64_bits_are_invalid) {
    const int64_t sum[] = {INT64_MAX, 1}, aligned[] = {INT64_MAX, 0}, largest[] = {INT64_MAX};
    check_refused(spec_of(sum, 2, 0, 1, 0), STATUS_INVALID);
    check_refused(spec_of(aligned, 2, 4, 1, 0), STATUS_INVALID); /* the alignment pad */
    check_refused(spec_of(largest, 1, 1, 2, 0), STATUS_INVALID); /* the divisibility pad */
    check_refused(spec_of(largest, 1, 0, 2, 0), STATUS_INVALID); /* the right padding */
    check_refused(spec_of(aligned, 1, 0, INT64_MAX - 1, 0), STATUS_INVALID);

    const struct layout_spec spec = spec_of(largest, 1, 0, 1, 0);
    struct flat_layout layout;
    CHECK_EQUAL(layout_init(&layout, &spec), STATUS_OK);
    check_range(layout.shard_ranges[0], 0, INT64_MAX, 0);
    layout_fini(&layout);
}

TEST(test_every_failed_allocation_leaves_nothing_behind) {
    const int64_t numels[] = {9, 3, 6};
    const struct layout_spec spec = spec_of(numels, COUNT_OF(numels), 4, 4, 1);
    for (size_t nth = 1; nth <= 3; nth++) {
        mem_fail_at(nth);
        check_refused(spec, STATUS_NO_MEMORY);
        CHECK_EQUAL(mem_live_count(), 0);
    }
    struct flat_layout layout;
    mem_fail_at(4); /* layout_init needs no fourth one */
    CHECK_EQUAL(layout_init(&layout, &spec), STATUS_OK);
    mem_fail_at(0);
    layout_fini(&layout);
}

TEST(test_fini_twice_is_legal) {
    const int64_t numels[] = {1};
    const struct layout_spec spec = spec_of(numels, 1, 0, 1, 0);
    struct flat_layout layout;
    CHECK_EQUAL(layout_init(&layout, &spec), STATUS_OK);
    layout_fini(&layout);
    layout_fini(&layout);
    CHECK_EQUAL(layout.num_params, 0);
}

TEST(test_array_of_overflowing_size_is_refused) {
    CHECK(mem_new_array(SIZE_MAX / 2 + 1, 2) == NULL);
    CHECK(mem_new_array(SIZE_MAX, SIZE_MAX) == NULL);
}

TEST(test_array_of_no_elements_is_not_a_failure) {
    void *none = mem_new_array(0, 8);
    CHECK(none != NULL);
    mem_free(none);
}

TEST(test_array_is_zeroed) {
    int64_t *array = mem_new_array(100, sizeof *array);
    CHECK(array != NULL);
    for (int i = 0; i < 100; i++) {
        CHECK_EQUAL(array[i], 0);
    }
    mem_free(array);
}

int main(void) {
    const int failed = run_tests();
    CHECK_EQUAL(mem_live_count(), 0);
    return failed;
}
