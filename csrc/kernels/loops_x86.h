/* Load, round and store of a vector on x86-64, for both vector widths.
 *
 * The including file defines FLOATS, the compiler's types vector_floats and vector_bits, OF_WIDTH, which
 * makes the name of an intrinsic, and the functions that differ between the two instruction sets. */
typedef vector_floats floats;
typedef uint32_t float_bits __attribute__((vector_size(4 * FLOATS)));

enum { NEAREST = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC };

static inline floats floats_of(float value) {
    return OF_WIDTH(set1_ps)(value);
}

static inline floats floats_load_float(const float *input) {
    return OF_WIDTH(loadu_ps)(input);
}

static inline floats floats_load_bfloat16(const bfloat16 *input) {
    return (floats)OF_WIDTH(slli_epi32)(OF_WIDTH(cvtepu16_epi32)(halves_load(input)), 16);
}

static inline floats floats_load_float16(const float16 *input) {
    return OF_WIDTH(cvtph_ps)(halves_load(input));
}

static inline void bits_store_halves(void *halves, float_bits bits) {
    halves_store(halves, lower_halves((vector_bits)bits));
}

static inline floats floats_round_bfloat16(floats values) {
    return (floats)((float_bits)round_to_bfloat16(values) & 0xffff0000u);
}

static inline floats floats_round_float16(floats values) {
    return OF_WIDTH(cvtph_ps)(OF_WIDTH(cvtps_ph)(values, NEAREST));
}

static inline void floats_store_float(float *output, floats values) {
    OF_WIDTH(storeu_ps)(output, values);
}

static inline void floats_store_bfloat16(bfloat16 *output, floats values) {
    bits_store_halves(output, (float_bits)round_to_bfloat16(values) >> 16);
}

static inline void floats_store_float16(float16 *output, floats values) {
    halves_store(output, OF_WIDTH(cvtps_ph)(values, NEAREST));
}
