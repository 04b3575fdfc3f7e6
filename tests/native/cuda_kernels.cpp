/* The emulated CUDA kernels compared with the CPU's, bit for bit where both promise equal bits. test_cuda.py
 * builds and runs this program. */
#include <vector>

#include "harness.h"
#include "kernels/cuda_elementwise.h"

enum { MAX_NDIM = 4 };

static uint64_t random_state = 88172645463325252u;
static const struct kernel_stream on_gpu = {nullptr, nullptr, 0, DEVICE_CUDA};
static const struct kernel_table *table;

/* Memory of exactly `numel` elements, `shift` elements after a 16-byte boundary: the sanitizer finds accesses
 * outside. */
struct memory {
    char *allocation;
    char *data;
    int64_t nbytes;
    enum dtype dtype;

    memory(enum dtype of, int64_t numel, int64_t shift = 0) : dtype(of) {
        int64_t before = shift * dtype_nbytes(dtype);
        nbytes = numel * dtype_nbytes(dtype);
        allocation = (char *)malloc((size_t)(before + nbytes) + 1);
        data = allocation + before;
        for (int64_t i = 0; i < nbytes; i++) {
            data[i] = (char)random_below(&random_state, 256);
        }
    }
    memory(const memory &other) = delete;
    ~memory() {
        free(allocation);
    }
    void set(const memory &other) {
        memcpy(data, other.data, (size_t)nbytes);
    }
    bool is_nan(int64_t i) const {
        double value = 0;
        kernel_cast_divide(&value, DTYPE_FLOAT64, data + i * dtype_nbytes(dtype), dtype, 1, 1.0, nullptr);
        return value != value;
    }
    /* Compare bit for bit, except the payload of a NaN, which no conversion preserves. */
    bool equals(const memory &other) const {
        int64_t size = dtype_nbytes(dtype);
        for (int64_t i = 0; i < nbytes / size; i++) {
            if (memcmp(data + i * size, other.data + i * size, (size_t)size) != 0 &&
                !(is_nan(i) && other.is_nan(i))) {
                return false;
            }
        }
        return true;
    }
};

/* Fill with ordinary numbers: random bits are infinities and NaN too often. */
static void fill_numbers(struct memory *memory, enum dtype dtype, int64_t numel) {
    for (int64_t i = 0; i < numel; i++) {
        double value = (double)(random_below(&random_state, 200001) - 100000) / 777.0;
        kernel_cast_divide(memory->data + i * dtype_nbytes(dtype), dtype, &value, DTYPE_FLOAT64, 1, 1.0,
                           nullptr);
    }
}

static const int64_t numels[] = {0, 1, 2, 7, 8, 9, 31, 1023, 4096, 8191, 8192 * 2 + 5};

template <typename Body> static void for_each_pair(Body body) {
    for (int out = 0; out < DTYPE_COUNT; out++) {
        for (int in = 0; in < DTYPE_COUNT; in++) {
            for (int64_t numel : numels) {
                int64_t shift = random_below(&random_state, 9);
                bool together = random_below(&random_state, 2) == 0;
                body((enum dtype)out, (enum dtype)in, numel, shift,
                     together ? shift : random_below(&random_state, 9));
            }
        }
    }
}

TEST(test_cast_divide_equals_the_cpus) {
    const double divisors[] = {1.0, 2.0, 0.5};
    for_each_pair([&](enum dtype out, enum dtype in, int64_t numel, int64_t out_shift, int64_t in_shift) {
        memory input(in, numel, in_shift), expected(out, numel), actual(out, numel, out_shift);
        for (double divisor : divisors) {
            CHECK_EQUAL(kernel_cast_divide(expected.data, out, input.data, in, numel, divisor, nullptr),
                        STATUS_OK);
            CHECK_EQUAL(table->cast_divide(actual.data, out, input.data, in, numel, divisor, &on_gpu),
                        STATUS_OK);
            CHECK(actual.equals(expected));
        }
    });
}

