/* Storage of one flat parameter: this rank's shard, and the unsharded parameters of each precision.
 *
 *   local_shard --upload--> device_shard --cast--> copy->own_part   if offloaded or of another dtype
 *   local_shard or copy->own_part --all-gather--> copy->full
 *
 *   SHARDED --storage_unshard--> UNSHARDING --storage_wait_unshard--> UNSHARDED --storage_reshard--> SHARDED
 *
 * An offloaded or cast shard is written to its own place in `full` (`own_part`), and the all-gather reads it
 * there.
 *
 * Invariants: `full` of a precision copy keeps its tensor; only the storage under it is freed and
 * reallocated, so views and tensors saved by autograd stay valid. `param_state` describes the storage of the
 * copy in use; no other copy has storage. UNSHARDING and UNSHARDED have storage, and a collective is in
 * flight only while UNSHARDING. Entries of `attributes` match the fields from lazy init on. */
#ifndef FSDP_HANDLE_STORAGE_H
#define FSDP_HANDLE_STORAGE_H

#include "handle/flat_param.h"
#include "kernels/kernels.h"
#include "kernels/table.h"
#include "torch/buffer.h"
#include "torch/freed_views.h"
#include "torch/pool.h"

enum param_state { PARAM_SHARDED, PARAM_UNSHARDING, PARAM_UNSHARDED, PARAM_STATES };

/* Precision of the unsharded parameters. */
enum precision {
    PRECISION_COMPUTE, /* mixed precision's dtypes */
    /* precision of the shard, for parameters and gradients: summon_full_params, FSDP_USE_FULL_PREC_IN_EVAL */
    PRECISION_FULL,
    PRECISIONS
};

/* Unsharded parameters in one precision, and templates for their gradients. */
struct precision_copy {
    PyObject *dtype, *reduce_dtype; /* owned; torch.dtype */
    enum dtype kind, reduce_kind;
    bool low_precision; /* true if `dtype` differs from the shard's */
    /* true under NO_SHARD in the dtype of the shard: the local shard is the unsharded parameter */
    bool is_local;
    struct buffer full; /* unused if is_local */
    PyObject *own_part; /* owned; this rank's part of `full`, all of it under NO_SHARD */
    /* owned, only if low_precision and sharded; never allocated: a stand-in for torch's _mp_shard, whose
     * memory is own_part */
    PyObject *low_precision_shard;
    PyObject *full_data; /* owned; `full` without right padding */
    /* owned; tuple with one view of `full` per parameter; NULL until the copy is first used */
    PyObject *views;
    struct freed_views freed_views; /* `views`, marked as freed unless the copy is in use and UNSHARDED */
    int64_t *view_versions;         /* owned array; versions of `views` at the last storage_pop_written */
    PyObject *snapshot;             /* owned, or NULL; see [Note: snapshots of views] */
    /* owned; freed tensors, templates for torch_empty_like: padded size in reduce and compute dtype, shard
     * size in reduce dtype */
    PyObject *reduce_input_like, *gradient_like, *reduce_output_like;
};

struct storage {
    const struct flat_param *param; /* borrowed */
    enum param_state param_state;   /* written by storage_set_state */

    PyObject *fallback_dtypes;  /* owned; the user's (param_dtype or None, reduce_dtype or None) */
    bool reduce_dtype_is_fixed; /* true if a low-precision hook fixes the reduce dtype */
    /* true if the user requested offload; no effect if the compute device is the CPU */
    bool may_offload;

    /* owned; torch.dtype of the shard; set by lazy init, like all fields below */
    PyObject *orig_dtype;
    enum dtype orig_kind;
    /* owned; 1-D, shares storage with the sharded flat parameter */
    PyObject *local_shard;
    struct tensor_view local_view; /* borrowed from local_shard */
    /* [Note: offload] The shard is in CPU memory and the compute device is another one: an unshard uploads
     * the shard first, and the reduced gradient is downloaded to `grads->offloaded` before it is exposed. */
    bool offload;
    bool shard_moved_off_device;        /* true if the user moved the shard away */
    PyObject *shard_like;               /* owned; template of the shard on the compute device */
    struct tensor_view compute_view;    /* borrowed from shard_like; device on which kernels run */
    const struct kernel_table *kernels; /* kernels of the compute device */
    struct buffer device_shard;         /* used only with offload; allocated during the cast */
    struct precision_copy copies[PRECISIONS];
    struct precision_copy *copy; /* borrowed; the copy in use, written by storage.c */
    bool exposes_full_data;      /* true if the flat parameter's data is full_data */
    PyObject *unshard_work;      /* owned; the all-gather in flight */

    /* borrowed from the root; NULL without streams: memory is freed at once */
    struct deferred_free *full_free;
    struct pool *pool; /* borrowed from the root, or NULL; pool of unsharded storage */
    /* true for the storage of a segment, whose memory is released together with the unit's */
    bool is_segment;

    /* owned; the flat parameter's __dict__ once torch's attributes are published, else NULL */
    PyObject *attributes;
};

/* Arguments of one all-gather for several storages. */
struct unshard_batch {
    PyObject *outputs, *inputs; /* borrowed; lists of tensors */
};

