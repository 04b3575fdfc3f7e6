/* The CUDA kernel of all elementwise operations: output[i] = operation(output[i], input[i]) over many
 * segments.
 *
 *   segment   | head | chunk 0 | chunk 1 | ... | last chunk, may be short | zeros |
 *                    ^ output aligned to 16 bytes, and the input as well where one offset aligns both
 *
 * A launch takes a table of segments by value. A block processes chunks of any segment, in strides of the
 * grid. A thread moves 16 bytes at a time where the memory is aligned, and keeps enough vectors in flight to
 * hide the latency. */
#ifndef FSDP_KERNELS_CUDA_ELEMENTWISE_H
#define FSDP_KERNELS_CUDA_ELEMENTWISE_H

#include "kernels/cuda_launch.h"

struct segment {
    void *output;
    const void *input;
    int64_t numel;       /* elements with an input */
    int64_t zeros;       /* elements after these, set to zero */
    int64_t first_chunk; /* index of the segment's first chunk in the launch; set at the launch */
};

enum { SEGMENTS = TABLE_NBYTES / sizeof(struct segment) - 1 };

struct segment_table {
    int64_t num_chunks;
    int32_t count;
    struct segment segments[SEGMENTS];
};

/* ---- memory, 16 bytes at a time ---- */

/* Unpack the four words of a vector into elements of 2, 4 or 8 bytes; to_words packs them. */
template <typename T> __device__ inline void from_words(T *values, const unsigned *words) {
    if constexpr (sizeof(T) == 2) {
#pragma unroll
        for (int i = 0; i < VECTOR_NBYTES / 2; i++) {
            uint16_t bits = (uint16_t)(words[i / 2] >> (i % 2 * 16));
            memcpy(&values[i], &bits, sizeof bits);
        }
    } else {
#pragma unroll
        for (int i = 0; i < VECTOR_NBYTES / (int)sizeof(T); i++)
            memcpy(&values[i], words + i * sizeof(T) / 4, sizeof(T));
    }
}

template <typename T> __device__ inline void to_words(unsigned *words, const T *values) {
    if constexpr (sizeof(T) == 2) {
#pragma unroll
        for (int i = 0; i < 4; i++) {
            uint16_t low, high;
            memcpy(&low, &values[2 * i], sizeof low);
            memcpy(&high, &values[2 * i + 1], sizeof high);
            words[i] = (unsigned)low | (unsigned)high << 16;
        }
    } else {
#pragma unroll
        for (int i = 0; i < VECTOR_NBYTES / (int)sizeof(T); i++)
            memcpy(words + i * sizeof(T) / 4, &values[i], sizeof(T));
    }
}

/* Load elements by intrinsics, one instruction each: the compiler splits plain vector accesses into accesses
 * of one element. */
template <typename T, int COUNT> __device__ inline void load(T *values, const T *memory, bool aligned) {
    constexpr int PER_VECTOR = VECTOR_NBYTES / sizeof(T);
    if constexpr (COUNT < PER_VECTOR) {
        if (aligned) {
            static_assert(COUNT * sizeof(T) == sizeof(uint2), "half a vector");
            uint2 loaded = __ldcg(reinterpret_cast<const uint2 *>(memory));
            const unsigned words[4] = {loaded.x, loaded.y};
            T both[PER_VECTOR];
            from_words(both, words);
#pragma unroll
            for (int i = 0; i < COUNT; i++)
                values[i] = both[i];
            return;
        }
    } else if (aligned) {
#pragma unroll
        for (int v = 0; v < COUNT / PER_VECTOR; v++) {
            uint4 loaded = __ldcg(reinterpret_cast<const uint4 *>(memory) + v);
            const unsigned words[4] = {loaded.x, loaded.y, loaded.z, loaded.w};
            from_words(values + v * PER_VECTOR, words);
        }
        return;
    }
#pragma unroll
    for (int i = 0; i < COUNT; i++)
        values[i] = memory[i];
}

template <typename T, int COUNT> __device__ inline void store_aligned(T *memory, const T *values) {
    constexpr int PER_VECTOR = VECTOR_NBYTES / sizeof(T);
#pragma unroll
    for (int v = 0; v < COUNT / PER_VECTOR; v++) {
        unsigned words[4];
        to_words(words, values + v * PER_VECTOR);
        uint4 stored = {words[0], words[1], words[2], words[3]};
        __stwb(reinterpret_cast<uint4 *>(memory) + v, stored);
    }
}

/* ---- elements that one thread processes per step ---- */

