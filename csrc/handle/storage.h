/* The storage of one flat parameter: this rank's shard, and the unsharded parameters while they are gathered.
 *
 *   local_shard --(upload)--> device_shard --(cast)--> this rank's part of copy->full --all-gather-->
 * copy->full SHARDED -> UNSHARDING -> UNSHARDED
 *
 * Where the shard lies elsewhere or in another precision it is brought to its place in what is gathered,
 * which the collective leaves as it is; otherwise the collective reads the shard.
 *
 * Invariants: the `full` of a precision copy keeps its tensor for ever, so every view and every tensor
 * autograd saved stays good when its storage is gathered again. `param_state` says what the storage of the
 * copy in use holds, and no other copy holds anything. UNSHARDING and UNSHARDED have storage; a collective is
 * in flight only while UNSHARDING. From lazy init on, entries of `attributes` are what is held here. */
#ifndef FSDP_HANDLE_STORAGE_H
#define FSDP_HANDLE_STORAGE_H

#include "handle/flat_param.h"
#include "kernels/kernels.h"
#include "kernels/table.h"
#include "torch/buffer.h"
#include "torch/freed_views.h"
#include "torch/pool.h"

enum param_state { PARAM_SHARDED, PARAM_UNSHARDING, PARAM_UNSHARDED, PARAM_STATES };

/* In which precision the unsharded parameters are. */
enum precision {
    PRECISION_COMPUTE, /* as mixed precision says */
    /* that of the shard, with gradients of the same: summon_full_params, FSDP_USE_FULL_PREC_IN_EVAL */
    PRECISION_FULL,
    PRECISIONS
};

/* The unsharded parameters in one precision, and how gradients of them look. */
struct precision_copy {
    PyObject *dtype, *reduce_dtype; /* owned; torch.dtype */
    enum dtype kind, reduce_kind;
    bool low_precision; /* not the dtype of the shard */
    /* NO_SHARD in the dtype of the shard: the local shard is the unsharded parameter */
    bool is_local;
    struct buffer full; /* unused when is_local */
    PyObject *own_part; /* owned; this rank's part of full, all of it under NO_SHARD */
    /* owned; only with low_precision and sharded: its memory is own_part's, this is never allocated */
    PyObject *low_precision_shard;
    PyObject *full_data; /* owned; full without right padding */
    /* owned; tuple, one per parameter over full; NULL until the copy is first wanted */
    PyObject *views;
    struct freed_views freed_views; /* of `views`, freed unless the copy is in use and UNSHARDED */
    int64_t *view_versions;         /* owned array; theirs, when they were last asked for */
    PyObject *snapshot;             /* owned; see [Note: snapshots of views], NULL: none */
    /* owned; freed tensors that say how gradients look, for torch_empty_like: padded size in reduce and
     * compute dtype, shard size in reduce dtype */
    PyObject *reduce_input_like, *gradient_like, *reduce_output_like;
};

struct storage {
    const struct flat_param *param; /* borrowed */
    enum param_state param_state;   /* written by storage_set_state */

    PyObject *fallback_dtypes;  /* owned; (param_dtype or None, reduce_dtype or None) as the user gave them */
    bool reduce_dtype_is_fixed; /* a low-precision hook reduces in its own dtype whatever it is given */
    /* the user asked for it; nothing is moved where computation is on the CPU too */
    bool may_offload;

    PyObject *orig_dtype; /* owned; torch.dtype of the shard; from lazy init on, as all below */
    enum dtype orig_kind;
    /* owned; 1-D, original dtype, shares storage with the sharded flat parameter */
    PyObject *local_shard;
    struct tensor_view local_view; /* borrowed from local_shard */
    /* [Note: offload] Where the shard lies in CPU memory and computation is elsewhere, a gather copies the
     * shard there first, and the reduced gradient is copied back before it is handed over: `offloaded`. */
    bool offload;
    bool shard_moved_off_device;        /* the user has moved the shard away from the device that computes */
    PyObject *shard_like;               /* owned; how the shard looks on the device that computes */
    struct tensor_view compute_view;    /* borrowed from shard_like: says where kernels run */
    const struct kernel_table *kernels; /* of that device */
    struct buffer device_shard;         /* only with offload; allocated while it is cast from */
    struct precision_copy copies[PRECISIONS];
    struct precision_copy *copy; /* borrowed; the one in use; written by storage.c */
    bool exposes_full_data;      /* the flat parameter's data is full_data */
    PyObject *unshard_work;      /* owned; the all-gather in flight */

    /* borrowed from the root; NULL without streams: memory is freed at once */
    struct deferred_free *full_free;
    struct pool *pool; /* borrowed from the root; where storage is taken from, or NULL */
    /* beside that of another flat parameter of the unit: their memory is given back together */
    bool is_segment;

    /* owned; the flat parameter's __dict__ once outside code asks for what torch has there, else NULL */
    PyObject *attributes;
};

/* Of several storages, one all-gather. */
struct unshard_batch {
    PyObject *outputs, *inputs; /* borrowed; lists of tensors */
};

/* 0 or -1; fini follows in any case */
int storage_init(struct storage *storage, const struct config *config);
void storage_fini(struct storage *storage);
int storage_visit(const struct storage *storage, visitproc visit, void *arg);

