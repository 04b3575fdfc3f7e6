/* The loops for x86-64 with AVX2; nothing on other architectures. */
#include "kernels/loops_versions.h"

#ifdef LOOPS_X86_64
#ifdef __clang__
#pragma clang attribute push(__attribute__((target("avx2,fma,f16c,bmi,bmi2"))), apply_to = function)
#else
#pragma GCC target("avx2,fma,f16c,bmi,bmi2")
#endif

#define LOOPS_TABLE loops_avx2
#define LOOPS_NAME  "avx2"
#include "kernels/loops_body.h"

#ifdef __clang__
#pragma clang attribute pop
#endif
#endif
