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

static void check_segment(const struct flat_layout *layout, int64_t index, int64_t offset, int64_t numel,
                          int64_t param) {
    CHECK_EQUAL(layout->segments[index].offset, offset);
    CHECK_EQUAL(layout->segments[index].numel, numel);
    CHECK_EQUAL(layout->segments[index].param, param);
}

static void check_range(struct layout_shard_range range, int64_t offset_in_shard, int64_t numel_in_shard,
                        int64_t offset_in_param) {
    CHECK(range.in_shard);
    CHECK_EQUAL(range.offset_in_shard, offset_in_shard);
    CHECK_EQUAL(range.numel_in_shard, numel_in_shard);
    CHECK_EQUAL(range.offset_in_param, offset_in_param);
}

static void check_absent(struct layout_shard_range range) {
    CHECK(!range.in_shard);
    CHECK_EQUAL(range.offset_in_shard, 0);
    CHECK_EQUAL(range.numel_in_shard, 0);
    CHECK_EQUAL(range.offset_in_param, 0);
}

static void test_alignment_pads_stand_before_parameters(void) {
    const int64_t numels[] = {9, 3, 6};
    const struct layout_spec spec = spec_of(numels, 3, 4, 2, 0);
    struct flat_layout layout;
    CHECK_EQUAL(layout_init(&layout, &spec), STATUS_OK);
    CHECK_EQUAL(layout.num_segments, 5);
    check_segment(&layout, 0, 0, 9, 0);
    check_segment(&layout, 1, 9, 3, LAYOUT_PADDING);
    check_segment(&layout, 2, 12, 3, 1);
    check_segment(&layout, 3, 15, 1, LAYOUT_PADDING);
    check_segment(&layout, 4, 16, 6, 2);
    CHECK_EQUAL(layout.numel, 22);
    CHECK_EQUAL(layout_param_offset(&layout, 2), 16);
    CHECK_EQUAL(layout_param_numel(&layout, 2), 6);
    layout_fini(&layout);
}

static void test_divisibility_pad_is_the_last_segment(void) {
    const int64_t numels[] = {9, 3, 6};
    const struct layout_spec spec = spec_of(numels, 3, 4, 4, 3);
    struct flat_layout layout;
    CHECK_EQUAL(layout_init(&layout, &spec), STATUS_OK);
    check_segment(&layout, 5, 22, 2, LAYOUT_PADDING);
    CHECK_EQUAL(layout.numel, 24);
    CHECK_EQUAL(layout.shard_numel, 6);
    CHECK_EQUAL(layout.shard_numel_padded, 0);
    check_range(layout.shard_ranges[2], 0, 4, 2);
    layout_fini(&layout);
}

static void test_chunks_beyond_the_end_are_right_padding(void) {
    const int64_t numels[] = {5};
    const int64_t valid[] = {2, 2, 1, 0};
    for (int64_t rank = 0; rank < 4; rank++) {
        const struct layout_spec spec = spec_of(numels, 1, 0, 4, rank);
        struct flat_layout layout;
        CHECK_EQUAL(layout_init(&layout, &spec), STATUS_OK);
        CHECK_EQUAL(layout.shard_numel, 2);
        CHECK_EQUAL(layout.padded_numel, 8);
        CHECK_EQUAL(layout.shard_start, 2 * rank);
        CHECK_EQUAL(layout.shard_numel_valid, valid[rank]);
        CHECK_EQUAL(layout.shard_numel_padded, 2 - valid[rank]);
        if (rank < 3) {
            check_range(layout.shard_ranges[0], 0, valid[rank], 2 * rank);
        } else {
            check_absent(layout.shard_ranges[0]);
        }
        layout_fini(&layout);
    }
}

