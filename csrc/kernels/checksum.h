/* The terms of a checksum, for the CPU and the GPU: checksum.c defines it. */
#ifndef FSDP_KERNELS_CHECKSUM_H
#define FSDP_KERNELS_CHECKSUM_H

#include "kernels/kernels.h"

#define CHECKSUM_STEP 0x9e3779b97f4a7c15u

enum { WORD_NBYTES = 8 };

HOST_DEVICE static inline uint64_t checksum_term(uint64_t word, int64_t index) {
    word ^= (uint64_t)(index + 1) * CHECKSUM_STEP;
    return word + (word & 0xffffffffu) * (word >> 32);
}

HOST_DEVICE static inline uint64_t checksum_mixed(uint64_t sum) {
    sum = (sum ^ (sum >> 33)) * 0xff51afd7ed558ccdu;
    sum = (sum ^ (sum >> 33)) * 0xc4ceb9fe1a85ec53u;
    return sum ^ (sum >> 33);
}

#endif
