/* kernel_pack and kernel_pack_add: one pass that packs many tensors into one flat buffer, with cast and
 * pre-division.
 *
 * A source whose strides equal its output strides is one run of memory. Other sources are copied by tiles:
 *
 *   source, fast dimension first  --copy-->  tile, row by row  --cast, divide-->  rows of the output
 *
 * The threads divide the output range. A thread writes the elements in its range and, of a strided source,
 * the rows whose first element is in its range. */
#include <string.h>

#include "kernels/blocks.h"
#include "kernels/pack.h"

enum {
    TILE_COLUMNS = 32,
    TILE_ROWS = BLOCK_NUMEL / TILE_COLUMNS,
};

/* Set output += input, in the wider arithmetic of both dtypes and rounded once, as torch's type promotion
 * does. */
static void add_promoted(char *output, enum dtype output_dtype, const char *input, enum dtype input_dtype,
                         int64_t numel) {
    bool wide = output_dtype == DTYPE_FLOAT64 || input_dtype == DTYPE_FLOAT64;
    enum dtype common = wide ? DTYPE_FLOAT64 : DTYPE_FLOAT32;
    union block sum;
    if (output_dtype == input_dtype || output_dtype == common) {
        accumulate_block(output, output_dtype, input, input_dtype, numel, 1.0);
        return;
    }
    cast_block(sum.bytes, common, output, output_dtype, numel);
    accumulate_block(sum.bytes, common, input, input_dtype, numel, 1.0);
    cast_block(output, output_dtype, sum.bytes, common, numel);
}

/* Pack at most BLOCK_NUMEL contiguous elements. */
static void pack_block(const struct pack *pack, char *output, const char *input, enum dtype input_dtype,
                       int64_t numel) {
    if (pack->add) {
        add_promoted(output, pack->output_dtype, input, input_dtype, numel);
        return;
    }
    cast_divide_block(output, pack->output_dtype, input, input_dtype, numel, pack->divisor);
}

static void pack_run(const struct pack *pack, char *output, const char *input, enum dtype input_dtype,
                     int64_t numel) {
    int64_t output_nbytes = dtype_nbytes(pack->output_dtype);
    int64_t input_nbytes = dtype_nbytes(input_dtype);
    if (!pack->add) {
        cast_divide_block(output, pack->output_dtype, input, input_dtype, numel, pack->divisor);
        return;
    }
    for (int64_t i = 0; i < numel; i += BLOCK_NUMEL) {
        int64_t block = numel - i < BLOCK_NUMEL ? numel - i : BLOCK_NUMEL;
        pack_block(pack, output + i * output_nbytes, input + i * input_nbytes, input_dtype, block);
    }
}

struct tile {
    char *output;
    const char *input;
    int64_t rows;
    int64_t columns;
    int64_t output_row_stride;
    int64_t input_row_stride;
    int64_t input_column_stride;
};

/* Copy elements of `nbytes` as bytes: a float copy could change a NaN. */
static inline __attribute__((always_inline)) void copy_elements(char *output, const struct tile *tile,
                                                                int64_t nbytes) {
    for (int64_t row = 0; row < tile->rows; row++) {
        const char *input = tile->input + row * tile->input_row_stride * nbytes;
        for (int64_t column = 0; column < tile->columns; column++) {
            memcpy(output, input + column * tile->input_column_stride * nbytes, (size_t)nbytes);
            output += nbytes;
        }
    }
}

/* The size is a constant in each branch, so that an element is copied by one instruction. */
static void copy_tile(void *buffer, const struct tile *tile, int64_t nbytes) {
    if (nbytes == 2)
        copy_elements(buffer, tile, 2);
    else if (nbytes == 4)
        copy_elements(buffer, tile, 4);
    else
        copy_elements(buffer, tile, 8);
}