static void test_unsharded_layout_gives_every_rank_everything(void) {
    const int64_t numels[] = {3, 6};
    struct layout_spec spec = spec_of(numels, 2, 4, 3, 2);
    spec.sharded = false;
    struct flat_layout layout;
    CHECK_EQUAL(layout_init(&layout, &spec), STATUS_OK);
    CHECK_EQUAL(layout.numel, 12); /* 3 + 1 + 6, and 2 although nothing is sharded */
    CHECK_EQUAL(layout.shard_numel, 12);
    CHECK_EQUAL(layout.padded_numel, 12);
    CHECK_EQUAL(layout.shard_start, 0);
    CHECK_EQUAL(layout.shard_numel_valid, 12);
    for (int64_t rank = 0; rank < 3; rank++) {
        check_range(layout_shard_range(&layout, 1, rank), 4, 6, 0);
    }
    layout_fini(&layout);
}

static void test_empty_parameter_is_in_the_shard_only_strictly_inside(void) {
    const int64_t numels[] = {0, 2, 0, 2, 0};
    const struct layout_spec spec = spec_of(numels, 5, 0, 2, 0);
    struct flat_layout layout;
    CHECK_EQUAL(layout_init(&layout, &spec), STATUS_OK);
    check_absent(layout_shard_range(&layout, 0, 0)); /* at the first element of rank 0 */
    /* at the end of rank 0 and the first element of rank 1 */
    check_absent(layout_shard_range(&layout, 2, 0));
    check_absent(layout_shard_range(&layout, 2, 1));
    check_absent(layout_shard_range(&layout, 4, 1));
    layout_fini(&layout);
    const struct layout_spec whole = spec_of(numels, 5, 0, 1, 0);
    CHECK_EQUAL(layout_init(&layout, &whole), STATUS_OK);
    check_range(layout_shard_range(&layout, 2, 0), 2, 0, 0);
    layout_fini(&layout);
}

static void test_empty_parameters_alone_make_empty_shards(void) {
    const int64_t numels[] = {0, 0};
    const struct layout_spec spec = spec_of(numels, 2, 4, 3, 2);
    struct flat_layout layout;
    CHECK_EQUAL(layout_init(&layout, &spec), STATUS_OK);
    CHECK_EQUAL(layout.numel, 0);
    CHECK_EQUAL(layout.shard_numel, 0);
    check_absent(layout.shard_ranges[0]);
    layout_fini(&layout);
}

/* Paint every element of the flat parameter with what the segments say and with what the ranks' ranges
 * say. */
static void check_partition(const struct flat_layout *layout, int64_t aligned_numel) {
    int64_t end = 0;
    for (int64_t index = 0; index < layout->num_segments; index++) {
        const struct layout_segment *segment = &layout->segments[index];
        CHECK_EQUAL(segment->offset, end);
        CHECK(segment->param == LAYOUT_PADDING || aligned_numel == 0 || segment->offset % aligned_numel == 0);
        CHECK(segment->param != LAYOUT_PADDING || segment->numel > 0);
        end += segment->numel;
    }
    CHECK_EQUAL(layout->numel, end);
    CHECK(aligned_numel == 0 || layout->numel % layout->world_size == 0);

    /* 1 + parameter that a rank holds there */
    int64_t *held = mem_new_array((size_t)layout->numel, sizeof *held);
    CHECK(held != NULL);
    for (int64_t rank = 0; rank < layout->world_size; rank++) {
        for (int64_t param = 0; param < layout->num_params; param++) {
            const struct layout_shard_range range = layout_shard_range(layout, param, rank);
            for (int64_t i = 0; i < range.numel_in_shard; i++) {
                const int64_t element = rank * layout->shard_numel + range.offset_in_shard + i;
                CHECK_EQUAL(element, layout_param_offset(layout, param) + range.offset_in_param + i);
                CHECK_EQUAL(element / layout->shard_numel, rank);
                CHECK_EQUAL(held[element], 0);
                held[element] = 1 + param;
            }
        }
    }
    for (int64_t index = 0; index < layout->num_segments; index++) {
        const struct layout_segment *segment = &layout->segments[index];
        for (int64_t i = 0; i < segment->numel; i++) {
            CHECK_EQUAL(held[segment->offset + i], segment->param == LAYOUT_PADDING ? 0 : 1 + segment->param);
        }
    }
    mem_free(held);
}