TEST(test_cast_divide_in_place_divides) {
    memory input(DTYPE_BFLOAT16, 777, 3), expected(DTYPE_BFLOAT16, 777);
    expected.set(input);
    kernel_cast_divide(expected.data, DTYPE_BFLOAT16, expected.data, DTYPE_BFLOAT16, 777, 4.0, nullptr);
    CHECK_EQUAL(table->cast_divide(input.data, DTYPE_BFLOAT16, input.data, DTYPE_BFLOAT16, 777, 4.0, &on_gpu),
                STATUS_OK);
    CHECK(input.equals(expected));
    CHECK_EQUAL(table->cast_divide(input.data, DTYPE_FLOAT32, input.data, DTYPE_BFLOAT16, 1, 4.0, &on_gpu),
                STATUS_INVALID);
}

TEST(test_accumulate_equals_the_cpus) {
    for_each_pair([&](enum dtype out, enum dtype in, int64_t numel, int64_t out_shift, int64_t in_shift) {
        memory input(in, numel, in_shift), expected(out, numel), actual(out, numel, out_shift);
        fill_numbers(&input, in, numel);
        fill_numbers(&expected, out, numel);
        actual.set(expected);
        for (double divisor : {1.0, 4.0}) {
            CHECK_EQUAL(kernel_accumulate(expected.data, out, input.data, in, numel, divisor, nullptr),
                        STATUS_OK);
            CHECK_EQUAL(table->accumulate(actual.data, out, input.data, in, numel, divisor, &on_gpu),
                        STATUS_OK);
            CHECK(actual.equals(expected));
        }
    });
}

/* ---- pack ---- */

struct source_memory {
    int64_t sizes[MAX_NDIM], strides[MAX_NDIM], output_strides[MAX_NDIM];
    memory *input;
};

static void draw_order(int32_t ndim, int32_t *order, bool ordered) {
    for (int32_t i = 0; i < ndim; i++) {
        order[i] = i;
    }
    for (int32_t i = ndim - 1; i > 0 && !ordered; i--) {
        int32_t other = (int32_t)random_below(&random_state, i + 1), swapped = order[i];
        order[i] = order[other];
        order[other] = swapped;
    }
}

/* Draw a source: absent, flat, permuted equally in memory and in the output, or in any order with gaps. */
static void draw_source(struct pack_source *source, struct source_memory *in) {
    int32_t ndim = (int32_t)random_below(&random_state, MAX_NDIM + 1), order[MAX_NDIM];
    int64_t kind = random_below(&random_state, 4), step = 1;
    enum dtype dtype = (enum dtype)random_below(&random_state, DTYPE_COUNT);
    source->numel = 1;
    for (int32_t d = 0; d < ndim; d++) {
        in->sizes[d] = 1 + random_below(&random_state, ndim < 3 ? 60 : 7);
        source->numel *= in->sizes[d];
    }
    draw_order(ndim, order, kind == 1);
    for (int32_t i = ndim - 1; i >= 0; i--) {
        in->output_strides[order[i]] = in->strides[order[i]] = step;
        step *= in->sizes[order[i]];
    }
    int64_t span = source->numel;
    if (kind == 3) {
        draw_order(ndim, order, false);
        step = 1 + random_below(&random_state, 2);
        span = 1;
        for (int32_t i = ndim - 1; i >= 0; i--) {
            in->strides[order[i]] = step;
            span += (in->sizes[order[i]] - 1) * step;
            step = step * in->sizes[order[i]] + random_below(&random_state, 3);
        }
    }
    in->input = kind == 0 ? nullptr : new memory(dtype, span, random_below(&random_state, 3));
    if (in->input) {
        fill_numbers(in->input, dtype, span);
    }
    source->view.data = in->input ? in->input->data : nullptr;
    source->view.dtype = in->input ? dtype : DTYPE_OTHER;
    source->view.ndim = ndim;
    source->view.sizes = in->sizes;
    source->view.strides = kind == 1 ? nullptr : in->strides;
    source->output_strides = kind == 1 ? nullptr : in->output_strides;
}

