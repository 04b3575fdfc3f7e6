#include "kernels/loops.h"

#include <string.h>

#include "kernels/convert.h"

/* ---- the versions ---- */

#define ALWAYS_INLINE static inline __attribute__((always_inline))

/* Input and output may alias element by element, never at different indices. */
#ifdef __clang__
#pragma clang diagnostic ignored "-Wpass-failed" /* clang warns of loops that are vectors already */
#define ELEMENTWISE _Pragma("clang loop vectorize(assume_safety)")
#else
#define ELEMENTWISE _Pragma("GCC ivdep")
#endif

enum { PREFETCH_NUMEL = 512 };

/* Keep the compiler from vectorising the last elements, fewer than a vector: that would be most of the code. */
ALWAYS_INLINE bool one_by_one(void) {
    __asm__ volatile("");
    return true;
}

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
#ifdef __clang__ /* nested targets do not add up */
#pragma clang attribute pop
#pragma clang attribute push(                                                                                \
    __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c,bmi,bmi2"))),                    \
    apply_to = function)
#else
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl")
#endif
#define FLOATS     16
#define LOOPS_NAME avx512
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

static bool processor_supports(const struct loops *loops) {
#ifdef LOOPS_X86_64
    if (loops == &loops_avx512) {
        return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
               __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") &&
               processor_supports(&loops_avx2);
    }
    if (loops == &loops_avx2)
        return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
#endif
    return loops == &loops_default;
}

static const struct loops *const versions[] = {
#ifdef LOOPS_X86_64
    &loops_avx512,
    &loops_avx2,
#endif
    &loops_default,
};
enum { NUM_VERSIONS = sizeof versions / sizeof versions[0] };

const struct loops *loops_version(int index) {
    for (int i = 0; i < NUM_VERSIONS; i++)
        if (processor_supports(versions[i]) && index-- == 0)
            return versions[i];
    return NULL;
}

bool loops_use(const char *name) {
    const struct loops *loops = loops_version(0);
    for (int i = 1; loops && name && strcmp(loops->name, name) != 0; i++)
        loops = loops_version(i);
    active = loops ? loops : active;
    return loops != NULL;
}

const struct loops *loops_active(void) {
    return active;
}

__attribute__((constructor)) static void select_widest_loops(void) {
#ifdef LOOPS_X86_64
    __builtin_cpu_init();
#endif
    loops_use(NULL);
}
