/* The gradients of one unit, on their way from autograd to the optimizer.
 *
 *   views' gradients --> pending (+ sum) --pack, cast, pre-divide--> reduce_input
 *     --reduce-scatter--> reduce_output --post-divide, accumulate--> saved_shard --hand over--> .grad
 *   under no_sync: pending (+ sum) --> unsharded --> .grad
 *
 * Invariants: `kind` says what the flat parameter's `.grad` holds between backwards; amid a backward it is
 * never GRAD_SHARDED, as that is set aside in saved_shard. While a reduction is in flight (`work`), its
 * output is alive. While `shown` is there, `kind` is GRAD_SHARDED, and the flat parameter's `.grad` goes with
 * the last view of it that a parameter shows (parity 36). */
#ifndef FSDP_HANDLE_GRADS_H
#define FSDP_HANDLE_GRADS_H

#include "handle/storage.h"

/* Which gradients flat_param.grad and the parameters' .grad hold between backwards. */
enum grad_kind { GRAD_NONE, GRAD_SHARDED, GRAD_UNSHARDED, GRAD_KINDS };

/* The user's own way to reduce gradients; reduce.c. */
struct comm_hook {
    PyObject *function;            /* owned; NULL when there is none */
    PyObject *state;               /* owned */
    bool native;                   /* one of torch's low-precision hooks, run by this library */
    struct collective_group group; /* of a native hook's state, read at each reduction */
};

struct grads {
    const struct flat_param *param; /* borrowed */
    /* borrowed; how the shard and the parameters look, and where they are computed with */
    const struct storage *storage;

    enum grad_kind kind; /* written by grads_set_kind */
    /* owned; tuple: (context, a gradient or None per parameter), the latest contribution */
    PyObject *pending;
    /* owned; earlier contributions of this backward, compute dtype, padded unsharded size */
    PyObject *sum;
    /* owned; left by no_sync in earlier backwards, compute dtype, padded unsharded size */
    PyObject *unsharded;
    /* owned; the reduced shard of this backward, or the previous one to accumulate onto */
    PyObject *saved_shard;
    /* owned; with offload: saved_shard in CPU memory, once the device has been waited for */
    PyObject *offloaded;
    PyObject *reduce_input, *reduce_output; /* owned; alive while `work` is in flight */
    PyObject *cast_output; /* owned; what the output is cast to, where its dtype is another; or NULL */
    /* owned; reduce_input's memory, as a hook of the user's may give it other data; or NULL */
    PyObject *hook_input;
    PyObject *work; /* owned; the reduce-scatter in flight */
    /* hooks of the flat parameter have made an unsharded gradient of what was received */
    bool hooked;
    bool unreduced; /* what no_sync left has not been reduced yet */
    /* a parameter that is trained shows nothing of it: it was cleared, or frozen till now */
    bool has_unexposed_grads;
    bool in_backward; /* from the first pre-backward to the hand-over: saved_shard is not in .grad */
    /* owned; a weak reference to the .grad of a parameter; NULL where no memory goes with them */
    PyObject *watched;
    PyObject *stashed; /* owned; list: what parameters showed of earlier backwards, True where that has been
                          * packed, or None; NULL outside of one */
    int64_t watched_param;    /* of which parameter */
    PyObject *watch_callback; /* owned; what it calls once that is gone */

    double predivide, postdivide; /* in effect: those of a native hook's state, 1 with another hook */
    struct comm_hook comm_hook;
    bool has_param_hooks; /* hooks were found on the flat parameter when it was looked at last, */
    PyObject *hooks_seen; /* owned; which was after torch's hook of this number */
    /* owned; (_backward_hooks, _post_accumulate_grad_hooks) while autograd is not to find them, or NULL */
    PyObject *stashed_hooks;

    /* from lazy init on */
    struct pack_source *sources; /* owned scratch: one per parameter, offsets and strides filled once */
    PyObject *shard_sizes;       /* owned; list of the sizes of the shard's pieces, for one split */
    int64_t *shard_pieces;       /* owned; per parameter the index of its piece, or -1 */
};

/* ---- grads.c ---- */

void grads_init(struct grads *grads, const struct config *config);
void grads_fini(struct grads *grads);
int grads_visit(const struct grads *grads, visitproc visit, void *arg);
int grads_lazy_init(struct grads *grads); /* after the storage's. 0 or -1 */

/* ---- received: grads.c ---- */

/* What earlier backwards left and this one adds to. */
PyObject **grads_accumulator(struct grads *grads);
bool grads_have_received(const struct grads *grads);
/* one contribution: the arguments of the node's backward */
int grads_receive(struct grads *grads, PyObject *args);
/* A contribution as it is, for autograd itself: new tensor, None where there is no gradient, or NULL. */
PyObject *grads_flat_of(struct grads *grads, PyObject *args);
/* where nothing is to be packed yet: zeros. 0 or -1 */
int grads_receive_zeros(struct grads *grads);
/* param_hooks.c: the user's hooks, see [Note: hooks of the flat parameter]. Autograd finds none of them; it does again. 0 or
 * -1 */
int grads_stash_param_hooks(struct grads *grads);
int grads_restore_param_hooks(struct grads *grads);
/* Call them with what was received since they were called last. They may leave
 * no gradient. A no-op without hooks. 0 or -1. */
int grads_call_param_hooks(struct grads *grads);
void grads_discard(struct grads *grads); /* after an exception: nothing of this backward is kept */

