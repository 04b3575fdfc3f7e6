/* Kernels that pack many tensors into one flat buffer, with cast and pre-division, or add them to it.
 *
 * A source whose strides equal its output strides is a segment of a grouped launch, which also zeroes the gap
 * after it. Every other source has its own launch: by tiles for a transposed source, element by element for
 * other strides. */
#include "kernels/cuda_elementwise.h"
#include "kernels/pack.h"

enum {
    TILE = 32,      /* side of a tile; a warp reads one row of it and writes one column */
    LEAST_SIDE = 8, /* least side of a matrix that is packed by tiles */
};

#ifndef MAX_STRIDED_NUMEL /* tests define a small limit */
#define MAX_STRIDED_NUMEL INT32_MAX
#endif

/* Addition in the wider arithmetic of both types, rounded once, as torch's type promotion does. */
template <typename Out, typename In> struct add_operation {
    static constexpr bool READS_OUTPUT = true;

    __device__ Out operator()(Out sum, In value) const {
        auto total = element<Out>::load(sum) + element<In>::load(value);
        return converted<Out>(total);
    }
};

/* ---- sources whose strides differ from their output strides ---- */

/* A strided source. The dimensions have descending output strides, and the output is dense: index i of the
 * loop nest is element i of the output. */
struct strided_source {
    const void *input;
    void *output;
    int64_t numel;
    int64_t num_tiles;
    int32_t ndim;
    int32_t rows; /* dimension with input stride 1 when packed by tiles, else -1 */
    int64_t sizes[PACK_MAX_NDIM];
    int64_t strides[PACK_MAX_NDIM];
};

/* Return true if the source has the same strides in memory and in the output. */
static bool is_flat(const struct pack_source *source) {
    struct plan plan;
    if (source_is_flat(source))
        return true;
    plan_build(&plan, source);
    return plan_is_flat(&plan);
}

/* Return the dimension whose index is contiguous in the input, so that it and the last dimension make tiles;
 * -1 when there is none of at least LEAST_SIDE. */
static int32_t rows_of_tiles(const struct strided_source *source) {
    int32_t last = source->ndim - 1;
    for (int32_t d = 0; d < last; d++)
        if (source->strides[d] == 1 && source->sizes[d] >= LEAST_SIDE && source->sizes[last] >= LEAST_SIDE)
            return d;
    return -1;
}

static struct strided_source strided_source_of(const struct pack_source *source, void *output) {
    struct strided_source strided = {};
    struct plan plan;
    plan_build(&plan, source);
    strided.input = source->view.data;
    strided.output = output;
    strided.numel = source->numel;
    strided.ndim = plan.ndim;
    memcpy(strided.sizes, plan.sizes, (size_t)plan.ndim * sizeof *plan.sizes);
    memcpy(strided.strides, plan.input_strides, (size_t)plan.ndim * sizeof *plan.input_strides);
    strided.rows = rows_of_tiles(&strided);
    return strided;
}

/* Pack element by element. Indices have 32 bits: a 64-bit division takes five times as long. */
template <typename Out, typename In, typename Operation>
__global__ void __launch_bounds__(THREADS)
    strided(const __grid_constant__ struct strided_source source, Operation operation) {
    Out *output = (Out *)source.output;
    const In *input = (const In *)source.input;
    int64_t step = (int64_t)gridDim.x * THREADS;
    for (int64_t i = (int64_t)blockIdx.x * THREADS + threadIdx.x; i < source.numel; i += step) {
        uint32_t rest = (uint32_t)i;
        int64_t offset = 0;
        for (int32_t d = source.ndim - 1; d >= 0; d--) {
            uint32_t size = (uint32_t)source.sizes[d];
            uint32_t quotient = rest / size;
            offset += (int64_t)(rest - quotient * size) * source.strides[d];
            rest = quotient;
        }
        output[i] = operation(Operation::READS_OUTPUT ? output[i] : Out(), input[offset]);
    }
}

/* A tile of the matrix of the dimension `rows` and the last dimension, at one index of the other
 * dimensions. */
struct tile_place {
    int64_t row, column;           /* position of the tile's first element in the matrix */
    int64_t input, output;         /* offsets of the first element */
    int64_t row_step;              /* output stride of a row; the input stride is 1 */
    int64_t num_rows, num_columns; /* rest of the matrix from the first element on; may exceed TILE */
};

__host__ __device__ static inline int64_t tiles_in(int64_t size) {
    return (size + TILE - 1) / TILE;
}

/* Return *rest modulo `size`, and divide *rest by `size`. */
__device__ static inline uint32_t take_index(uint32_t *rest, int64_t size) {
    uint32_t quotient = *rest / (uint32_t)size;
    uint32_t index = *rest - quotient * (uint32_t)size;
    *rest = quotient;
    return index;
}

