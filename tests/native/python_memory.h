/* Stand-in for Python's allocator, for programs that link parts of the runtime without Python. */
#ifndef FSDP_TESTS_PYTHON_MEMORY_H
#define FSDP_TESTS_PYTHON_MEMORY_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stdlib.h>

void *PyMem_Calloc(size_t count, size_t size) {
    return calloc(count, size);
}

void *PyMem_Realloc(void *memory, size_t size) {
    return realloc(memory, size);
}

void PyMem_Free(void *memory) {
    free(memory);
}

#endif