template <typename Out, typename In> struct step {
    static constexpr int SMALLER = sizeof(Out) < sizeof(In) ? sizeof(Out) : sizeof(In);
    static constexpr int LARGER = sizeof(Out) < sizeof(In) ? sizeof(In) : sizeof(Out);
    /* Whole vectors on both sides, but half an input vector where the output is wider: an output of twice the
     * size is then one vector per thread, and the stores of a warp have no gaps. */
    static constexpr int NUMEL = VECTOR_NBYTES / SMALLER / (sizeof(Out) > sizeof(In) ? 2 : 1);
    static constexpr int INPUT_NBYTES = /* size of one load: a vector, or half of one */
        NUMEL * sizeof(In) < VECTOR_NBYTES ? NUMEL * (int)sizeof(In) : VECTOR_NBYTES;
    static constexpr int NBYTES = NUMEL * LARGER;
    /* steps in flight: 64 bytes per thread */
    static constexpr int DEPTH = NBYTES >= 64 ? 1 : 64 / NBYTES;
    static constexpr int64_t BLOCK_NUMEL = (int64_t)THREADS * NUMEL;
    static constexpr int64_t CHUNK_NUMEL = BLOCK_NUMEL * DEPTH;
};

/* Return the number of elements before the first aligned vector of the output at which the input is aligned
 * as well, or before its first aligned vector when no offset aligns both. Each element is aligned to its own
 * size. */
template <typename Out, typename In>
__host__ __device__ inline int64_t head_of(const struct segment &segment) {
    constexpr int64_t PER_VECTOR = VECTOR_NBYTES / sizeof(Out);
    uintptr_t output = (uintptr_t)segment.output, input = (uintptr_t)segment.input;
    int64_t next = (int64_t)((VECTOR_NBYTES - output % VECTOR_NBYTES) % VECTOR_NBYTES / sizeof(Out));
    int64_t head = next;
    for (int64_t i = next; i < next + step<Out, In>::NUMEL; i += PER_VECTOR) {
        if ((input + (uintptr_t)i * sizeof(In)) % step<Out, In>::INPUT_NBYTES == 0) {
            head = i;
            break;
        }
    }
    int64_t total = segment.numel + segment.zeros;
    return head < total ? head : total;
}

template <typename Out, typename In>
__host__ __device__ inline int64_t chunks_of(const struct segment &segment) {
    int64_t total = segment.numel + segment.zeros;
    int64_t body = total - head_of<Out, In>(segment);
    int64_t chunks = (body + step<Out, In>::CHUNK_NUMEL - 1) / step<Out, In>::CHUNK_NUMEL;
    return chunks > 0 ? chunks : total > 0;
}

/* ---- one chunk ---- */

template <typename Out, typename In, typename Operation> struct chunk_worker {
    Out *output;
    const In *input;
    int64_t numel; /* elements with an input; later ones are zero */
    Operation operation;

    __device__ Out value(int64_t i) const {
        if (i >= numel)
            return Out();
        return operation(Operation::READS_OUTPUT ? output[i] : Out(), input[i]);
    }

    __device__ void run_one_by_one(int64_t begin, int64_t end) const {
        for (int64_t i = begin + threadIdx.x; i < end; i += THREADS)
            output[i] = value(i);
    }

    /* Process a chunk of whole steps, all with an input. Every load is issued before the first store. */
    __device__ void run_whole_steps(int64_t begin) const {
        using shape = step<Out, In>;
        In in[shape::DEPTH][shape::NUMEL];
        Out out[shape::DEPTH][shape::NUMEL];
        int64_t first = begin + (int64_t)threadIdx.x * shape::NUMEL;
        bool aligned = (uintptr_t)(input + begin) % shape::INPUT_NBYTES == 0;
#pragma unroll
        for (int d = 0; d < shape::DEPTH; d++) {
            int64_t i = first + d * shape::BLOCK_NUMEL;
            load<In, shape::NUMEL>(in[d], input + i, aligned);
            if (Operation::READS_OUTPUT)
                load<Out, shape::NUMEL>(out[d], output + i, true);
        }
#pragma unroll
        for (int d = 0; d < shape::DEPTH; d++) {
#pragma unroll
            for (int i = 0; i < shape::NUMEL; i++)
                out[d][i] = operation(Operation::READS_OUTPUT ? out[d][i] : Out(), in[d][i]);
            store_aligned<Out, shape::NUMEL>(output + first + d * shape::BLOCK_NUMEL, out[d]);
        }
    }

    /* Process the last chunk of a segment, or a chunk that contains the end of the input. */
    __device__ void run_ragged(int64_t begin, int64_t end) const {
        using shape = step<Out, In>;
        int64_t vectored = begin + (end - begin) / shape::NUMEL * shape::NUMEL;
        for (int64_t i = begin + (int64_t)threadIdx.x * shape::NUMEL; i < vectored; i += shape::BLOCK_NUMEL) {
            Out out[shape::NUMEL];
#pragma unroll
            for (int j = 0; j < shape::NUMEL; j++)
                out[j] = value(i + j);
            store_aligned<Out, shape::NUMEL>(output + i, out);
        }
        run_one_by_one(vectored, end);
    }

    __device__ void run(int64_t chunk, int64_t head, int64_t total) const {
        int64_t begin = head + chunk * step<Out, In>::CHUNK_NUMEL;
        int64_t end = begin + step<Out, In>::CHUNK_NUMEL;
        if (chunk == 0)
            run_one_by_one(0, head);
        if (end <= numel)
            run_whole_steps(begin);
        else
            run_ragged(begin, end < total ? end : total);
    }
};