static void check_pack(int64_t count, bool add) {
    std::vector<struct pack_source> sources((size_t)count);
    std::vector<struct source_memory> memories((size_t)count);
    int64_t numel = 0;
    for (int64_t i = 0; i < count; i++) {
        draw_source(&sources[(size_t)i], &memories[(size_t)i]);
        sources[(size_t)i].offset = numel + random_below(&random_state, 2) * random_below(&random_state, 9);
        numel = sources[(size_t)i].offset + sources[(size_t)i].numel;
    }
    numel += add ? 0 : random_below(&random_state, 300);
    enum dtype dtype = (enum dtype)random_below(&random_state, DTYPE_COUNT);
    memory expected(dtype, numel), actual(dtype, numel, random_below(&random_state, 8));
    fill_numbers(&expected, dtype, numel);
    actual.set(expected);
    if (add) {
        CHECK_EQUAL(kernel_pack_add(expected.data, dtype, sources.data(), count, nullptr), STATUS_OK);
        CHECK_EQUAL(table->pack_add(actual.data, dtype, sources.data(), count, &on_gpu), STATUS_OK);
    } else {
        CHECK_EQUAL(kernel_pack(expected.data, dtype, numel, sources.data(), count, 2.0, nullptr), STATUS_OK);
        CHECK_EQUAL(table->pack(actual.data, dtype, numel, sources.data(), count, 2.0, &on_gpu), STATUS_OK);
    }
    CHECK(actual.equals(expected));
    for (struct source_memory &one : memories) {
        delete one.input;
    }
}

TEST(test_pack_equals_the_cpus) {
    for (int round = 0; round < 150; round++) {
        check_pack(random_below(&random_state, 5), round % 2 == 0);
    }
    check_pack(300, false); /* needs more than one table */
    check_pack(300, true);
}

/* Check the pack of dense memory whose dimensions have a different order in the output. */
static void check_transposed(const int64_t *sizes, const int *order, bool add, bool by_tiles) {
    enum dtype in = (enum dtype)random_below(&random_state, DTYPE_COUNT);
    enum dtype out = (enum dtype)random_below(&random_state, DTYPE_COUNT);
    int64_t strides[MAX_NDIM], numel = 1, offset = random_below(&random_state, 5);
    for (int d = MAX_NDIM - 1; d >= 0; d--) {
        strides[order[d]] = numel;
        numel *= sizes[order[d]];
    }
    memory input(in, numel, 1), expected(out, offset + numel), actual(out, offset + numel, 3);
    fill_numbers(&input, in, numel);
    fill_numbers(&expected, out, offset + numel);
    actual.set(expected);
    struct pack_source source = {
        {input.data, in, DEVICE_CUDA, 0, MAX_NDIM, sizes, strides}, numel, offset, nullptr};
    emulated_launches_with_barriers = 0;
    if (add) {
        CHECK_EQUAL(kernel_pack_add(expected.data, out, &source, 1, nullptr), STATUS_OK);
        CHECK_EQUAL(table->pack_add(actual.data, out, &source, 1, &on_gpu), STATUS_OK);
    } else {
        CHECK_EQUAL(kernel_pack(expected.data, out, offset + numel, &source, 1, 4.0, nullptr), STATUS_OK);
        CHECK_EQUAL(table->pack(actual.data, out, offset + numel, &source, 1, 4.0, &on_gpu), STATUS_OK);
    }
    CHECK(actual.equals(expected));
    CHECK_EQUAL(emulated_launches_with_barriers > 0, by_tiles);
}

/* Matrices, stacks of matrices, and channels-last images. Some exceed one launch, which has 5000 elements
 * here, and one has more tiles than a launch has blocks. */
TEST(test_transposed_sources_go_by_tiles) {
    const int64_t matrix[] = {1, 1, 45, 70}, wide[] = {1, 1, 600, 9}, stack[] = {5, 1, 33, 10},
                  images[] = {3, 11, 4, 8};
    const int64_t narrow[] = {1, 1, 7, 800}, tiles[] = {40, 1, 8, 10};
    const int swapped[] = {0, 1, 3, 2}, channels_last[] = {0, 2, 3, 1}, all_turned[] = {3, 2, 1, 0};
    for (int round = 0; round < 8; round++) {
        check_transposed(matrix, swapped, round % 2, true);
        check_transposed(wide, swapped, round % 2, true);
        check_transposed(stack, swapped, round % 2, true);
        check_transposed(tiles, swapped, round % 2, true);
        check_transposed(images, channels_last, round % 2, true);
        check_transposed(stack, all_turned, round % 2, false); /* the dense dimension has only 5 elements */
        check_transposed(narrow, swapped, round % 2, false);
    }
}

