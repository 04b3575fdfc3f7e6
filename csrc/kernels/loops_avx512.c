/* The loops for x86-64 with AVX-512; nothing on other architectures. */
#include "kernels/loops_versions.h"

#ifdef LOOPS_X86_64
#ifdef __clang__
#pragma clang attribute push(__attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c,bmi,bmi2"))),     \
                             apply_to = function)
#else
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c,bmi,bmi2")
#endif

#define LOOPS_TABLE loops_avx512
#define LOOPS_NAME  "avx512"
#include "kernels/loops_body.h"

#ifdef __clang__
#pragma clang attribute pop
#endif
#endif
