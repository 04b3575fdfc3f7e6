/* kernel_checksums: 64 bits over a range of memory, the same for any number of threads and any instruction
 * set.
 *
 *   bytes    w0 w1 w2 ... wn    words of 8 bytes, little-endian, the last one filled up with zeros
 *   word i   x = wi ^ (i + 1) * STEP, then x + (low half of x) * (high half of x)
 *   sum      of all words, modulo 2^64, plus the number of bytes; then its bits are mixed
 *
 * [Note: what a checksum misses] A change within one aligned 32-bit half of a word always shows: with the
 * other half fixed the word's term is the half times a number of which 2^33 is no divisor. Any other change
 * is missed once in about 2^64. */
#include <stdatomic.h>
#include <string.h>

#include "kernels/blocks.h"
#include "kernels/checksum.h"
#include "kernels/loops.h"

enum { GRAIN_WORDS = 32 * 1024 };

struct checksum_context {
    const unsigned char *data;
    _Atomic uint64_t sum;
};

static void checksum_range(int64_t begin, int64_t end, void *context) {
    struct checksum_context *checksum = context;
    uint64_t sum = loops_active()->checksum(checksum->data + begin * WORD_NBYTES, begin, end - begin);
    atomic_fetch_add_explicit(&checksum->sum, sum, memory_order_relaxed);
}

static uint64_t checksum_of(const struct byte_range *range, const struct kernel_stream *stream) {
    struct checksum_context context = {range->data, (uint64_t)range->nbytes};
    int64_t num_words = range->nbytes / WORD_NBYTES;
    int64_t rest = range->nbytes - num_words * WORD_NBYTES;
    unsigned char last[WORD_NBYTES] = {0};
    stream_for(stream, num_words, GRAIN_WORDS, checksum_range, &context);
    uint64_t sum = atomic_load(&context.sum);
    if (rest > 0) {
        memcpy(last, context.data + num_words * WORD_NBYTES, (size_t)rest);
        sum += loops_active()->checksum(last, num_words, 1);
    }
    return checksum_mixed(sum);
}

enum status kernel_checksums(uint64_t *checksums, const struct byte_range *ranges, int64_t num_ranges,
                             const struct kernel_stream *stream) {
    for (int64_t i = 0; i < num_ranges; i++)
        if (ranges[i].nbytes < 0)
            return STATUS_INVALID;
    for (int64_t i = 0; i < num_ranges; i++)
        checksums[i] = checksum_of(&ranges[i], stream);
    return STATUS_OK;
}