/* ---- all chunks ---- */

/* Return the item that `chunk` belongs to: the last one whose first chunk is not after it. */
template <typename Item>
__device__ inline const Item &item_of(const Item *items, int32_t count, int64_t chunk) {
    int32_t low = 0;
    int32_t high = count;
    while (high - low > 1) {
        int32_t middle = (low + high) / 2;
        if (items[middle].first_chunk <= chunk)
            low = middle;
        else
            high = middle;
    }
    return items[low];
}

template <typename Out, typename In, typename Operation>
__global__ void __launch_bounds__(THREADS)
    elementwise(const __grid_constant__ struct segment_table table, Operation operation) {
    for (int64_t chunk = blockIdx.x; chunk < table.num_chunks; chunk += gridDim.x) {
        const struct segment &segment = item_of(table.segments, table.count, chunk);
        chunk_worker<Out, In, Operation> worker = {(Out *)segment.output, (const In *)segment.input,
                                                   segment.numel, operation};
        worker.run(chunk - segment.first_chunk, head_of<Out, In>(segment), segment.numel + segment.zeros);
    }
}

/* Enqueue one launch for the whole table, then empty the table. */
template <typename Out, typename In, typename Operation>
enum status enqueue_elementwise(struct segment_table *table, const Operation &operation,
                                const struct kernel_stream *stream) {
    static_assert(sizeof(struct segment_table) + sizeof(Operation) <= 4096, "a launch takes 4 KiB by value");
    int64_t chunks = 0;
    for (int32_t i = 0; i < table->count; i++) {
        table->segments[i].first_chunk = chunks;
        chunks += chunks_of<Out, In>(table->segments[i]);
    }
    table->num_chunks = chunks;
    if (chunks > 0)
        ENQUEUE((elementwise<Out, In, Operation>), cuda_blocks(chunks), stream, *table, operation);
    table->count = 0;
    return cuda_status(cudaGetLastError());
}

/* Add a segment. A segment without elements is skipped: item_of() needs distinct first chunks. */
inline void table_add(struct segment_table *table, void *output, const void *input, int64_t numel,
                      int64_t zeros) {
    if (numel + zeros > 0)
        table->segments[table->count++] = {output, input, numel, zeros, 0};
}

inline bool table_is_full(const struct segment_table *table) {
    return table->count == SEGMENTS;
}

/* ---- operations ---- */

/* Division by a number as torch's CUDA kernels do it: a product with the reciprocal, which is computed in
 * fp64 and rounded to the arithmetic type of T. */
template <typename T> struct division {
    arithmetic_of<T> reciprocal;
    bool divides;

    explicit division(double divisor)
        : reciprocal((arithmetic_of<T>)(1.0 / divisor)), divides(divisor != 1.0) {
    }

    __device__ T operator()(T value) const {
        return divides ? element<T>::store(element<T>::load(value) * reciprocal) : value;
    }
};

template <typename Out, typename In> struct cast_divide_operation {
    static constexpr bool READS_OUTPUT = false;
    division<Out> divided;

    __device__ Out operator()(Out, In value) const {
        return divided(converted<Out>(value));
    }
};

/* Enqueue the casts of a table, shared by elementwise.cu and pack.cu, then empty the table. */
enum status cuda_cast_segments(struct segment_table *table, enum dtype output_dtype, enum dtype input_dtype,
                               double divisor, const struct kernel_stream *stream);

#endif
