/* Fault injection for allocations: the n-th call of an allocating function by a loaded library fails, as if
 * memory were out. The shipped library is tested without changes.
 *
 *   library --call--> slot of its GOT --> trampoline --count--> the function, or its result without memory
 *
 * A library calls external functions through a table of addresses. fail_calls_watch() replaces the slot of
 * each function below by a trampoline, which keeps the arguments. Built as a separate library, for x86-64 and
 * ELF. */
#define _GNU_SOURCE 1 /* the value in Python's headers */
#include <Python.h>
#include <dlfcn.h>
#include <elf.h>
#include <errno.h>
#include <link.h>
#include <stdbool.h>
#include <stdint.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

/* Function, its result when memory is out, and true if it also sets an exception. */
#define FUNCTIONS(X)                                                                                         \
    X(PyArg_ParseTuple, 0, true)                                                                             \
    X(_PyArg_ParseTuple_SizeT, 0, true)                                                                      \
    X(_PyArg_ParseTupleAndKeywords_SizeT, 0, true)                                                           \
    X(PyCMethod_New, 0, true)                                                                                \
    X(PyCapsule_New, 0, true)                                                                                \
    X(PyDict_SetItem, -1, true)                                                                              \
    X(PyErr_WarnFormat, -1, true)                                                                            \
    X(PyFloat_FromDouble, 0, true)                                                                           \
    X(PyImport_ImportModule, 0, true)                                                                        \
    X(PyList_Append, -1, true)                                                                               \
    X(PyList_AsTuple, 0, true)                                                                               \
    X(PyList_New, 0, true)                                                                                   \
    X(PyLong_FromLong, 0, true)                                                                              \
    X(PyLong_FromLongLong, 0, true)                                                                          \
    X(PyLong_FromUnsignedLongLong, 0, true)                                                                  \
    X(PyMem_Calloc, 0, false)                                                                                \
    X(PyMem_Realloc, 0, false)                                                                               \
    X(PyObject_Call, 0, true)                                                                                \
    X(PyObject_CallFunctionObjArgs, 0, true)                                                                 \
    X(PyObject_CallMethodObjArgs, 0, true)                                                                   \
    X(PyObject_CallNoArgs, 0, true)                                                                          \
    X(PyObject_CallObject, 0, true)                                                                          \
    X(PyObject_GetAttr, 0, true)                                                                             \
    X(PyObject_GetAttrString, 0, true)                                                                       \
    X(PyObject_SetAttr, -1, true)                                                                            \
    X(PyObject_SetAttrString, -1, true)                                                                      \
    X(PyObject_SetItem, -1, true)                                                                            \
    X(PyObject_Str, 0, true)                                                                                 \
    X(PySequence_GetItem, 0, true)                                                                           \
    X(PySequence_Tuple, 0, true)                                                                             \
    X(PyTuple_New, 0, true)                                                                                  \
    X(PyTuple_Pack, 0, true)                                                                                 \
    X(PyUnicode_AsASCIIString, 0, true)                                                                      \
    X(PyUnicode_AsUTF8String, 0, true)                                                                       \
    X(PyUnicode_FromFormat, 0, true)                                                                         \
    X(PyUnicode_FromString, 0, true)                                                                         \
    X(PyUnicode_InternFromString, 0, true)                                                                   \
    X(PyWeakref_NewRef, 0, true)                                                                             \
    X(_PyObject_CallFunction_SizeT, 0, true)                                                                 \
    X(_PyObject_CallMethod_SizeT, 0, true)                                                                   \
    X(_PyObject_GC_New, 0, true)                                                                             \
    X(calloc, 0, false)                                                                                      \
    X(posix_memalign, ENOMEM, false)

#define ENUMERATE(name, value, raises) INDEX_##name,
enum { FUNCTIONS(ENUMERATE) NUM_FUNCTIONS };

static const struct {
    const char *name;
    intptr_t value;
    bool raises;
} functions[] = {
#define DESCRIBE(name, value, raises) {#name, value, raises},
    FUNCTIONS(DESCRIBE)};

/* The test, in Python, sets and reads these variables. */
long long fail_calls_count;    /* calls so far */
long long fail_calls_armed;    /* number of the call that fails; 0 for none */
const char *fail_calls_failed; /* name of the function that failed, or NULL */
long long fail_calls_caller;   /* return address of the failed call in its library, for addr2line */

/* Return true if this call must fail. Arguments of the call are in registers: no vector register may be
 * written. */
__attribute__((target("general-regs-only"), visibility("hidden"), used)) bool fail_calls_must(void) {
    return ++fail_calls_count == fail_calls_armed;
}

