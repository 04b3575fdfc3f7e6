/* Vectors of the width that torch's own CPU reductions have, which the bits of a 2-norm depend on. */
#ifndef FSDP_KERNELS_SQUARES_H
#define FSDP_KERNELS_SQUARES_H

#include <string.h>

enum { SQUARE_NBYTES = 32 };
typedef float square_floats __attribute__((vector_size(SQUARE_NBYTES)));
typedef double square_doubles __attribute__((vector_size(SQUARE_NBYTES)));

static inline void square_load_float(square_floats *values, const float *input) {
    memcpy(values, input, sizeof *values);
}

static inline void square_load_double(square_doubles *values, const double *input) {
    memcpy(values, input, sizeof *values);
}

#endif
