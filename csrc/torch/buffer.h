/* A tensor whose storage comes and goes while the tensor object, and every view of it, stays the same.
 *
 * Invariant: `allocated` says whether the storage has its full size; `data` is valid only then. The data of
 * a counted buffer is guarded while it is freed, or held back by a struct deferred_free. The live and
 * peak byte counts of this process cover every counted buffer, so that a test can hold the runtime to what a
 * strategy promises. */
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
    PyObject *resize;        /* owned; the storage's bound resize_ */
    PyObject *full_nbytes;   /* owned; int */
    struct data_guard guard; /* of a counted buffer */
    struct tensor_view view; /* borrowed from tensor; data is NULL while freed */
    int64_t numel;
    int64_t nbytes;
    bool allocated;
    bool counted;
    struct buffer *next_held; /* borrowed; in the list of a struct deferred_free */
};

/* Create the tensor with its storage allocated, so that views of it can be made; buffer_free follows.
 * `counted` buffers enter the live and peak byte counts: those that hold unsharded parameters. 0 or -1. */
int buffer_init(struct buffer *buffer, int64_t numel, PyObject *dtype, PyObject *device, bool counted);
void buffer_fini(struct buffer *buffer);

/* Whether a freed buffer's memory stays with an array or a process that shares it: numpy(), share_memory_().
 * Such a storage cannot be resized. 1, 0 or -1 */
int buffer_is_exported(const struct buffer *buffer);
/* The same tensor, over new memory. Tensors that share the old memory keep it. 0 or -1 */
int buffer_replace_storage(struct buffer *buffer);

int buffer_alloc(struct buffer *buffer); /* a no-op when allocated; contents undefined otherwise. 0 or -1 */
int buffer_free(struct buffer *buffer);  /* a no-op when freed. 0 or -1 */

int64_t buffer_live_nbytes(void);
int64_t buffer_peak_nbytes(bool reset);

/* [Note: deferred frees] The buffers of one unit, whose last use is enqueued on one stream and may not have
 * run yet: their memory is held back until the stream that took it, and takes it again, waits for that use.
 *
 *   COMPUTE   | forward(i-1) |last use| forward(i) |last use|
 *   UNSHARD          gather(i)        |wait for i-1| gather(i+1), into the memory of i-1
 *
 * Invariant: memory goes back to the allocator only once its owner waits for its last use. In forward one
 * unit's is held: with none, gather(i+1) would wait for forward(i), the last to give memory back, and nothing
 * would overlap. In backward none stays held: each unit's post-backward flushes what it has freed. `last_use`
 * is that of all that is held. */
struct deferred_free {
    struct streams *streams; /* borrowed */
    enum stream_role owner;  /* took the memory */
    enum stream_role writer; /* is the first to write to it, perhaps */
    enum stream_role user;   /* uses it last */
    struct buffer *held;     /* borrowed, the first of a list, or NULL; forgotten before it ends */
    stream_event last_use;   /* destroyed with the streams */
};

/* Free what was held before, and hold `buffer` from now on; same_unit it, where they are one unit's. 0 or -1. */
int deferred_free_add(struct deferred_free *deferred, struct buffer *buffer, bool same_unit);
/* Free what is held. 0 or -1. */
int deferred_free_flush(struct deferred_free *deferred);
/* `buffer` is wanted again: its memory is handed over as it is, if it is held. 0 or -1. */
int deferred_free_reclaim(struct deferred_free *deferred, struct buffer *buffer);
/* `buffer` ends, or is to be taken anew: its memory goes, if it is held. 0 or -1. */
int deferred_free_flush_buffer(struct deferred_free *deferred, struct buffer *buffer);
/* without one: no */
static inline bool deferred_free_holds(const struct deferred_free *deferred, const struct buffer *buffer) {
    const struct buffer *held = deferred ? deferred->held : NULL;
    while (held && held != buffer)
        held = held->next_held;
    return held;
}

#endif