TEST(test_pack_of_a_unit_is_one_launch) {
    enum { COUNT = 12, NUMEL = 100 };
    int64_t size = NUMEL;
    memory input(DTYPE_BFLOAT16, NUMEL), output(DTYPE_FLOAT32, COUNT * (NUMEL + 4));
    struct pack_source sources[COUNT] = {};
    for (int i = 0; i < COUNT; i++) {
        sources[i].numel = NUMEL;
        sources[i].offset = i * (NUMEL + 4);
        sources[i].view.ndim = 1;
        sources[i].view.sizes = &size;
        sources[i].view.dtype = DTYPE_BFLOAT16;
        sources[i].view.data = i == 5 ? nullptr : input.data;
    }
    emulated_launches = 0;
    CHECK_EQUAL(table->pack(output.data, DTYPE_FLOAT32, COUNT * (NUMEL + 4), sources, COUNT, 2.0, &on_gpu),
                STATUS_OK);
    CHECK_EQUAL(emulated_launches, 1);
}

TEST(test_pack_refuses_invalid_arguments) {
    memory input(DTYPE_FLOAT32, 4), output(DTYPE_FLOAT32, 16);
    const int64_t three = 3, sizes[2] = {2, 2}, holes[2] = {4, 1};
    struct pack_source two[2] = {}, square = {};
    for (struct pack_source &one : two) {
        one.numel = 3;
        one.view.ndim = 1;
        one.view.sizes = &three;
        one.view.data = input.data;
    }
    two[1].offset = 2; /* overlaps */
    CHECK_EQUAL(table->pack(output.data, DTYPE_FLOAT32, 16, two, 2, 1.0, &on_gpu), STATUS_INVALID);
    CHECK_EQUAL(table->pack(output.data, DTYPE_FLOAT32, 2, two, 1, 1.0, &on_gpu), STATUS_INVALID);
    two[0].view.dtype = DTYPE_OTHER;
    CHECK_EQUAL(table->pack(output.data, DTYPE_FLOAT32, 16, two, 1, 1.0, &on_gpu), STATUS_UNSUPPORTED);
    CHECK_EQUAL(table->pack(output.data, DTYPE_OTHER, 16, nullptr, 0, 1.0, &on_gpu), STATUS_UNSUPPORTED);
    square.numel = 4;
    square.output_strides = holes;
    square.view.ndim = 2;
    square.view.sizes = sizes;
    square.view.data = input.data;
    CHECK_EQUAL(table->pack(output.data, DTYPE_FLOAT32, 16, &square, 1, 1.0, &on_gpu), STATUS_INVALID);
}

/* ---- launches ---- */

TEST(test_empty_arguments_launch_nothing) {
    emulated_launches = 0;
    CHECK_EQUAL(table->pack(nullptr, DTYPE_FLOAT32, 0, nullptr, 0, 3.0, &on_gpu), STATUS_OK);
    CHECK_EQUAL(table->pack_add(nullptr, DTYPE_FLOAT32, nullptr, 0, &on_gpu), STATUS_OK);
    CHECK_EQUAL(table->cast_divide(nullptr, DTYPE_FLOAT32, nullptr, DTYPE_BFLOAT16, 0, 3.0, &on_gpu),
                STATUS_OK);
    CHECK_EQUAL(table->accumulate(nullptr, DTYPE_FLOAT32, nullptr, DTYPE_BFLOAT16, 0, 3.0, &on_gpu),
                STATUS_OK);
    CHECK_EQUAL(emulated_launches, 0);
}

static enum status halve(memory &values, const struct kernel_stream *stream) {
    return table->cast_divide(values.data, DTYPE_FLOAT32, values.data, DTYPE_FLOAT32, 10, 2.0, stream);
}