/* ---- packed and reduced: reduce.c ---- */

/* The user's communication hook reduces from now on; `native`: it is one of torch's low-precision hooks. */
void grads_set_comm_hook(struct grads *grads, PyObject *function, PyObject *state, bool native);
/* 0, or -1 with RuntimeError: there is one, or it is too late */
int grads_check_hookless(const struct grads *grads);
int grads_refuse(const struct grads *grads, int64_t index);   /* -1 with RuntimeError */
int grads_add_pending(struct grads *grads, PyObject *output); /* output += pending */
/* the sum of what was received, padded; new reference or NULL */
PyObject *grads_take_received(struct grads *grads);
/* what was received, and what no_sync left, becomes the reduction's input */
int grads_pack(struct grads *grads);
/* Whether that is one pass over one contribution, as which another stream may make it; then what it reads is
 * the caller's, in `*packed`, until the pass is over. 0 or -1. */
bool grads_can_pack_directly(const struct grads *grads);
int grads_pack_on_side_stream(struct grads *grads, PyObject **packed);
/* no_sync: add what was received, to be shown as .grad */
int grads_accumulate_unsharded(struct grads *grads);
/* On the compute stream, before its work for the reduction is marked: what ends as the user's gradient is
 * memory of that stream, where it is used and freed. 0 or -1. */
int grads_alloc_output(struct grads *grads);
/* Before grads_pack_on_side_stream, on the stream whose memory the reduction's input is to be. 0 or -1. */
int grads_alloc_reduce_input(struct grads *grads);
/* Its bytes; 0 where a user's hook is given it, who may keep it. */
int64_t grads_reduce_input_nbytes(const struct grads *grads);
int grads_reduce(struct grads *grads); /* start the reduction of what was packed */
/* while that is in flight: computation waits for it, and reduces once more where grads_reduce_twice */
int grads_wait_reduce(struct grads *grads);
/* after that: post-divide, accumulate into saved_shard, copy to the host that offloads */
int grads_save_reduced(struct grads *grads);
/* in the shard group, and then over the replicas? */
bool grads_reduce_twice(const struct grads *grads);
/* After grads_save_reduced: its output, for the caller to let go of; NULL where it is kept as the
 * gradient. */
PyObject *grads_take_reduce_output(struct grads *grads);
/* Once all that reads it is enqueued on the stream that took it; that of a user's hook stays. */
void grads_release_reduce_input(struct grads *grads);
/* After grads_save_reduced: the reduction's input and output. */
void grads_reduce_release(struct grads *grads);

/* ---- shown as .grad: grads.c ---- */

void grads_unwatch(struct grads *grads); /* what is shown may go: the handle goes with it */
int grads_expose(struct grads *grads);   /* saved_shard becomes .grad */
/* the original parameters' .grad follow flat_param.grad */
int grads_expose_flat_grad(struct grads *grads);
/* ... follow a full-size flat gradient, or None */
int grads_expose_full_grad(struct grads *grads, PyObject *grad);
/* the parameter's .grad was found None. 0 or -1 */
int grads_mark_unexposed(struct grads *grads, int64_t index);
/* The shard has moved to another dtype or device, and flat_param.grad with it: what shows it follows. 0 or
 * -1 */
int grads_move(struct grads *grads);

/* ---- left by earlier backwards: grads.c ---- */

/* the only writer of `kind`. 0, or -1 with RuntimeError naming the unit and both kinds */
int grads_set_kind(struct grads *grads, enum grad_kind kind);
void grads_check(const struct grads *grads); /* the invariant, where FSDP_C_CHECK is defined */

/* first pre-backward: move a sharded .grad aside, to accumulate onto */
int grads_begin_backward(struct grads *grads);
/* amid a backward: no .grad shows what no_sync left. 0 or -1 */
int grads_unexpose_unsharded(struct grads *grads);
int grads_restore_stashed(struct grads *grads); /* after an exception. 0 or -1 */
/* *shard += what autograd itself has put into .grad amid this backward; zeros where *shard was NULL. 0 or
 * -1. Without a `shard`: is there any? 1, 0 or -1. */
int grads_add_from_autograd(struct grads *grads, PyObject **shard);
/* the user has cleared it: nothing is left of it. 0 or -1 */
int grads_clear_accumulated(struct grads *grads);
/* What was reduced before no_sync, and is not shown meanwhile, is zero for this parameter. 0 or -1 */
int grads_zero_reduced(struct grads *grads, int64_t index);
/* Zeros of the shard, which are the flat parameter's .grad from now on; its .grad, or such zeros. New
 * reference. */
PyObject *grads_zeros(struct grads *grads);
PyObject *grads_flat_or_zeros(struct grads *grads);
/* The gradient of this backward, as far as it has come, or .grad. New reference. */
PyObject *grads_sharded(const struct grads *grads);
/* Where a parameter's gradient lies in the flat gradient, or -1; and that part, in the shape the parameter's
 * has. */
int64_t grads_offset(const struct grads *grads, int64_t index);
PyObject *grads_part(const struct grads *grads, PyObject *flat_grad, int64_t index);
/* A new tensor of the values of `input`, in the dtype of the sharded parameter, where computation is. */
PyObject *grads_cast_to_shard_dtype(struct grads *grads, PyObject *input);
int grads_is_zero(PyObject *values); /* all of them? 1, 0 or -1 */

#endif
