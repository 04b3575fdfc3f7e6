/* links: kernels/blocks.c kernels/elementwise.c kernels/loops.c kernels/loops_avx2.c
   kernels/loops_avx512.c kernels/loops_default.c kernels/pack.c */
#include <string.h>

#include "harness.h"
#include "kernels/kernels.h"

enum { MOST_NDIM = 4, MOST_NUMEL = 4096, GUARD = 8 };

static uint64_t random_state = 88172645463325252u;

/* Threads as the kernels see them: the range cut at arbitrary places. */
static void cut_range(int64_t begin, int64_t end, int64_t grain, kernel_body body, void *context) {
    (void)grain;
    while (begin < end) {
        int64_t next = begin + 1 + random_below(&random_state, end - begin);
        body(begin, next, context);
        begin = next;
    }
}

static const struct kernel_stream cutting = {.parallel_for = cut_range};

/* A source with random sizes, a random order of its dimensions in memory and in the output, and random gaps
 * in memory. */
struct random_source {
    int32_t ndim;
    int64_t numel;
    int64_t sizes[MOST_NDIM];
    int64_t strides[MOST_NDIM];
    int64_t output_strides[MOST_NDIM];
    int64_t span; /* elements from the first to one past the last */
};

static void shuffle(int32_t *order, int32_t count) {
    for (int32_t i = 0; i < count; i++) {
        order[i] = i;
    }
    for (int32_t i = count - 1; i > 0; i--) {
        int32_t other = (int32_t)random_below(&random_state, i + 1);
        int32_t held = order[i];
        order[i] = order[other];
        order[other] = held;
    }
}

static void draw_source(struct random_source *source) {
    int32_t order[MOST_NDIM];
    int64_t step = 1;
    source->ndim = (int32_t)random_below(&random_state, MOST_NDIM + 1);
    source->numel = 1;
    for (int32_t d = 0; d < source->ndim; d++) {
        int64_t most = source->ndim < 3 ? 64 : 8;
        source->sizes[d] = 1 + random_below(&random_state, most);
        source->numel *= source->sizes[d];
    }
    shuffle(order, source->ndim);
    for (int32_t i = source->ndim - 1; i >= 0; i--) {
        source->output_strides[order[i]] = step;
        step *= source->sizes[order[i]];
    }
    shuffle(order, source->ndim);
    step = 1;
    source->span = 1;
    for (int32_t i = source->ndim - 1; i >= 0; i--) {
        int32_t d = order[i];
        bool expanded = random_below(&random_state, 6) == 0;
        source->strides[d] = expanded ? 0 : step;
        source->span += source->strides[d] * (source->sizes[d] - 1);
        step = expanded ? step : step * source->sizes[d] + random_below(&random_state, 3);
    }
}

/* Calls with the position in memory and in the output of every element. */
static void fill_expected(const struct random_source *source, const float *input, float *output, bool add) {
    for (int64_t element = 0; element < source->numel; element++) {
        int64_t rest = element;
        int64_t from = 0;
        int64_t to = 0;
        for (int32_t d = source->ndim - 1; d >= 0; d--) {
            int64_t index = rest % source->sizes[d];
            rest /= source->sizes[d];
            from += index * source->strides[d];
            to += index * source->output_strides[d];
        }
        output[to] = add ? output[to] + input[from] : input[from] / 2.0f;
    }
}

static struct pack_source source_of(const struct random_source *shape, float *memory, int64_t offset) {
    struct pack_source source = {
        .numel = shape->numel, .offset = offset, .output_strides = shape->output_strides};
    source.view =
        (struct tensor_view){memory, DTYPE_FLOAT32, DEVICE_CPU, 0, shape->ndim, shape->sizes, shape->strides};
    return source;
}