__attribute__((visibility("hidden"), used)) intptr_t fail_calls_answer(int index) {
    Dl_info caller = {0};
    void *address = __builtin_return_address(0);
    dladdr(address, &caller);
    fail_calls_failed = functions[index].name;
    fail_calls_caller = (char *)address - (char *)caller.dli_fbase;
    if (functions[index].raises)
        PyErr_NoMemory();
    return functions[index].value;
}

#define TRAMPOLINE(name, value, raises)                                                                      \
    void trampoline_##name(void);                                                                            \
    __asm__(".text\n.globl trampoline_" #name "\n.hidden trampoline_" #name "\ntrampoline_" #name ":\n"      \
            "push %rdi\npush %rsi\npush %rdx\npush %rcx\npush %r8\npush %r9\npush %rax\n"                    \
            "call fail_calls_must\ntest %al, %al\n"                                                          \
            "pop %rax\npop %r9\npop %r8\npop %rcx\npop %rdx\npop %rsi\npop %rdi\n"                           \
            "jne 1f\n"                                                                                       \
            "mov original_of_" #name "(%rip), %r11\njmp *%r11\n"                                             \
            "1: mov index_of_" #name "(%rip), %edi\njmp fail_calls_answer\n");                               \
    __attribute__((visibility("hidden"), used)) void *original_of_##name;                                    \
    __attribute__((visibility("hidden"), used)) const int index_of_##name = INDEX_##name;
FUNCTIONS(TRAMPOLINE)

static void *const trampolines[] = {
#define ADDRESS_OF_TRAMPOLINE(name, value, raises) (void *)trampoline_##name,
    FUNCTIONS(ADDRESS_OF_TRAMPOLINE)};

static void **const originals[] = {
#define ADDRESS_OF_ORIGINAL(name, value, raises) &original_of_##name,
    FUNCTIONS(ADDRESS_OF_ORIGINAL)};

/* The tables of a loaded library, at absolute addresses. */
struct library {
    const Elf64_Sym *symbols;
    const char *strings;
    const Elf64_Rela *tables[2];
    size_t nbytes[2];
    char *base;
};

static void read_library(struct library *library, const struct link_map *map) {
    library->base = (char *)map->l_addr;
    for (const Elf64_Dyn *entry = map->l_ld; entry->d_tag != DT_NULL; entry++) {
        void *address = (void *)entry->d_un.d_ptr;
        switch (entry->d_tag) {
        case DT_SYMTAB:
            library->symbols = address;
            break;
        case DT_STRTAB:
            library->strings = address;
            break;
        case DT_JMPREL:
            library->tables[0] = address;
            break;
        case DT_PLTRELSZ:
            library->nbytes[0] = entry->d_un.d_val;
            break;
        case DT_RELA:
            library->tables[1] = address;
            break;
        case DT_RELASZ:
            library->nbytes[1] = entry->d_un.d_val;
            break;
        default:
            break;
        }
    }
}

static int find_function(const char *name, const char *only) {
    for (int i = 0; i < NUM_FUNCTIONS; i++)
        if (strcmp(functions[i].name, name) == 0 && (!only || strcmp(only, name) == 0))
            return i;
    return -1;
}

static bool redirect(void **slot, int index) {
    uintptr_t page = (uintptr_t)slot & ~((uintptr_t)sysconf(_SC_PAGESIZE) - 1);
    if (mprotect((void *)page, (uintptr_t)(slot + 1) - page, PROT_READ | PROT_WRITE) != 0)
        return false;
    *slot = trampolines[index];
    return true;
}

/* Count the calls by the loaded library at `path` of all functions above, or of `only` one of them. Return
 * the number of replaced slots, or -1. */
int fail_calls_watch(const char *path, const char *only);
int fail_calls_watch(const char *path, const char *only) {
    struct library library = {0};
    int watched = 0;
    void *handle = dlopen(path, RTLD_NOW | RTLD_NOLOAD);
    if (!handle)
        return -1;
    read_library(&library, handle);
    for (int table = 0; table < 2; table++)
        for (size_t i = 0; i < library.nbytes[table] / sizeof(Elf64_Rela); i++) {
            const Elf64_Rela *relocation = &library.tables[table][i];
            unsigned type = ELF64_R_TYPE(relocation->r_info);
            const char *name = library.strings + library.symbols[ELF64_R_SYM(relocation->r_info)].st_name;
            int index =
                type == R_X86_64_JUMP_SLOT || type == R_X86_64_GLOB_DAT ? find_function(name, only) : -1;
            if (index < 0)
                continue;
            *originals[index] = dlsym(RTLD_DEFAULT, name);
            if (!*originals[index] || !redirect((void **)(library.base + relocation->r_offset), index))
                return -1;
            watched++;
        }
    return watched;
}
