#include "torch/data_guard.h"

#include <string.h>

#include "torch/py_torch.h"

enum {
    SCANNED_NBYTES = 80,   /* less than the size of c10::StorageImpl in any version of torch */
    CHECKS = 0,            /* nonzero if any of the flags below is set */
    THROWS_ON_WRITING = 1, /* set by _set_throw_on_mutable_data_ptr */
    THROWS = 2,            /* set by a guard */
    WARNS = 3,
    NUM_FLAGS
};

static Py_ssize_t flags_offset = -1; /* -1 when the flags were not found: nothing is guarded */

/* Return the bytes of `storage` at `offset`, borrowed; NULL with an exception. */
static uint8_t *flags_of(PyObject *storage, Py_ssize_t offset) {
    OWNED *address = PyObject_GetAttrString(storage, "_cdata");
    void *memory = address ? PyLong_AsVoidPtr(address) : NULL;
    return memory ? (uint8_t *)memory + offset : NULL;
}

static bool is_plain(PyObject *tensor) {
    return Py_IS_TYPE(tensor, (PyTypeObject *)torch_names.tensor_type);
}

static PyObject *storage_of(PyObject *tensor) {
    return PyObject_CallMethod(tensor, "untyped_storage", NULL);
}

/* Return the offset of the first byte that _set_throw_on_mutable_data_ptr() sets, if it sets that byte, the
 * next one and no other; else -1. */
static Py_ssize_t find_flags(PyObject *tensor) {
    uint8_t before[SCANNED_NBYTES], after[SCANNED_NBYTES];
    OWNED *storage = storage_of(tensor);
    const uint8_t *memory = storage ? flags_of(storage, 0) : NULL;
    OWNED *set = memory ? ref_find("torch._C", "_set_throw_on_mutable_data_ptr") : NULL;
    if (!set)
        return -1;
    memcpy(before, memory, sizeof before);
    if (ref_done(PyObject_CallFunctionObjArgs(set, tensor, NULL)) < 0)
        return -1;
    memcpy(after, memory, sizeof after);
    Py_ssize_t first = 0;
    while (first < SCANNED_NBYTES - NUM_FLAGS && before[first] == after[first])
        first++;
    static const uint8_t expected_before[NUM_FLAGS] = {0},
                         expected_after[NUM_FLAGS] = {[CHECKS] = 1, [THROWS_ON_WRITING] = 1};
    size_t rest = (size_t)(first + NUM_FLAGS);
    bool is_expected = memcmp(before + first, expected_before, NUM_FLAGS) == 0 &&
                       memcmp(after + first, expected_after, NUM_FLAGS) == 0 &&
                       memcmp(before + rest, after + rest, sizeof before - rest) == 0;
    return is_expected ? first : -1;
}

/* Return 1 if `method` of the tensor raises RuntimeError, 0 if it succeeds, -1 for a different error. */
static int is_refused(PyObject *tensor, const char *method) {
    if (ref_done(PyObject_CallMethod(tensor, method, NULL)) == 0)
        return 0;
    int result = PyErr_ExceptionMatches(PyExc_RuntimeError) ? 1 : -1;
    PyErr_Clear();
    return result;
}

/* Return true if the guard at `offset` makes reads and writes raise, and only while it is set. */
static bool flag_works(PyObject *tensor, Py_ssize_t offset) {
    struct data_guard guard = {0};
    OWNED *storage = storage_of(tensor);
    if (!storage || !(guard.flags = flags_of(storage, offset)))
        return false;
    data_guard_set(&guard, true);
    bool refuses = is_refused(tensor, "neg") == 1 && is_refused(tensor, "neg_") == 1;
    data_guard_set(&guard, false);
    return refuses && is_refused(tensor, "neg") == 0 && is_refused(tensor, "neg_") == 0;
}

int data_guard_init_flags(void) {
    OWNED *cpu = PyUnicode_FromString("cpu");
    OWNED *probe = cpu ? torch_empty(1, torch_names.int32, cpu) : NULL;
    OWNED *trial_tensor = probe ? torch_empty(1, torch_names.int32, cpu) : NULL;
    Py_ssize_t offset = trial_tensor && is_plain(trial_tensor) ? find_flags(probe) : -1;
    flags_offset = offset >= 0 && flag_works(trial_tensor, offset) ? offset : -1;
    PyErr_Clear();
    return 0;
}

int data_guard_init(struct data_guard *guard, PyObject *tensor) {
    *guard = (struct data_guard){0};
    if (flags_offset < 0 || !is_plain(tensor))
        return 0;
    OWNED *storage = storage_of(tensor);
    guard->flags = storage ? flags_of(storage, flags_offset) : NULL;
    return guard->flags ? 0 : -1;
}

void data_guard_set(struct data_guard *guard, bool is_set) {
    if (!guard->flags || guard->is_set == is_set)
        return;
    guard->is_set = is_set;
    if (is_set)
        guard->checks = guard->flags[CHECKS];
    guard->flags[THROWS] = is_set;
    guard->flags[CHECKS] = is_set ? 1 : guard->checks;
}