/* Two sources with a gap before, between and after them, and a guard that must not change. */
static void check_pack_of_random_sources(bool add) {
    struct random_source shapes[2];
    struct pack_source sources[2];
    float *memory[2];
    int64_t offset = 0;
    for (int i = 0; i < 2; i++) {
        draw_source(&shapes[i]);
        memory[i] = malloc((size_t)shapes[i].span * sizeof(float));
        for (int64_t j = 0; j < shapes[i].span; j++) {
            memory[i][j] = (float)random_below(&random_state, 1000);
        }
        offset += random_below(&random_state, 5);
        sources[i] = source_of(&shapes[i], memory[i], offset);
        offset += shapes[i].numel;
    }
    int64_t numel = offset + random_below(&random_state, 5);
    float *actual = malloc((size_t)(numel + GUARD) * sizeof(float));
    float *expected = malloc((size_t)(numel + GUARD) * sizeof(float));
    for (int64_t j = 0; j < numel + GUARD; j++) {
        actual[j] = -7.0f;
        expected[j] = add || j >= numel ? -7.0f : 0.0f;
    }
    for (int i = 0; i < 2; i++) {
        fill_expected(&shapes[i], memory[i], expected + sources[i].offset, add);
    }
    if (add) {
        CHECK_EQUAL(kernel_pack_add(actual, DTYPE_FLOAT32, sources, 2, &cutting), STATUS_OK);
    } else {
        CHECK_EQUAL(kernel_pack(actual, DTYPE_FLOAT32, numel, sources, 2, 2.0, &cutting), STATUS_OK);
    }
    CHECK_EQUAL(memcmp(actual, expected, (size_t)(numel + GUARD) * sizeof(float)), 0);
    free(actual);
    free(expected);
    free(memory[0]);
    free(memory[1]);
}

TEST(test_pack_places_elements_of_any_strides) {
    for (int round = 0; round < 600; round++) {
        check_pack_of_random_sources(false);
    }
}

TEST(test_pack_add_adds_elements_of_any_strides) {
    for (int round = 0; round < 600; round++) {
        check_pack_of_random_sources(true);
    }
}

static struct pack_source run_of(void *data, enum dtype dtype, const int64_t *numel, int64_t offset) {
    struct pack_source source = {.numel = *numel, .offset = offset};
    source.view = (struct tensor_view){data, dtype, DEVICE_CPU, 0, 1, numel, NULL};
    return source;
}

TEST(test_pack_writes_zeros_for_an_absent_source) {
    float output[6] = {9, 9, 9, 9, 9, 9};
    float input[2] = {1, 2};
    int64_t two = 2;
    struct pack_source sources[2] = {run_of(NULL, DTYPE_OTHER, &two, 1),
                                     run_of(input, DTYPE_FLOAT32, &two, 3)};
    const float expected[6] = {0, 0, 0, 1, 2, 0};
    CHECK_EQUAL(kernel_pack(output, DTYPE_FLOAT32, 6, sources, 2, 1.0, NULL), STATUS_OK);
    CHECK_EQUAL(memcmp(output, expected, sizeof expected), 0);
}

TEST(test_pack_add_leaves_gaps_and_absent_sources_alone) {
    float output[6] = {9, 9, 9, 9, 9, 9};
    float input[2] = {1, 2};
    int64_t two = 2;
    struct pack_source sources[2] = {run_of(NULL, DTYPE_OTHER, &two, 1),
                                     run_of(input, DTYPE_FLOAT32, &two, 3)};
    const float expected[6] = {9, 9, 9, 10, 11, 9};
    CHECK_EQUAL(kernel_pack_add(output, DTYPE_FLOAT32, sources, 2, NULL), STATUS_OK);
    CHECK_EQUAL(memcmp(output, expected, sizeof expected), 0);
}

/* The second addend is a little more than half of the last place of 1 in bf16: rounded to bf16 first, it
 * would tie to 1. */
