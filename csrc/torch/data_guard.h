/* A storage without memory raises RuntimeError where its data pointer is asked for, by any operator, by numpy()
 * or by DLPack: torch itself hands out a null pointer, from which CPU kernels compute garbage or end the process.
 *
 * [Note: data guards] Every storage of torch has flags for it, which FakeTensors use. Of the one that covers
 * reads as well no interface is left to take it back, before torch 2.13 not even to C++. The flags are bytes, one
 * beside the other. Which ones they are is found at import: a function of torch sets two of them on a storage of
 * ours, and what a third one does is tried out there. Where any of it is not as expected nothing is guarded.
 *
 * Invariant: a set guard changes no other field of the storage, and is taken back before it is resized. */
#ifndef FSDP_TORCH_DATA_GUARD_H
#define FSDP_TORCH_DATA_GUARD_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stdbool.h>
#include <stdint.h>

struct data_guard {
    uint8_t *flags; /* borrowed, in a storage that outlives the guard; NULL where there is no guard */
    uint8_t checks; /* whether the storage checked anything before the guard was set */
    bool is_set;
};

int data_guard_init_flags(void); /* once per process. 0 */

/* The guard of the storage of `tensor`, not set; none for a FakeTensor and its like. 0 or -1 */
int data_guard_init(struct data_guard *guard, PyObject *tensor);
void data_guard_set(struct data_guard *guard, bool is_set); /* a no-op where it is so */

#endif
