/* A tensor whose storage is freed and allocated again, while the tensor object and all views of it stay the
 * same.
 *
 * Invariant: `allocated` is true while the storage has its full size; view.data is valid only then. The data
 * of a counted buffer is guarded while its storage is freed or held by a struct deferred_free. The live and
 * peak byte counts of the process cover every counted buffer: tests assert the memory bounds of each sharding
 * strategy by them. */
#ifndef FSDP_TORCH_BUFFER_H
#define FSDP_TORCH_BUFFER_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stdbool.h>
#include <stdint.h>

#include "kernels/kernels.h"
#include "torch/data_guard.h"
#include "torch/stream.h"

struct buffer {
    PyObject *tensor;        /* owned; 1-D; NULL before buffer_init */
    PyObject *resize;        /* owned; bound method resize_ of the storage */
    PyObject *full_nbytes;   /* owned; int, the argument of resize_ */
    struct data_guard guard; /* used by counted buffers only */
    struct tensor_view view; /* borrowed from tensor; data is NULL while freed */
    int64_t numel;
    int64_t nbytes;
    bool allocated;
    bool counted;             /* true for unsharded parameters: part of the live and peak byte counts */
    struct buffer *next_held; /* borrowed; next in the list of a struct deferred_free */
};

/* Create the tensor with its storage allocated, as the creation of views requires. 0 or -1. */
int buffer_init(struct buffer *buffer, int64_t numel, PyObject *dtype, PyObject *device, bool counted);
void buffer_fini(struct buffer *buffer);

/* Return 1 if the storage cannot be resized because an array or a process shares its memory (numpy(),
 * share_memory_()), else 0; -1 with an exception. */
int buffer_is_exported(const struct buffer *buffer);
/* Replace the storage under the same tensor object. Other tensors keep the old storage. 0 or -1. */
int buffer_replace_storage(struct buffer *buffer);

/* Allocate the storage, with undefined contents; no effect when allocated. 0 or -1. */
int buffer_alloc(struct buffer *buffer);
int buffer_free(struct buffer *buffer); /* Free the storage; no effect when freed. 0 or -1. */

int64_t buffer_live_nbytes(void);
int64_t buffer_peak_nbytes(bool reset);

/* [Note: deferred frees] The last use of a unit's buffers is enqueued on one stream and may not have run when
 * they are freed. Their memory is held until the stream that allocated it, and allocates from it again, waits
 * for that use.
 *
 *   COMPUTE   | forward(i-1) | last use | forward(i)     | last use |
 *   UNSHARD       all-gather(i)         | wait for i-1 | all-gather(i+1), into the memory of i-1
 *
 * Invariant: memory returns to the allocator only after its owner stream waits for the last use. A forward
 * holds one unit: without one, all-gather(i+1) would wait for forward(i), whose memory was freed last, and
 * nothing would overlap. A backward holds none: each post-backward flushes the buffers that it freed.
 * `last_use` covers all held buffers. */
struct deferred_free {
    struct streams *streams; /* borrowed */
    enum stream_role owner;  /* stream that allocates the memory */
    enum stream_role writer; /* stream that may write to the memory first */
    enum stream_role user;   /* stream of the last use */
    struct buffer *held;     /* borrowed; head of the list of held buffers, or NULL */
    stream_event last_use;   /* destroyed with the streams */
};

/* Hold `buffer` instead of freeing it. The held buffers are freed first, unless of the `same_unit`. 0 or
 * -1. */
int deferred_free_add(struct deferred_free *deferred, struct buffer *buffer, bool same_unit);
/* Free all held buffers. 0 or -1. */
int deferred_free_flush(struct deferred_free *deferred);
/* Stop holding `buffer`, which keeps its memory; no effect when it is not held. 0 or -1. */
int deferred_free_reclaim(struct deferred_free *deferred, struct buffer *buffer);
/* Free all held buffers if `buffer` is one of them; call before it is destroyed or reallocated. 0 or -1. */
int deferred_free_flush_buffer(struct deferred_free *deferred, struct buffer *buffer);
/* Return true if `buffer` is held; false when `deferred` is NULL. */
static inline bool deferred_free_holds(const struct deferred_free *deferred, const struct buffer *buffer) {
    const struct buffer *held = deferred ? deferred->held : NULL;
    while (held && held != buffer)
        held = held->next_held;
    return held;
}

#endif