TEST(test_a_launch_goes_to_the_streams_device_and_leaves_the_current_one) {
    const struct kernel_stream second = {nullptr, nullptr, 1, DEVICE_CUDA},
                               missing = {nullptr, nullptr, 7, DEVICE_CUDA};
    memory values(DTYPE_FLOAT32, 10);
    CHECK_EQUAL(halve(values, &second), STATUS_OK); /* the emulation checks the device */
    CHECK_EQUAL(emulated_device, 0);
    CHECK_EQUAL(halve(values, &missing), STATUS_DEVICE);
    CHECK_EQUAL(emulated_device, 0);
    CHECK_EQUAL(halve(values, &on_gpu), STATUS_OK); /* the error was cleared */
    emulated_device = EMULATED_NO_DEVICE;
    CHECK_EQUAL(halve(values, &on_gpu), STATUS_OK);
    CHECK_EQUAL(halve(values, &second), STATUS_OK);
    CHECK_EQUAL(emulated_device, EMULATED_NO_DEVICE);
    emulated_device = 0;
}

TEST(test_a_failed_launch_returns_its_error) {
    memory values(DTYPE_FLOAT32, 10);
    emulated_launch_error = 98;
    CHECK_EQUAL(halve(values, &on_gpu), STATUS_DEVICE);
    CHECK(strcmp(table->device_error(), "an emulated error") == 0);
    CHECK_EQUAL(halve(values, &on_gpu), STATUS_OK);
}

TEST(test_an_unsupported_device_is_named_with_its_architecture) {
    emulated_device_without_code = 1;
    CHECK(table->unsupported_reason(0) == nullptr);
    const char *reason = table->unsupported_reason(1);
    CHECK(reason && strstr(reason, "7.5") && strstr(reason, "FSDP_C_CUDA_ARCHS=\"75\""));
    CHECK_EQUAL(emulated_device, 0);
    CHECK(table->unsupported_reason(0) == nullptr);
    emulated_device_without_code = EMULATED_NO_DEVICE;
    CHECK(table->unsupported_reason(1) == nullptr); /* a refusal is not cached */
}

TEST(test_a_large_tensor_is_processed_in_strides_of_the_grid) {
    enum { NUMEL = 700000 };
    memory input(DTYPE_BFLOAT16, NUMEL), expected(DTYPE_FLOAT32, NUMEL), actual(DTYPE_FLOAT32, NUMEL, 1);
    emulated_most_blocks = 0;
    kernel_cast_divide(expected.data, DTYPE_FLOAT32, input.data, DTYPE_BFLOAT16, NUMEL, 1.0, nullptr);
    CHECK_EQUAL(
        table->cast_divide(actual.data, DTYPE_FLOAT32, input.data, DTYPE_BFLOAT16, NUMEL, 1.0, &on_gpu),
        STATUS_OK);
    CHECK(actual.equals(expected));
    CHECK_EQUAL(emulated_most_blocks, emulated_processors * BLOCKS_PER_PROCESSOR);
}

/* The sides of a cast have different alignments. Elements before the first vector of both sides are cast one
 * by one. */
TEST(test_a_cast_moves_vectors_where_both_sides_can) {
    using shape = step<float, bfloat16>;
    enum { CHUNK = shape::CHUNK_NUMEL, NUMEL = 2 * CHUNK, EACH = shape::NUMEL };
    memory input(DTYPE_BFLOAT16, NUMEL, 2), output(DTYPE_FLOAT32, NUMEL, 2);
    emulated_vector_loads = 0;
    CHECK_EQUAL(
        table->cast_divide(output.data, DTYPE_FLOAT32, input.data, DTYPE_BFLOAT16, NUMEL, 1.0, &on_gpu),
        STATUS_OK);
    CHECK_EQUAL(emulated_vector_loads, CHUNK / EACH); /* the head makes the last chunk short */
}

extern "C" const struct kernel_table *fsdp_c_cuda_kernels(const char **reason);

int main(void) {
    const char *reason = nullptr;
    table = fsdp_c_cuda_kernels(&reason);
    CHECK(table != nullptr && table->version == KERNEL_TABLE_VERSION);
    return run_tests();
}