static void pack_tile(const struct pack *pack, const struct tile *tile, enum dtype input_dtype) {
    int64_t output_nbytes = dtype_nbytes(pack->output_dtype);
    int64_t input_nbytes = dtype_nbytes(input_dtype);
    union block tile_elements;
    union block converted;
    const unsigned char *rows = tile_elements.bytes;
    int64_t row_nbytes = tile->columns * (pack->add ? input_nbytes : output_nbytes);
    copy_tile(tile_elements.bytes, tile, input_nbytes);
    if (!pack->add && (pack->output_dtype != input_dtype || pack->divisor != 1.0)) {
        pack_block(pack, (char *)converted.bytes, (const char *)tile_elements.bytes, input_dtype,
                   tile->rows * tile->columns);
        rows = converted.bytes;
    }
    for (int64_t row = 0; row < tile->rows; row++) {
        char *output = tile->output + row * tile->output_row_stride * output_nbytes;
        if (pack->add)
            pack_block(pack, output, (const char *)rows + row * row_nbytes, input_dtype, tile->columns);
        else
            memcpy(output, rows + row * row_nbytes, (size_t)row_nbytes);
    }
}

/* Pack two dimensions by narrow tiles: a source that is read across its memory order stays in the first-level
 * cache. */
static void pack_plane(const struct pack *pack, const struct tile *plane, enum dtype input_dtype) {
    int64_t output_nbytes = dtype_nbytes(pack->output_dtype);
    int64_t input_nbytes = dtype_nbytes(input_dtype);
    for (int64_t row = 0; row < plane->rows; row += TILE_ROWS) {
        for (int64_t column = 0; column < plane->columns; column += TILE_COLUMNS) {
            struct tile tile = *plane;
            tile.rows = plane->rows - row < TILE_ROWS ? plane->rows - row : TILE_ROWS;
            tile.columns = plane->columns - column < TILE_COLUMNS ? plane->columns - column : TILE_COLUMNS;
            tile.output += (row * plane->output_row_stride + column) * output_nbytes;
            tile.input +=
                (row * plane->input_row_stride + column * plane->input_column_stride) * input_nbytes;
            pack_tile(pack, &tile, input_dtype);
        }
    }
}

/* Make the dimension with the smallest input stride the row dimension, the last but one. */
static void plan_choose_rows(struct plan *plan) {
    int32_t target = plan->ndim - 2;
    int32_t best = target;
    for (int32_t d = 0; d < target; d++)
        if (plan->input_strides[d] < plan->input_strides[best])
            best = d;
    struct plan old = *plan;
    plan->sizes[target] = old.sizes[best];
    plan->input_strides[target] = old.input_strides[best];
    plan->output_strides[target] = old.output_strides[best];
    plan->sizes[best] = old.sizes[target];
    plan->input_strides[best] = old.input_strides[target];
    plan->output_strides[best] = old.output_strides[target];
}

/* Pack all planes of a plan: an odometer over the dimensions before the last two. */
static void pack_planes(const struct pack *pack, const struct plan *plan, char *output, const char *input,
                        enum dtype input_dtype) {
    int64_t output_nbytes = dtype_nbytes(pack->output_dtype);
    int64_t input_nbytes = dtype_nbytes(input_dtype);
    int64_t index[PACK_MAX_NDIM] = {0};
    int32_t last = plan->ndim - 1;
    int32_t row = plan->ndim - 2;
    struct tile plane = {output, input, 1, plan->sizes[last], 0, 0, plan->input_strides[last]};
    if (row >= 0) {
        plane.rows = plan->sizes[row];
        plane.output_row_stride = plan->output_strides[row];
        plane.input_row_stride = plan->input_strides[row];
    }
    for (int32_t d = 0; d >= 0;) {
        if (plane.input_column_stride == 1 && plane.rows == 1)
            pack_run(pack, plane.output, plane.input, input_dtype, plane.columns);
        else
            pack_plane(pack, &plane, input_dtype);
        for (d = row - 1; d >= 0; d--) {
            index[d]++;
            plane.output += plan->output_strides[d] * output_nbytes;
            plane.input += plan->input_strides[d] * input_nbytes;
            if (index[d] < plan->sizes[d])
                break;
            plane.output -= plan->sizes[d] * plan->output_strides[d] * output_nbytes;
            plane.input -= plan->sizes[d] * plan->input_strides[d] * input_nbytes;
            index[d] = 0;
        }
    }
}

