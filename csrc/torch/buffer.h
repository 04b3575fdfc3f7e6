/* A tensor whose storage comes and goes while the tensor object, and every view of it, stays the same.
 *
 * Invariant: `allocated` says whether the storage has its full size; `data` is valid only then. The live and
 * peak byte counts of this process cover every counted buffer, so that a test can hold the runtime to what a
 * strategy promises. */
#ifndef FSDP_TORCH_BUFFER_H
#define FSDP_TORCH_BUFFER_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stdbool.h>
#include <stdint.h>

#include "kernels/kernels.h"

struct buffer {
    PyObject *tensor;        /* owned; 1-D; NULL before buffer_init */
    PyObject *resize;        /* owned; the storage's bound resize_ */
    PyObject *full_nbytes;   /* owned; int */
    struct tensor_view view; /* borrowed from tensor; data is NULL while freed */
    int64_t numel;
    int64_t nbytes;
    bool allocated;
    bool counted;
    struct buffer *next_held; /* borrowed; in the list of deferred_free.h */
};

/* Create the tensor with its storage allocated, so that views of it can be made; buffer_free follows.
 * `counted` buffers enter the live and peak byte counts: those that hold unsharded parameters. 0 or -1. */
int buffer_init(struct buffer *buffer, int64_t numel, PyObject *dtype, PyObject *device, bool counted);
/* For a dry run: it takes no memory, is not counted, and `resize` is called in the place of its storage's.
 * `tensor` is any. */
void buffer_init_without_memory(struct buffer *buffer, PyObject *tensor, PyObject *resize, int64_t nbytes);
void buffer_fini(struct buffer *buffer);

int buffer_alloc(struct buffer *buffer); /* a no-op when allocated; contents undefined otherwise. 0 or -1 */
int buffer_free(struct buffer *buffer);  /* a no-op when freed. 0 or -1 */

int64_t buffer_live_nbytes(void);
int64_t buffer_peak_nbytes(bool reset);

#endif