__device__ static tile_place tile_place_at(const struct strided_source &source, int64_t tile) {
    int32_t last = source.ndim - 1;
    uint32_t rest = (uint32_t)tile;
    struct tile_place place = {};
    place.column = (int64_t)take_index(&rest, tiles_in(source.sizes[last])) * TILE;
    place.row = (int64_t)take_index(&rest, tiles_in(source.sizes[source.rows])) * TILE;
    int64_t step = 1; /* output stride of dimension d */
    for (int32_t d = last; d >= 0; d--) {
        bool is_other = d != last && d != source.rows;
        int64_t index = is_other ? take_index(&rest, source.sizes[d]) : d == last ? place.column : place.row;
        place.row_step = d == source.rows ? step : place.row_step;
        place.input += index * source.strides[d];
        place.output += index * step;
        step *= source.sizes[d];
    }
    place.num_rows = source.sizes[source.rows] - place.row;
    place.num_columns = source.sizes[last] - place.column;
    return place;
}

/* Pack by tiles through shared memory: adjacent threads read adjacent elements and write adjacent elements. A
 * row of the tile is padded by one element, so that the elements of a column are in different banks. */
template <typename Out, typename In, typename Operation>
__global__ void __launch_bounds__(THREADS)
    transposed(const __grid_constant__ struct strided_source source, Operation operation) {
    __shared__ In values[TILE][TILE + 1];
    int64_t column_step = source.strides[source.ndim - 1]; /* input stride of a column */
    int64_t x = threadIdx.x % TILE;
    for (int64_t tile = blockIdx.x; tile < source.num_tiles; tile += gridDim.x) {
        struct tile_place place = tile_place_at(source, tile);
        const In *input = (const In *)source.input + place.input;
        Out *output = (Out *)source.output + place.output;
        In loaded[TILE * TILE / THREADS] = {}; /* every load is issued before the first store */
#pragma unroll
        for (int i = 0; i < TILE * TILE / THREADS; i++) {
            int64_t y = threadIdx.x / TILE + i * (THREADS / TILE);
            if (x < place.num_rows && y < place.num_columns)
                loaded[i] = input[y * column_step + x];
        }
#pragma unroll
        for (int i = 0; i < TILE * TILE / THREADS; i++)
            values[threadIdx.x / TILE + i * (THREADS / TILE)][x] = loaded[i];
        __syncthreads();
        for (int64_t y = threadIdx.x / TILE; y < TILE && y < place.num_rows; y += THREADS / TILE) {
            if (x < place.num_columns) {
                Out *element = output + y * place.row_step + x;
                *element = operation(Operation::READS_OUTPUT ? *element : Out(), values[x][y]);
            }
        }
        __syncthreads(); /* `values` is reused by the next tile */
    }
}

template <typename Out, typename In, typename Operation>
static enum status enqueue_one(struct strided_source *source, const Operation &operation,
                               const struct kernel_stream *stream) {
    static_assert(sizeof(struct strided_source) + sizeof(Operation) <= 4096, "a launch takes 4 KiB by value");
    if (source->rows >= 0) {
        int64_t columns = source->sizes[source->ndim - 1], rows = source->sizes[source->rows];
        source->num_tiles = source->numel / columns / rows * tiles_in(columns) * tiles_in(rows);
        ENQUEUE_WITH_BARRIERS((transposed<Out, In, Operation>), cuda_blocks(source->num_tiles), stream,
                              *source, operation);
    } else {
        ENQUEUE((strided<Out, In, Operation>), cuda_blocks((source->numel + THREADS - 1) / THREADS), stream,
                *source, operation);
    }
    return cuda_status(cudaGetLastError());
}

/* Return the source at index 0 of its first dimension, without that dimension. */
static struct strided_source first_slice(const struct strided_source *source) {
    struct strided_source first = *source;
    first.ndim--;
    first.numel = source->numel / source->sizes[0];
    memmove(first.sizes, source->sizes + 1, (size_t)first.ndim * sizeof *first.sizes);
    memmove(first.strides, source->strides + 1, (size_t)first.ndim * sizeof *first.strides);
    first.rows = source->rows > 0 ? source->rows - 1 : -1;
    return first;
}

/* Enqueue a source in launches of at most MAX_STRIDED_NUMEL elements: by indices of the first dimension or,
 * when one index is too large, by its inner dimensions. */
template <typename Out, typename In, typename Operation>
static enum status enqueue_strided(struct strided_source source, const Operation &operation,
                                   const struct kernel_stream *stream) {
    int64_t rows_left = source.ndim > 0 ? source.sizes[0] : 1;
    int64_t row_numel = source.numel / rows_left;
    int64_t max_rows = MAX_STRIDED_NUMEL / row_numel;
    enum status status = STATUS_OK;
    while (rows_left > 0 && status == STATUS_OK) {
        int64_t num_rows = rows_left < max_rows ? rows_left : max_rows > 0 ? max_rows : 1;
        source.sizes[0] = num_rows;
        source.numel = num_rows * row_numel;
        status = max_rows > 0 ? enqueue_one<Out, In>(&source, operation, stream)
                              : enqueue_strided<Out, In>(first_slice(&source), operation, stream);
        source.input = (const In *)source.input + num_rows * (source.ndim > 0 ? source.strides[0] : 0);
        source.output = (Out *)source.output + source.numel;
        rows_left -= num_rows;
    }
    return status;
}