/* Pack the elements [begin, end) of one source, counted in output order. */
static void pack_source_range(const struct pack *pack, const struct pack_source *source, int64_t begin,
                              int64_t end) {
    enum dtype input_dtype = source->view.dtype;
    char *output = pack->output + source->offset * dtype_nbytes(pack->output_dtype);
    const char *input = source->view.data;
    struct plan plan = {.ndim = 0};
    if (!source_is_flat(source))
        plan_build(&plan, source);
    if (plan.ndim == 0 || plan_is_flat(&plan)) {
        pack_run(pack, output + begin * dtype_nbytes(pack->output_dtype),
                 input + begin * dtype_nbytes(input_dtype), input_dtype, end - begin);
        return;
    }
    int64_t row = plan.output_strides[0];
    int64_t first = (begin + row - 1) / row;
    int64_t end_row = (end + row - 1) / row;
    plan.sizes[0] = end_row - first;
    if (plan.sizes[0] <= 0)
        return;
    output += first * row * dtype_nbytes(pack->output_dtype);
    input += first * plan.input_strides[0] * dtype_nbytes(input_dtype);
    if (plan.ndim > 2 && plan.input_strides[plan.ndim - 1] != 1)
        plan_choose_rows(&plan);
    pack_planes(pack, &plan, output, input, input_dtype);
}

static void zero_range(const struct pack *pack, int64_t begin, int64_t end) {
    int64_t nbytes = dtype_nbytes(pack->output_dtype);
    if (!pack->add && begin < end)
        memset(pack->output + begin * nbytes, 0, (size_t)((end - begin) * nbytes));
}

/* Return the index of the first source that ends after `begin`; num_sources when there is none. */
static int64_t first_source(const struct pack *pack, int64_t begin) {
    int64_t low = 0;
    int64_t high = pack->num_sources;
    while (low < high) {
        int64_t middle = low + (high - low) / 2;
        if (source_end(&pack->sources[middle]) > begin)
            high = middle;
        else
            low = middle + 1;
    }
    return low;
}

static int64_t smaller(int64_t a, int64_t b) {
    return a < b ? a : b;
}

static int64_t larger(int64_t a, int64_t b) {
    return a > b ? a : b;
}

static void pack_range(int64_t begin, int64_t end, void *context) {
    const struct pack *pack = context;
    int64_t position = begin;
    for (int64_t i = first_source(pack, begin); i < pack->num_sources && pack->sources[i].offset < end; i++) {
        const struct pack_source *source = &pack->sources[i];
        int64_t from = larger(source->offset, begin);
        int64_t to = smaller(source_end(source), end);
        zero_range(pack, position, from);
        if (!source->view.data)
            zero_range(pack, from, to);
        else if (from < to)
            pack_source_range(pack, source, from - source->offset, to - source->offset);
        position = larger(position, to);
    }
    zero_range(pack, position, end);
}

enum status kernel_pack(void *output, enum dtype output_dtype, int64_t output_numel,
                        const struct pack_source *sources, int64_t num_sources, double divisor,
                        const struct kernel_stream *stream) {
    struct pack pack = {output, output_dtype, output_numel, sources, num_sources, divisor, false, stream};
    enum status status = pack_check(&pack);
    if (status == STATUS_OK)
        stream_for(stream, output_numel, GRAIN_NUMEL, pack_range, &pack);
    return status;
}

enum status kernel_pack_add(void *output, enum dtype output_dtype, const struct pack_source *sources,
                            int64_t num_sources, const struct kernel_stream *stream) {
    int64_t output_numel = num_sources > 0 ? source_end(&sources[num_sources - 1]) : 0;
    struct pack pack = {output, output_dtype, output_numel, sources, num_sources, 1.0, true, stream};
    enum status status = pack_check(&pack);
    if (status == STATUS_OK)
        stream_for(stream, output_numel, GRAIN_NUMEL, pack_range, &pack);
    return status;
}
