/* Gradients of one unit, from autograd to the optimizer.
 *
 *   gradients of views --> pending (+ sum) --pack, cast, pre-divide--> reduce_input
 *     --reduce-scatter--> reduce_output --post-divide, accumulate--> saved_shard --expose--> .grad
 *   under no_sync: pending (+ sum) --> unsharded --expose--> .grad
 *
 * Invariants: `kind` describes the flat parameter's `.grad` between backwards. During a backward `kind` is
 * never GRAD_SHARDED: the accumulated shard is stashed in saved_shard. While a reduction is in flight
 * (`work`), its output is alive. While `watched` is set, `kind` is GRAD_SHARDED, and the flat parameter's
 * `.grad` is freed with the last view of it that a parameter exposes, so that zero_grad() frees memory. */
#ifndef FSDP_HANDLE_GRADS_H
#define FSDP_HANDLE_GRADS_H

#include "handle/storage.h"

/* Kind of gradient in flat_param.grad and the parameters' .grad between backwards. */
enum grad_kind { GRAD_NONE, GRAD_SHARDED, GRAD_UNSHARDED, GRAD_KINDS };

/* A user's communication hook; reduce.c. */
struct comm_hook {
    PyObject *function;            /* owned, or NULL */
    PyObject *state;               /* owned */
    bool native;                   /* true for torch's low-precision hooks, run by this library */
    struct collective_group group; /* process group in the state of a native hook, read at each reduction */
};

struct grads {
    const struct flat_param *param; /* borrowed */
    /* borrowed; compute device and templates */
    const struct storage *storage;

    enum grad_kind kind; /* written by grads_set_kind */
    /* owned; tuple (context, a gradient or None per parameter): the latest contribution */
    PyObject *pending;
    /* owned; sum of earlier contributions in this backward; compute dtype, padded unsharded size */
    PyObject *sum;
    /* owned; gradient accumulated under no_sync; compute dtype, padded unsharded size */
    PyObject *unsharded;
    /* owned; during a backward: the reduced shard, or the accumulated one that the reduced shard will be
     * added to */
    PyObject *saved_shard;
    /* owned; saved_shard in CPU memory under offload, valid once the host has synchronised with the device */
    PyObject *offloaded;
    PyObject *reduce_input, *reduce_output; /* owned; alive while `work` is in flight */
    PyObject *cast_output; /* owned, or NULL; the output cast to the shard's dtype, if that differs */
    /* owned, or NULL; memory of reduce_input, kept alive because a user's hook may set reduce_input.data */
    PyObject *hook_input;
    PyObject *work; /* owned; the reduce-scatter in flight */
    /* true if hooks of the flat parameter have replaced the received contributions by an unsharded
     * gradient */
    bool hooked;
    bool unreduced; /* true until the no_sync gradient is reduced */
    /* true if some trainable parameter does not expose its part: .grad was cleared, or the parameter was
     * frozen */
    bool has_unexposed_grads;
    bool in_backward; /* true from the first pre-backward to grads_expose */
    /* owned; weak reference to the .grad of a parameter, or NULL */
    PyObject *watched;
    /* owned; list with the stashed .grad of each parameter, True if it is part of the reduction, or None;
     * NULL outside of a backward */
    PyObject *stashed;
    int64_t watched_param;    /* index of the parameter whose .grad is watched */
    PyObject *watch_callback; /* owned; weak reference callback */

    /* factors in effect: those of a native hook's state, 1 with a custom hook */
    double predivide, postdivide;
    struct comm_hook comm_hook;
    bool has_param_hooks; /* result of the last search for hooks on the flat parameter */
    PyObject *hooks_seen; /* owned; id of torch's latest hook at that search */
    /* owned, or NULL; (_backward_hooks, _post_accumulate_grad_hooks), stashed so that autograd does not call
     * them */
    PyObject *stashed_hooks;

    /* set by lazy init */
    struct pack_source *sources; /* owned scratch: one per parameter, with constant offsets and strides */
    PyObject *shard_sizes;       /* owned; list of sizes that split the shard into parameters and gaps */
    int64_t *shard_pieces;       /* owned; index of each parameter in that split, or -1 */
};

/* ---- grads.c ---- */

void grads_init(struct grads *grads, const struct config *config);
void grads_fini(struct grads *grads);
int grads_lazy_init(struct grads *grads); /* call after storage_follow_shard. Returns 0 or -1 */

/* ---- receive: grads.c ---- */

/* Return the slot of the gradient accumulated by earlier backwards, to which this one adds. */
PyObject **grads_accumulator(struct grads *grads);
bool grads_have_received(const struct grads *grads);
/* Receive a contribution: the arguments of the node's backward. Return 0 or -1. */
int grads_receive(struct grads *grads, PyObject *args);
/* Return a contribution as a flat gradient, for torch.autograd.grad(): new tensor, None without any gradient,
 * or NULL. */
PyObject *grads_flat_of(struct grads *grads, PyObject *args);
/* Receive zeros, unless there is something to pack already. Return 0 or -1. */
int grads_receive_zeros(struct grads *grads);
/* param_hooks.c: hooks on the flat parameter, see [Note: hooks of the flat parameter]. Stash them during a
 * backward, and restore them afterwards. Return 0 or -1. */
int grads_stash_param_hooks(struct grads *grads);
int grads_restore_param_hooks(struct grads *grads);
/* Call the hooks with the contributions received since the last call. The hooks may leave no gradient. No-op
 * without hooks. Return 0 or -1. */