TEST(test_pack_add_rounds_the_sum_once_to_the_output) {
    uint16_t output[2] = {0x4380, 0x3f80}; /* 256 and 1 in bf16 */
    float input[2] = {1.5f, 0x1.001p-8f};
    int64_t two = 2;
    struct pack_source source = run_of(input, DTYPE_FLOAT32, &two, 0);
    CHECK_EQUAL(kernel_pack_add(output, DTYPE_BFLOAT16, &source, 1, NULL), STATUS_OK);
    CHECK_EQUAL(output[0], 0x4381);
    CHECK_EQUAL(output[1], 0x3f81);
}

TEST(test_pack_refuses_sources_that_overlap_or_leave_the_output) {
    float output[4] = {0};
    float input[3] = {1, 2, 3};
    int64_t three = 3;
    struct pack_source overlapping[2] = {run_of(input, DTYPE_FLOAT32, &three, 0),
                                         run_of(input, DTYPE_FLOAT32, &three, 2)};
    struct pack_source outside = run_of(input, DTYPE_FLOAT32, &three, 2);
    CHECK_EQUAL(kernel_pack(output, DTYPE_FLOAT32, 4, overlapping, 2, 1.0, NULL), STATUS_INVALID);
    CHECK_EQUAL(kernel_pack(output, DTYPE_FLOAT32, 4, &outside, 1, 1.0, NULL), STATUS_INVALID);
    CHECK(output[0] == 0);
}

TEST(test_pack_refuses_output_strides_with_holes) {
    float output[16] = {0};
    float input[4] = {1, 2, 3, 4};
    const int64_t sizes[2] = {2, 2};
    const int64_t holes[2] = {4, 1};
    struct pack_source source = {.numel = 4, .output_strides = holes};
    source.view = (struct tensor_view){input, DTYPE_FLOAT32, DEVICE_CPU, 0, 2, sizes, NULL};
    CHECK_EQUAL(kernel_pack(output, DTYPE_FLOAT32, 16, &source, 1, 1.0, NULL), STATUS_INVALID);
}

TEST(test_pack_of_an_unknown_dtype_is_unsupported) {
    float output[1] = {0};
    int64_t one = 1;
    struct pack_source source = run_of(output, DTYPE_OTHER, &one, 0);
    CHECK_EQUAL(kernel_pack(output, DTYPE_FLOAT32, 1, &source, 1, 1.0, NULL), STATUS_UNSUPPORTED);
    CHECK_EQUAL(kernel_pack(output, DTYPE_OTHER, 1, NULL, 0, 1.0, NULL), STATUS_UNSUPPORTED);
}

TEST(test_cast_divide_in_place_divides) {
    double tensor[2] = {3.0, -1.0};
    CHECK_EQUAL(kernel_cast_divide(tensor, DTYPE_FLOAT64, tensor, DTYPE_FLOAT64, 2, 2.0, NULL), STATUS_OK);
    CHECK(tensor[0] == 1.5 && tensor[1] == -0.5);
    CHECK_EQUAL(kernel_cast_divide(tensor, DTYPE_FLOAT32, tensor, DTYPE_FLOAT64, 2, 2.0, NULL),
                STATUS_INVALID);
}

TEST(test_kernels_accept_nothing_to_do) {
    int64_t none = 0;
    struct pack_source source = run_of(NULL, DTYPE_FLOAT32, &none, 0);
    CHECK_EQUAL(kernel_pack(NULL, DTYPE_FLOAT32, 0, &source, 1, 3.0, &cutting), STATUS_OK);
    CHECK_EQUAL(kernel_pack_add(NULL, DTYPE_FLOAT32, NULL, 0, &cutting), STATUS_OK);
    CHECK_EQUAL(kernel_cast_divide(NULL, DTYPE_FLOAT32, NULL, DTYPE_BFLOAT16, 0, 3.0, &cutting), STATUS_OK);
    CHECK_EQUAL(kernel_accumulate(NULL, DTYPE_FLOAT32, NULL, DTYPE_BFLOAT16, 0, 3.0, &cutting), STATUS_OK);
}

int main(void) {
    return run_tests();
}
