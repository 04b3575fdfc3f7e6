/* The checksums that checksum.c defines. A sum modulo 2^64 has no order: any thread may add its part at any
 * time. */
#include "kernels/checksum.h"
#include "kernels/cuda_elementwise.h"

enum {
    CHUNK_WORDS = 4 * 1024, /* so few that 16 MiB have work for every processor */
    VECTORS_AT_ONCE = 4,    /* of two words, of a thread: they hide the latency */
    WORDS_AT_ONCE = VECTORS_AT_ONCE * THREADS * 2,
};

struct checksum_item {
    const unsigned char *data;
    int64_t nbytes;
    int64_t first_chunk;
};

enum { CHECKSUM_ITEMS = TABLE_NBYTES / sizeof(struct checksum_item) - 2 };

struct checksum_table {
    unsigned long long *sums;
    int64_t num_chunks;
    int32_t count;
    struct checksum_item items[CHECKSUM_ITEMS];
};

__host__ __device__ static int64_t words_in(int64_t nbytes) {
    return (nbytes + WORD_NBYTES - 1) / WORD_NBYTES;
}

/* A word of memory of any alignment, filled up with zeros at the end. */
__device__ static uint64_t word_at(const struct checksum_item &item, int64_t index) {
    const unsigned char *data = item.data + index * WORD_NBYTES;
    int64_t nbytes = item.nbytes - index * WORD_NBYTES;
    uint64_t word = 0;
    if (nbytes >= WORD_NBYTES && (uintptr_t)data % sizeof(uint32_t) == 0) {
        const uint32_t *halves = (const uint32_t *)data;
        return halves[0] | (uint64_t)halves[1] << 32;
    }
    for (int i = 0; i < WORD_NBYTES && i < nbytes; i++)
        word |= (uint64_t)data[i] << 8 * i;
    return word;
}

/* The terms of whole, aligned vectors that lie THREADS apart, from the word `first` on. */
__device__ static uint64_t sum_vectors(const struct checksum_item &item, int64_t first) {
    uint64_t words[VECTORS_AT_ONCE][2];
    uint64_t sum = 0;
#pragma unroll
    for (int v = 0; v < VECTORS_AT_ONCE; v++)
        load<uint64_t, 2>(words[v], (const uint64_t *)item.data + first + v * THREADS * 2, true);
#pragma unroll
    for (int v = 0; v < VECTORS_AT_ONCE; v++) {
        int64_t i = first + v * THREADS * 2;
        sum += checksum_term(words[v][0], i) + checksum_term(words[v][1], i + 1);
    }
    return sum;
}

/* One thread's share of a chunk. */
__device__ static uint64_t sum_chunk(const struct checksum_item &item, int64_t begin, int64_t end) {
    uint64_t sum = 0;
    bool aligned = is_aligned(item.data);
    for (; aligned && (begin + WORDS_AT_ONCE) * WORD_NBYTES <= item.nbytes && begin < end;
         begin += WORDS_AT_ONCE)
        sum += sum_vectors(item, begin + (int64_t)threadIdx.x * 2);
    for (int64_t i = begin + threadIdx.x; i < end; i += THREADS)
        sum += checksum_term(word_at(item, i), i);
    return sum;
}

/* The sum of the values of all threads of a block, in thread 0. */
__device__ static uint64_t sum_block(uint64_t value) {
    __shared__ uint64_t sums[THREADS];
    __syncthreads(); /* an earlier round has been read */
    sums[threadIdx.x] = value;
    __syncthreads();
    for (unsigned width = THREADS / 2; width > 0; width /= 2) {
        if (threadIdx.x < width)
            sums[threadIdx.x] += sums[threadIdx.x + width];
        __syncthreads();
    }
    return sums[0];
}

__global__ void __launch_bounds__(THREADS) start_sums(const __grid_constant__ struct checksum_table table) {
    for (int32_t i = (int32_t)threadIdx.x; i < table.count; i += THREADS)
        table.sums[i] = (unsigned long long)table.items[i].nbytes;
}

__global__ void __launch_bounds__(THREADS) add_chunks(const __grid_constant__ struct checksum_table table) {
    for (int64_t chunk = blockIdx.x; chunk < table.num_chunks; chunk += gridDim.x) {
        const struct checksum_item &item = item_of(table.items, table.count, chunk);
        int64_t begin = (chunk - item.first_chunk) * CHUNK_WORDS;
        int64_t end = begin + CHUNK_WORDS;
        int64_t words = words_in(item.nbytes);
        uint64_t sum = sum_block(sum_chunk(item, begin, end < words ? end : words));
        if (threadIdx.x == 0)
            atomicAdd(&table.sums[&item - table.items], (unsigned long long)sum);
    }
}

__global__ void __launch_bounds__(THREADS) finish_sums(const __grid_constant__ struct checksum_table table) {
    for (int32_t i = (int32_t)threadIdx.x; i < table.count; i += THREADS)
        table.sums[i] = checksum_mixed(table.sums[i]);
}

static enum status enqueue(const struct checksum_table &table, const struct kernel_stream *stream) {
    static_assert(sizeof(struct checksum_table) <= 4096, "a launch takes 4 KiB by value");
    ENQUEUE(start_sums, 1, stream, table);
    if (table.num_chunks > 0)
        ENQUEUE_WITH_BARRIERS(add_chunks, cuda_blocks(table.num_chunks), stream, table);
    ENQUEUE(finish_sums, 1, stream, table);
    return cuda_status(cudaGetLastError());
}

/* As many ranges as a table holds, from `begin` on. */
static void fill_table(struct checksum_table *table, uint64_t *checksums, const struct byte_range *ranges,
                       int64_t num_ranges, int64_t begin) {
    table->sums = (unsigned long long *)checksums + begin;
    table->num_chunks = 0;
    table->count = 0;
    for (int64_t i = begin; i < num_ranges && table->count < (int32_t)CHECKSUM_ITEMS; i++) {
        table->items[table->count++] = {(const unsigned char *)ranges[i].data, ranges[i].nbytes,
                                        table->num_chunks};
        table->num_chunks += (words_in(ranges[i].nbytes) + CHUNK_WORDS - 1) / CHUNK_WORDS;
    }
}

extern "C" enum status cuda_checksums(uint64_t *checksums, const struct byte_range *ranges,
                                      int64_t num_ranges, const struct kernel_stream *stream) {
    struct checksum_table table;
    for (int64_t i = 0; i < num_ranges; i++)
        if (ranges[i].nbytes < 0)
            return STATUS_INVALID;
    device_guard guard(stream);
    enum status status = guard.status;
    for (int64_t next = 0; next < num_ranges && status == STATUS_OK; next += table.count) {
        fill_table(&table, checksums, ranges, num_ranges, next);
        status = enqueue(table, stream);
    }
    return status;
}