int grads_call_param_hooks(struct grads *grads);
void grads_discard(struct grads *grads); /* drop all gradients of this backward, after an exception */

/* ---- pack and reduce: reduce.c. Return 0, or -1 with an exception ---- */

/* Register a communication hook. `native`: a low-precision hook of torch. */
void grads_set_comm_hook(struct grads *grads, PyObject *function, PyObject *state, bool native);
/* Raise RuntimeError for a gradient that cannot be packed. Return -1. */
int grads_refuse(const struct grads *grads, int64_t index);
int grads_add_pending(struct grads *grads, PyObject *output); /* output += pending */
/* Return the sum of all contributions, padded, and drop them. New reference, or NULL. */
PyObject *grads_take_received(struct grads *grads);
/* Pack the contributions and the no_sync gradient into the reduction's input. */
int grads_pack(struct grads *grads);
/* Pack a single contribution in one pass, on the current stream. The caller owns the source of the pass,
 * `*packed`, until the pass is over. */
int grads_pack_on_side_stream(struct grads *grads, PyObject **packed);
/* Add the contributions to the no_sync gradient. */
int grads_accumulate_unsharded(struct grads *grads);
/* Allocate the tensor that becomes the user's gradient. Called on the compute stream, which uses and frees
 * that memory, before the stream's event for the reduction. */
int grads_alloc_output(struct grads *grads);
/* Allocate the reduction's input in memory of the current stream, before grads_pack_on_side_stream. */
int grads_alloc_reduce_input(struct grads *grads);
/* Return the input's size; 0 with a custom hook, which may keep a reference to the input. */
int64_t grads_reduce_input_nbytes(const struct grads *grads);
int grads_reduce(struct grads *grads); /* start the reduction of the packed gradient */
/* Make the current stream wait for the reduction. Then all-reduce over the replicas, if
 * grads_reduce_twice. */
int grads_wait_reduce(struct grads *grads);
/* Post-divide, accumulate into saved_shard, and download under offload. Called after grads_wait_reduce. */
int grads_save_reduced(struct grads *grads);
/* Return true for a reduce-scatter in the shard group followed by an all-reduce over the replicas. */
bool grads_reduce_twice(const struct grads *grads);
/* Return the reduction's output after grads_save_reduced, so that the caller can free it later; NULL if it is
 * the gradient. */
PyObject *grads_take_reduce_output(struct grads *grads);
/* Free the input once all of its readers are enqueued on its stream. A custom hook's input is kept. */
void grads_release_reduce_input(struct grads *grads);
/* Free the input and output after grads_save_reduced. */
void grads_reduce_release(struct grads *grads);

/* ---- expose as .grad: grads.c. Return 0, or -1 with an exception ---- */

void grads_unwatch(struct grads *grads); /* the handle is freed: ignore the end of the watched .grad */
int grads_expose(struct grads *grads);   /* make saved_shard or the no_sync gradient the .grad */
/* Set the original parameters' .grad to their parts of flat_param.grad. */
int grads_expose_flat_grad(struct grads *grads);
/* Set the original parameters' .grad to views of a full flat gradient, or to None. */
int grads_expose_full_grad(struct grads *grads, PyObject *grad);
/* Record that a parameter's .grad is None, so that the next backward exposes it again. */
int grads_mark_unexposed(struct grads *grads, int64_t index);
/* Follow a move of shard and flat_param.grad to another dtype or device. */
int grads_move(struct grads *grads);

/* ---- accumulated gradients: grads.c ---- */

/* Write `kind`; the only function that does. Return 0, or -1 with RuntimeError that names the unit and both
 * kinds. */
int grads_set_kind(struct grads *grads, enum grad_kind kind);
void grads_check(const struct grads *grads); /* assert the invariant under FSDP_C_CHECK */

/* Begin a backward, at the first pre-backward: stash a sharded .grad, to accumulate onto. Return 0 or -1. */
int grads_begin_backward(struct grads *grads);
/* Set .grad to None where it is the no_sync gradient, during a backward. Return 0 or -1. */
int grads_unexpose_unsharded(struct grads *grads);
int grads_restore_stashed(struct grads *grads); /* call after an exception. Returns 0 or -1 */
/* Add gradients that autograd itself has accumulated into .grad during this backward to *shard; NULL counts
 * as zeros. Return 0 or -1. Without `shard`: return 1 if there are any, 0 or -1. */
int grads_add_from_autograd(struct grads *grads, PyObject **shard);
/* Drop the accumulated gradient, which the user has cleared. Return 0 or -1. */
int grads_clear_accumulated(struct grads *grads);
/* Zero this parameter's part of the shard that was reduced before no_sync. Return 0 or -1. */
int grads_zero_reduced(struct grads *grads, int64_t index);
/* Set the flat parameter's .grad to zeros of the shard. New reference, or NULL. */
PyObject *grads_zeros(struct grads *grads);
/* Return the sharded gradient of this backward as reduced so far, or .grad. New reference. */
PyObject *grads_sharded(const struct grads *grads);
/* Return the offset of a parameter's gradient in the flat gradient, or -1; and the view of it in the
 * parameter's shape. */
int64_t grads_offset(const struct grads *grads, int64_t index);
PyObject *grads_part(const struct grads *grads, PyObject *flat_grad, int64_t index);
/* Return a copy of `input` in the shard's dtype on the compute device. New reference. */
PyObject *grads_cast_to_shard_dtype(struct grads *grads, PyObject *input);
int grads_is_zero(PyObject *values); /* 1 if all elements are zero, 0 or -1 */

#endif
