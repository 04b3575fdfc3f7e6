/* Test harness of the native programs. A test is a function of checks; a failed check prints its line and
 * exits with 1. test_native.py compiles each test_*.c with the csrc files in its "links:" comment, and runs
 * it. */
#ifndef FSDP_TESTS_NATIVE_HARNESS_H
#define FSDP_TESTS_NATIVE_HARNESS_H

#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>

#define CHECK(condition)                                                                                     \
    do {                                                                                                     \
        if (!(condition)) {                                                                                  \
            fprintf(stderr, "%s:%d: %s: failed: %s\n", __FILE__, __LINE__, __func__, #condition);            \
            exit(1);                                                                                         \
        }                                                                                                    \
    } while (0)

#define CHECK_EQUAL(actual, expected)                                                                        \
    do {                                                                                                     \
        const long long actual_ = (actual), expected_ = (expected);                                          \
        if (actual_ != expected_) {                                                                          \
            fprintf(stderr, "%s:%d: %s: %s is %lld, expected %lld\n", __FILE__, __LINE__, __func__, #actual, \
                    actual_, expected_);                                                                     \
            exit(1);                                                                                         \
        }                                                                                                    \
    } while (0)

static struct {
    const char *name;
    void (*run)(void);
} tests[64];
static int num_tests;

/* Define a test and register it for run_tests(). */
#define TEST(test)                                                                                           \
    static void test(void);                                                                                  \
    __attribute__((constructor)) static void register_##test(void) {                                         \
        CHECK(num_tests < (int)(sizeof tests / sizeof *tests));                                              \
        tests[num_tests].name = #test;                                                                       \
        tests[num_tests++].run = test;                                                                       \
    }                                                                                                        \
    static void test(void)

/* Run all tests of the program. Return 0, the result of main(). */
static inline int run_tests(void) {
    CHECK(num_tests > 0);
    for (int i = 0; i < num_tests; i++) {
        tests[i].run();
        printf("passed %s\n", tests[i].name);
    }
    return 0;
}

/* Return a random number in [0, bound), by xorshift: equal on every machine. */
static inline int64_t random_below(uint64_t *state, int64_t bound) {
    *state ^= *state << 13;
    *state ^= *state >> 7;
    *state ^= *state << 17;
    return (int64_t)(*state % (uint64_t)bound);
}

#endif