static void test_random_layouts_are_partitions(void) {
    uint64_t state = 88172645463325252u;
    for (int round = 0; round < 3000; round++) {
        int64_t numels[9];
        const int64_t num_params = 1 + random_below(&state, 9);
        for (int64_t param = 0; param < num_params; param++) {
            numels[param] = random_below(&state, 4) == 0 ? 0 : random_below(&state, 20);
        }
        const int64_t aligned_numel = random_below(&state, 9), world_size = 1 + random_below(&state, 9);
        const struct layout_spec spec =
            spec_of(numels, num_params, aligned_numel, world_size, random_below(&state, world_size));
        struct flat_layout layout;
        CHECK_EQUAL(layout_init(&layout, &spec), STATUS_OK);
        check_partition(&layout, aligned_numel);
        layout_fini(&layout);
    }
}

static void check_refused(struct layout_spec spec, enum status expected) {
    struct flat_layout layout, zeroed;
    memset(&layout, 0xff, sizeof layout);
    memset(&zeroed, 0, sizeof zeroed);
    CHECK_EQUAL(layout_init(&layout, &spec), expected);
    CHECK(memcmp(&layout, &zeroed, sizeof layout) == 0);
    layout_fini(&layout);
}

static void test_arguments_outside_their_domain_are_invalid(void) {
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

static void test_totals_beyond_64_bits_are_invalid(void) {
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

static void test_every_failed_allocation_leaves_nothing_behind(void) {
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

static void test_fini_twice_is_legal(void) {
    const int64_t numels[] = {1};
    const struct layout_spec spec = spec_of(numels, 1, 0, 1, 0);
    struct flat_layout layout;
    CHECK_EQUAL(layout_init(&layout, &spec), STATUS_OK);
    layout_fini(&layout);
    layout_fini(&layout);
    CHECK_EQUAL(layout.num_params, 0);
}

static void test_array_of_overflowing_size_is_refused(void) {
    CHECK(mem_new_array(SIZE_MAX / 2 + 1, 2) == NULL);
    CHECK(mem_new_array(SIZE_MAX, SIZE_MAX) == NULL);
}

static void test_array_of_no_elements_is_not_a_failure(void) {
    void *none = mem_new_array(0, 8);
    CHECK(none != NULL);
    mem_free(none);
}

static void test_array_is_zeroed(void) {
    int64_t *array = mem_new_array(100, sizeof *array);
    CHECK(array != NULL);
    for (int i = 0; i < 100; i++) {
        CHECK_EQUAL(array[i], 0);
    }
    mem_free(array);
}

int main(void) {
    RUN(test_array_of_overflowing_size_is_refused);
    RUN(test_array_of_no_elements_is_not_a_failure);
    RUN(test_array_is_zeroed);
    RUN(test_alignment_pads_stand_before_parameters);
    RUN(test_divisibility_pad_is_the_last_segment);
    RUN(test_chunks_beyond_the_end_are_right_padding);
    RUN(test_unsharded_layout_gives_every_rank_everything);
    RUN(test_empty_parameter_is_in_the_shard_only_strictly_inside);
    RUN(test_empty_parameters_alone_make_empty_shards);
    RUN(test_random_layouts_are_partitions);
    RUN(test_arguments_outside_their_domain_are_invalid);
    RUN(test_totals_beyond_64_bits_are_invalid);
    RUN(test_every_failed_allocation_leaves_nothing_behind);
    RUN(test_fini_twice_is_legal);
    CHECK_EQUAL(mem_live_count(), 0);
    return 0;
}
