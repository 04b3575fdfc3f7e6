#include "kernels/loops.h"

#include "kernels/convert.h"

/* ---- the versions ---- */

#define FLOATS     1
#define LOOPS_NAME default
#include "kernels/loops_body.h"

#if defined(__x86_64__) && defined(__GNUC__)
#define LOOPS_X86_64
#include <immintrin.h>

#ifdef __clang__
#pragma clang attribute push(__attribute__((target("avx2,fma,f16c,bmi,bmi2"))), apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx2,fma,f16c,bmi,bmi2")
#endif
#define FLOATS     8
#define LOOPS_NAME avx2
#include "kernels/loops_body.h"
#ifdef __clang__
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif
#endif

/* ---- the version in use ---- */

#ifdef __aarch64__
bool rounds_once_to_float16 = true;
#endif

static const struct loops *active = &loops_default; /* replaced by the constructor below */

void loops_use(bool widest) {
    active = &loops_default;
#ifdef LOOPS_X86_64
    __builtin_cpu_init();
    if (widest && __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma"))
        active = &loops_avx2;
#endif
}

const struct loops *loops_active(void) {
    return active;
}

__attribute__((constructor)) static void select_widest_loops(void) {
    loops_use(true);
}