/* Return 0, or -1 with an exception. Call storage_fini in either case. */
int storage_init(struct storage *storage, const struct config *config);
void storage_fini(struct storage *storage);

/* unshard.c. Write param_state; the only function that does. Return 0, or -1 with RuntimeError that names the
 * unit and both states. */
int storage_set_state(struct storage *storage, enum param_state state);
void storage_check(const struct storage *storage); /* assert the invariant under FSDP_C_CHECK */

/* ---- storage.c: the shard. Return 0, or -1 with an exception ---- */

/* Read dtype and data of the flat parameter. */
int storage_read_shard(struct storage *storage);
/* Set up compute device and precision copies after storage_read_shard. */
int storage_follow_shard(struct storage *storage);

/* Bind the storage to a root's streams and pool. NULL: memory is freed at once. */
void storage_share(struct storage *storage, struct deferred_free *full, struct pool *pool, bool is_segment);
/* Free memory that waits for its last use on the root's streams, and unbind from the root. Call before the
 * root is freed. */
void storage_leave_root(struct storage *storage);

/* Current stream of the compute device. */
const struct kernel_stream *storage_stream(const struct storage *storage);
/* Run an elementwise kernel over contiguous tensors of `input`'s size. `operation` is its name in errors.
 * Return 0 or -1. */
int storage_apply(const struct storage *storage, elementwise_kernel *kernel, PyObject *output,
                  PyObject *input, double divisor, const char *operation);
/* Make the current stream wait for `*work`, if there are streams, so that an event recorded on the stream
 * also covers the work of a backend that has its own stream. Return 0, or -1 with *work NULL. */
int storage_wait_in_stream(const struct storage *storage, PyObject **work);

/* ---- storage.c: attributes that libraries read on torch's FlatParameter, under torch's names (_local_shard,
 * _full_param_padded ...). Writes to them are ignored. Return 0, or -1 with an exception ---- */

int storage_publish_attributes(struct storage *storage); /* publish and keep up to date */
int storage_update_attributes(struct storage *storage);  /* no-op before the first publish */
/* NULL removes the attribute */
int storage_set_attribute(const struct storage *storage, const char *name, PyObject *value);

/* ---- storage.c: precision copies, the only writer of `copy` and its fields. Return 0, or -1 with an
 * exception ---- */

/* Select the copy in use, while SHARDED. */
int storage_use_copy(struct storage *storage, enum precision precision);
/* Replace all views by views without autograd history. */
int storage_detach_views(struct storage *storage);
/* Set the reduce dtype of all copies, also of those made later. */
int storage_fix_reduce_dtype(struct storage *storage, PyObject *dtype);

/* Free the storage of the copy in use. A numpy array or another process that shares the memory keeps it:
 * tensor and views move to new memory first. */
int storage_free_full(struct storage *storage);

/* Return 1 if the user has written in place to the parameter's view since the last call, 0 if not, -1 with an
 * exception. */
int storage_pop_written(const struct storage *storage, int64_t param);

/* [Note: snapshots of views] A write through `.data` increments no version. After a forward that keeps views
 * exposed, the user may write to the shard or to the views, so a difference between the two does not show the
 * newer one. When a script iterates over the parameters and finds views, this rank's part of them is cloned,
 * and compared with the clone before the views are freed. */
int storage_take_snapshot(struct storage *storage); /* UNSHARDED only; no-op if there is one. 0 or -1 */
void storage_drop_snapshot(struct storage *storage);

static inline enum precision storage_precision(const struct storage *storage) {
    return (enum precision)(storage->copy - storage->copies);
}

/* ---- unshard.c ---- */

/* Raise RuntimeError and return -1 if `tensor` is a freed view of some copy. Return 0 otherwise. */
int storage_refuse_freed_view(const struct storage *storage, const PyObject *tensor);
/* Allocate `full` and write the shard to own_part. No-op unless storage_needs_pre_unshard. Return 0, or -1
 * with all memory freed. */
int storage_pre_unshard(struct storage *storage);
/* Start the all-gather, while SHARDED and after storage_pre_unshard, or add its tensors to a batch, in which
 * case the caller starts the batch and calls storage_unshard_started. `batch` may be NULL. Return 0, or -1
 * with all memory freed. */
int storage_unshard(struct storage *storage, struct unshard_batch *batch);
/* Record the all-gather's work, NULL without one. Return 0, or -1 with all memory freed. */
int storage_unshard_started(struct storage *storage, PyObject *work);
/* Make the current stream wait for the all-gather. No-op unless UNSHARDING. Return 0 or -1. */
int storage_wait_unshard(struct storage *storage);
int storage_reshard(struct storage *storage, bool free_storage);
/* Free the memory of a failed unshard. The current exception is kept. Return -1. */
int storage_abandon_unshard(struct storage *storage);
/* Return true if the all-gather reads own_part, which storage_pre_unshard writes, instead of the shard. */
bool storage_needs_pre_unshard(const struct storage *storage);
/* Allocate `full`; the state stays SHARDED. Return 0 or -1. */
int storage_alloc_unsharded(struct storage *storage);

#endif