/* ---- one pack ---- */

static bool is_present(const struct pack_source *source) {
    return source->view.data && source->numel > 0;
}

static char *output_at(const struct pack *pack, int64_t offset) {
    return pack->output + offset * dtype_nbytes(pack->output_dtype);
}

static enum status flush(const struct pack *pack, struct segment_table *table, enum dtype input_dtype) {
    if (!pack->add)
        return cuda_cast_segments(table, pack->output_dtype, input_dtype, pack->divisor, pack->stream);
    return with_types(pack->output_dtype, input_dtype, [&](auto out, auto in) {
        using Out = decltype(out);
        using In = decltype(in);
        return enqueue_elementwise<Out, In>(table, add_operation<Out, In>(), pack->stream);
    });
}

static enum status pack_strided(const struct pack *pack, const struct pack_source *source) {
    struct strided_source strided = strided_source_of(source, output_at(pack, source->offset));
    return with_types(pack->output_dtype, source->view.dtype, [&](auto out, auto in) {
        using Out = decltype(out);
        using In = decltype(in);
        if (pack->add)
            return enqueue_strided<Out, In>(strided, add_operation<Out, In>(), pack->stream);
        cast_divide_operation<Out, In> operation = {division<Out>(pack->divisor)};
        return enqueue_strided<Out, In>(strided, operation, pack->stream);
    });
}

/* Return the offset of the next source with elements after source `i`, or the end: the gap before it is
 * zeroed. */
static int64_t next_offset(const struct pack *pack, int64_t i) {
    for (i++; i < pack->num_sources; i++)
        if (is_present(&pack->sources[i]))
            return pack->sources[i].offset;
    return pack->output_numel;
}

/* Pack the flat sources of one dtype, and zero the gap after each. `zero_other_gaps` also zeroes the start of
 * the output and the gap after each source that is not flat. */
static enum status pack_flat(const struct pack *pack, enum dtype dtype, bool zero_other_gaps) {
    struct segment_table table;
    enum status status = STATUS_OK;
    table.count = 0;
    int64_t first = next_offset(pack, -1);
    if (zero_other_gaps && !pack->add)
        table_add(&table, pack->output, nullptr, 0, first);
    for (int64_t i = 0; i < pack->num_sources && status == STATUS_OK; i++) {
        const struct pack_source *source = &pack->sources[i];
        if (!is_present(source))
            continue;
        int64_t end = source->offset + source->numel;
        int64_t zeros = pack->add ? 0 : next_offset(pack, i) - end;
        if (is_flat(source) && source->view.dtype == dtype)
            table_add(&table, output_at(pack, source->offset), source->view.data, source->numel, zeros);
        else if (zero_other_gaps && !is_flat(source))
            table_add(&table, output_at(pack, end), nullptr, 0, zeros);
        if (table_is_full(&table))
            status = flush(pack, &table, dtype);
    }
    return status == STATUS_OK ? flush(pack, &table, dtype) : status;
}

static bool has_flat(const struct pack *pack, enum dtype dtype) {
    for (int64_t i = 0; i < pack->num_sources; i++)
        if (is_present(&pack->sources[i]) && pack->sources[i].view.dtype == dtype &&
            is_flat(&pack->sources[i]))
            return true;
    return false;
}

static enum status run(const struct pack *pack) {
    enum status status = pack_check(pack);
    device_guard guard(pack->stream);
    status = status == STATUS_OK ? guard.status : status;
    bool zero_other_gaps = true;
    for (int dtype = 0; dtype < DTYPE_COUNT && status == STATUS_OK; dtype++) {
        if (has_flat(pack, (enum dtype)dtype)) {
            status = pack_flat(pack, (enum dtype)dtype, zero_other_gaps);
            zero_other_gaps = false;
        }
    }
    if (zero_other_gaps && status == STATUS_OK)
        status = pack_flat(pack, pack->output_dtype, true);
    for (int64_t i = 0; i < pack->num_sources && status == STATUS_OK; i++)
        if (is_present(&pack->sources[i]) && !is_flat(&pack->sources[i]))
            status = pack_strided(pack, &pack->sources[i]);
    return status;
}

extern "C" enum status cuda_pack(void *output, enum dtype output_dtype, int64_t output_numel,
                                 const struct pack_source *sources, int64_t num_sources, double divisor,
                                 const struct kernel_stream *stream) {
    struct pack pack = {(char *)output, output_dtype, output_numel, sources,
                        num_sources,    divisor,      false,        stream};
    return run(&pack);
}

extern "C" enum status cuda_pack_add(void *output, enum dtype output_dtype, const struct pack_source *sources,
                                     int64_t num_sources, const struct kernel_stream *stream) {
    int64_t numel = num_sources > 0 ? sources[num_sources - 1].offset + sources[num_sources - 1].numel : 0;
    struct pack pack = {(char *)output, output_dtype, numel, sources, num_sources, 1.0, true, stream};
    return run(&pack);
}
