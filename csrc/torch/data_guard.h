/* A guard on a freed storage: any access to its data pointer raises RuntimeError, by an operator, numpy() or
 * DLPack. torch returns a null pointer there, from which CPU kernels compute garbage or crash the process.
 *
 * [Note: data guards] Every storage of torch has flags that make accesses raise, for FakeTensors. The flag
 * that covers reads cannot be cleared by any function of torch, before torch 2.13 not even from C++. The
 * flags are adjacent bytes, whose offset is found at import: a function of torch sets two of them on a probe
 * storage, and the third is tried on another one. Nothing is guarded when any result differs from the
 * expected one.
 *
 * Invariant: a set guard changes no other field of the storage, and is cleared before the storage is
 * resized. */
#ifndef FSDP_TORCH_DATA_GUARD_H
#define FSDP_TORCH_DATA_GUARD_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stdbool.h>
#include <stdint.h>

struct data_guard {
    uint8_t *flags; /* borrowed; in a storage that outlives the guard; NULL without a guard */
    uint8_t checks; /* value of the flag CHECKS before the guard was set */
    bool is_set;
};

int data_guard_init_flags(void); /* Find the flags, once per process. 0, even when they are not found. */

/* Initialise the guard of the storage of `tensor`, not set. Subclasses such as FakeTensor get no guard. Return 0
 * or -1. */
int data_guard_init(struct data_guard *guard, PyObject *tensor);
void data_guard_set(struct data_guard *guard, bool is_set);

#endif