/* unshard.c: the only writer of param_state. 0, or -1 with RuntimeError naming the unit and both states. */
int storage_set_state(struct storage *storage, enum param_state state);
void storage_check(const struct storage *storage); /* the invariant, where FSDP_C_CHECK is defined */

/* ---- storage.c: the shard, after the flat parameter as it is now ---- */

int storage_read_shard(struct storage *storage);             /* its dtype and data. 0 or -1 */
PyObject *storage_copy_shard(const struct storage *storage); /* new reference, where the shard is */
/* after that: the device that computes, and the precision copies. 0 or -1 */
int storage_follow_shard(struct storage *storage);
/* The user has moved the shard to another device: nothing is kept for it on the one it has left. 0 or -1 */
int storage_leave_device(struct storage *storage);

/* Streams and memory of a root, or NULL for none: memory is then freed at once. */
void storage_share(struct storage *storage, struct deferred_free *full, struct pool *pool, bool is_segment);

const struct kernel_stream *storage_stream(const struct storage *storage); /* where its kernels run now */
/* One of the kernels over contiguous elements, of as many as `input` has; `what`: for its error. 0 or -1 */
int storage_apply(const struct storage *storage, elementwise_kernel *kernel, PyObject *output,
                  PyObject *input, double divisor, const char *what);
/* With streams: what was enqueued on the current one comes after `*work` at once, so that an event recorded
 * there covers a backend that has a stream of its own. 0, or -1 and *work is NULL. */
int storage_wait_in_stream(const struct storage *storage, PyObject **work);

/* ---- storage.c: attributes that outside code reads on the flat parameter, under the names torch gives them
 * (B-011, B-023, B-024); nothing is read back. 0 or -1 ---- */

int storage_publish_attributes(struct storage *storage); /* from now on */
int storage_update_attributes(struct storage *storage);  /* after lazy init; a no-op before they have begun */
int storage_set_attribute(const struct storage *storage, const char *name, PyObject *value); /* NULL: none */

/* the invariant of them, where FSDP_C_CHECK is defined */
void storage_check_attributes(const struct storage *storage);

/* ---- storage.c, precision copies: the only writer of `copy` and of what copies are made of ---- */

/* while SHARDED: it is in use from now on. 0 or -1 */
int storage_use_copy(struct storage *storage, enum precision precision);
/* others, without history, take the place of all. 0 or -1 */
int storage_detach_views(struct storage *storage);
/* also for copies that are yet to be made. 0 or -1 */
int storage_fix_reduce_dtype(struct storage *storage, PyObject *dtype);
bool storage_has_mixed_precision(const struct storage *storage);

/* Frees what is gathered. Memory that an array of numpy or another process shares stays theirs: tensor and
 * views are moved to memory of their own first, as they are the same for ever. 0 or -1 */
int storage_free_full(struct storage *storage);

/* Has the user written in place to what stands for a parameter in full, since this was last asked? 1, 0 or
 * -1. */
int storage_pop_written(const struct storage *storage, int64_t param);

/* [Note: snapshots of views] A write through `.data` counts in no version, and after a forward that leaves
 * views the user may write to the shard as well as to them: a difference between the two does not say where.
 * So where a script walks over the parameters and finds views, this rank's part of them is copied, and compared
 * with the copy when the views go. */
int storage_take_snapshot(struct storage *storage); /* of UNSHARDED parameters; a no-op with one. 0 or -1 */
void storage_drop_snapshot(struct storage *storage);

static inline enum precision storage_precision(const struct storage *storage) {
    return (enum precision)(storage->copy - storage->copies);
}

/* ---- unshard.c ---- */

/* -1 with RuntimeError where `tensor` is a view of a copy, which has no values now. 0: it is none */
int storage_refuse_freed_view(const struct storage *storage, const PyObject *tensor);
/* where storage_needs_pre_unshard: take the memory, and bring the shard to its place there. 0, or -1 and all is freed */
int storage_pre_unshard(struct storage *storage);
/* while SHARDED, after that: start the all-gather. 0, or -1 and all is freed */
int storage_unshard(struct storage *storage);
/* The same for several storages: each is added to a batch, then all learn what was enqueued for it. 0, or -1
 * and all is freed */
int storage_unshard_add(struct storage *storage, struct unshard_batch *batch);
int storage_unshard_started(struct storage *storage, PyObject *work);
/* the unsharded parameter is there; a no-op unless UNSHARDING */
int storage_wait_unshard(struct storage *storage);
int storage_reshard(struct storage *storage, bool free_storage);
/* what a gather that failed has left; an exception stays set */
void storage_abandon_unshard(struct storage *storage);
/* Does an all-gather read what storage_pre_unshard makes, and not the shard itself? */
bool storage_needs_pre_unshard(const struct storage *storage);
/* alone, for a caller who gathers in steps; SHARDED stays */
int storage_alloc_unsharded(struct storage *storage);
/* Gives back what storage_alloc_unsharded took, while SHARDED, so that the pool holds it. 0 or -1. */
int storage_release_reserved(struct storage *storage);
int64_t storage_unsharded_nbytes(const struct storage *storage);
bool storage_needs_alloc(const struct storage *storage); /* SHARDED, and gathering would allocate */

#endif
