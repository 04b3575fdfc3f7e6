/* One flat parameter: what its storage holds, who is using it, and where its gradients are.
 *
 *   local_shard --(cast to form->dtype)--> all-gather --> form->full[0 .. padded_numel)  param_state
 *                                                            |  |  |                     SHARDED -> UNSHARDING -> UNSHARDED
 *                                                           views, made once, one per parameter
 *   gradients of the views --pack, cast, pre-divide--> reduce-scatter --post-divide, accumulate--> saved_shard --> .grad
 *
 * Invariants: the `full` of a form keeps its tensor for ever, so every view and every tensor autograd saved stays good when its
 * storage is gathered again. `param_state` says what the storage of the form in use holds, and no other form holds anything; `training_state` says who is using the unit; each is
 * written by one function (handle_state.c) against a table of legal transitions. `shown` says what the modules' slots show. */
#ifndef FSDP_HANDLE_HANDLE_H
#define FSDP_HANDLE_HANDLE_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stdbool.h>
#include <stdint.h>

#include "collective/collective.h"
#include "kernels/kernels.h"
#include "kernels/table.h"
#include "layout/layout.h"
#include "torch/pool.h"
#include "torch/retirement.h"

enum sharding_strategy {
    FULL_SHARD = 1,
    SHARD_GRAD_OP,
    NO_SHARD,
    HYBRID_SHARD,
    HYBRID_SHARD_ZERO2
}; /* torch's values */

enum param_state { PARAM_SHARDED, PARAM_UNSHARDING, PARAM_UNSHARDED, PARAM_STATES };

enum training_state { /* the order of torch's HandleTrainingState */
                      USE_IDLE,
                      USE_FORWARD,
                      USE_BACKWARD_PRE,
                      USE_BACKWARD_POST,
                      USE_SUMMON_FULL_PARAMS,
                      USE_STATES
};

/* What the slots of the modules show. */
enum shown {
    SHOWN_NOTHING,     /* just built */
    SHOWN_SHARDED,     /* use_orig_params: Parameters that are 1-D parts of the shard; else what was shown before */
    SHOWN_VIEWS,       /* tensors over the unsharded storage, with autograd history in a forward */
    SHOWN_FULL_PARAMS, /* Parameters of full shape, inside summon_full_params */
};

/* How a slot is made to show something else. */
enum setting {
    SETTING_DIRECT,     /* in the dicts, as nn.Module does it */
    SETTING_BY_SETATTR, /* delattr and setattr: somebody takes part in them (RNNs keep a second list) */
    SETTING_BYPASS      /* FSDP_USE_UNSAFE_SETATTR: past all of that; in __dict__ too, where no __getattr__ is asked */
};

/* Where one parameter (or one more name of a shared one) is found in a module. */
struct slot {
    PyObject *module;     /* owned */
    PyObject *parameters; /* owned; module._parameters */
    PyObject *attributes; /* owned; module.__dict__ */
    PyObject *name;       /* owned; interned str */
    int64_t param;
    enum setting setting;
};

/* Says what torch_empty_like is to make; its own storage may be freed. */
struct tensor_like {
    PyObject *tensor; /* owned */
};

struct param_shape {
    int64_t ndim;
    int64_t *sizes;
    int64_t *strides; /* NULL when contiguous */
};

/* In which precision the unsharded parameters are. */
enum precision {
    PRECISION_COMPUTE, /* as mixed precision says */
    PRECISION_FULL, /* that of the shard, with gradients of the same: summon_full_params, FSDP_USE_FULL_PREC_IN_EVAL */
    PRECISIONS
};

/* The unsharded parameters in one precision, and how gradients of them look. */
struct form {
    PyObject *dtype, *reduce_dtype; /* owned; torch.dtype */
    enum dtype kind, reduce_kind;
    bool low_precision; /* not the dtype of the shard */
    bool is_local;      /* NO_SHARD in the dtype of the shard: the local shard is the unsharded parameter */
    struct buffer full; /* unused when is_local */
    struct buffer low_precision_shard; /* only with low_precision and sharded */
    PyObject *full_data;               /* owned; full without right padding */
    PyObject *views; /* owned; tuple, one per parameter over full; NULL until the form is first wanted */
    /* freed tensors that say how gradients look: padded size in reduce and compute dtype, shard size in reduce dtype */
    struct tensor_like reduce_input_like, gradient_like, reduce_output_like;
};

/* Which gradients flat_param.grad and the parameters' .grad hold between backwards. */
enum grad_kind { GRAD_NONE, GRAD_SHARDED, GRAD_UNSHARDED };

/* Gradients of one unit on their way from autograd to the optimizer. */
struct gradients {
    PyObject *pending;     /* owned; tuple: (context, a gradient or None per parameter), the latest contribution */
    PyObject *sum;         /* owned; earlier contributions of this backward, compute dtype, padded unsharded size */
    PyObject *unsharded;   /* owned; left by no_sync in earlier backwards, compute dtype, padded unsharded size */
    PyObject *saved_shard; /* owned; the reduced shard of this backward, or the previous one to accumulate onto */
    PyObject *offloaded;   /* owned; with offload: saved_shard in CPU memory, once the device has been waited for */
    PyObject *reduce_input, *reduce_output; /* owned; alive while `work` is in flight */
    PyObject *work;                         /* owned; the reduce-scatter in flight */
    enum grad_kind kind;
    bool hooked;      /* hooks of the flat parameter have made an unsharded gradient of what was received */
    bool unreduced;   /* what no_sync left has not been reduced yet */
    bool in_backward; /* from the first pre-backward to the hand-over: saved_shard is not in .grad */
};

/* The user's own way to reduce gradients; comm_hook.c. */
struct comm_hook {
    PyObject *function;            /* owned; NULL when there is none */
    PyObject *state;               /* owned */
    bool native;                   /* one of torch's low-precision hooks, run by this library */
    struct collective_group group; /* of a native hook's state, read at each reduction */
};

struct handle {
    struct flat_layout layout; /* a copy; its arrays belong to layout_owner */
    PyObject *layout_owner;    /* owned */
    enum param_state param_state;
    enum training_state training_state;
    enum shown shown;

    enum sharding_strategy strategy;
    bool sharded; /* not NO_SHARD */
    bool use_orig_params;
    bool keep_low_precision_grads;
    bool skip_writeback_check;
    bool may_offload;             /* the user asked for it; nothing is moved where computation is on the CPU too */
    bool verbose;                 /* TORCH_DISTRIBUTED_DEBUG=INFO */
    double predivide, postdivide; /* in effect: those of a native hook's state, 1 with another hook */
    struct comm_hook comm_hook;
    struct collective_group shard_group;
    struct collective_group replicate_group; /* .group NULL unless hybrid */
    PyObject *name;                          /* owned; str, names the unit in errors */

    int64_t num_params;
    PyObject *flat_param;             /* owned; the optimizer's and the user's object, never replaced */
    PyObject *params;                 /* owned; list of the original Parameters, NULL unless use_orig_params */
    PyObject *shapes, *strides;       /* owned; tuples; a stride entry is None for a contiguous parameter */
    struct param_shape *param_shapes; /* owned; the same as integers */
    int64_t op_id;                    /* by which torch.ops.fsdp_c find the handle */
    struct slot *slots;               /* owned; the first num_params are the parameters in order, then shared names */
    int64_t num_slots;
    bool watched;              /* some slot is set by setattr */
    PyObject *wrap_views;      /* owned; tuple of views -> what the slots show for them (DTensors), NULL: the views */
    PyObject *empty_param;     /* owned; the 1-D tensor of size 0 shown where the shard holds nothing of a parameter */
    PyObject *fallback_dtypes; /* owned; (param_dtype or None, reduce_dtype or None) as the user gave them */

    /* from lazy init on */
    bool ready;
    PyObject *device;     /* owned; compute device */
    PyObject *orig_dtype; /* owned; torch.dtype of the shard */
    enum dtype orig_kind;
    PyObject *local_shard;         /* owned; 1-D, original dtype, shares storage with the sharded flat_param */
    struct tensor_view local_view; /* borrowed from local_shard */
    /* [Note: offload] Where the shard lies in CPU memory and computation is elsewhere, a gather copies the shard there first,
     * and the reduced gradient is copied back before it is handed over: `offloaded`. */
    bool offload;
    bool elsewhere;                     /* the user has moved the shard away from the device that computes */
    struct tensor_like shard_like;      /* how the shard looks on the device that computes */
    struct tensor_view compute_view;    /* borrowed from shard_like: says where kernels run */
    const struct kernel_table *kernels; /* of that device */
    struct buffer device_shard;         /* only with offload; allocated while it is gathered or cast from */
    struct form forms[PRECISIONS];
    struct form *form;       /* borrowed; the one in use; written by form.c */
    PyObject *wrapped_views; /* owned; what wrap_views made of the form's views, with history; or NULL */
    /* borrowed from the root; NULL without streams: memory is freed at once. Of the unsharded parameters; of what they are
     * gathered from, where that is not the shard itself */
    struct retirement *retirement, *input_retirement;
    struct pool *pool;           /* borrowed from the root; where storage is taken from, or NULL */
    struct pack_source *sources; /* owned scratch: one per parameter, offsets and strides filled once */
    PyObject *shard_sizes;       /* owned; list of the sizes of the shard's pieces, for one split */
    int64_t *shard_pieces;       /* owned; per parameter the index of its piece, or -1 */
    bool changes_taken;          /* the user's changes, for the next gather */
    bool copied_changes;         /* since somebody cleared it: some were copied, on the stream that was current, or
                                    the shard is another one */
    bool input_ready;            /* what the next gather reads was made ahead of it */
    PyObject *unshard_work;      /* owned; the all-gather in flight */
    int64_t unheld_turn;         /* the parameter outside the shard that was looked at last */
    PyObject *published;         /* owned; flat_param.__dict__ once its attributes are published, or NULL */

    /* inside summon_full_params */
    PyObject *summon_full; /* owned; the full flat parameter shown, NULL outside and when hidden */
    PyObject *summon_grad; /* owned; the full gradient shown, NULL when there is none */
    bool summon_writeback, summon_freed_after;
    PyObject *flat_param_owner; /* owned; the dict where "_flat_param" is registered, NULL when it is not */

    bool has_param_hooks;       /* hooks were found on flat_param when it was looked at last, */
    PyObject *hooks_seen;       /* owned; which was after torch's hook of this number */
    bool optimizer_in_backward; /* set by Python at lazy init: some parameter has an optimizer attached */
    struct gradients gradients;
};

/* Everything handle_init needs; references are borrowed for the call. */
struct handle_spec {
    const struct flat_layout *layout;
    PyObject *layout_owner; /* the object that owns the layout's arrays */
    PyObject *flat_param, *params /* or None */, *shapes, *strides, *slots /* list of (param, module, name) */;
    PyObject *process_group, *replicate_group /* or None */, *device, *param_dtype, *reduce_dtype, *name;
    PyObject *flat_param_owner; /* the dict where "_flat_param" is registered, or None */
    PyObject *wrap_views;       /* or None */
    int strategy;
    bool use_orig_params, keep_low_precision_grads, skip_writeback_check, verbose, offload;
    double predivide, postdivide;
};

int handle_init(struct handle *handle, const struct handle_spec *spec); /* 0, or -1 and handle is zeroed */
void handle_fini(struct handle *handle);
/* For messages: a parameter's name from its unit, or in its module where nobody has named it. New reference. */
PyObject *handle_fqn(const struct handle *handle, int64_t param);
int handle_visit(struct handle *handle, visitproc visit, void *arg);

/* handle_state.c: the only writers of the two enums. 0, or -1 with RuntimeError naming the unit and both states. */
int handle_set_param_state(struct handle *handle, enum param_state state);
int handle_set_training_state(struct handle *handle, enum training_state state);
void handle_force_idle(struct handle *handle); /* after an exception: IDLE from anywhere */
const char *training_state_name(enum training_state state);

/* form.c: the only writer of `form` and of what forms are made of */
PyObject *handle_freed_tensor(int64_t numel, PyObject *dtype,
                              PyObject *device); /* new; only says what to allocate later */
int handle_init_forms(struct handle *handle);    /* after the dtypes and the shard; the one to compute with is in use */
int handle_make_form(struct handle *handle,
                     enum precision precision); /* so that its tensors are there, freed. 0 or -1 */
/* Unsharded parameters are of this precision from now on; what is gathered in another is freed. 0 or -1. */
int handle_use_precision(struct handle *handle, enum precision precision);
bool handle_has_mixed_precision(const struct handle *handle);
int handle_set_reduce_dtype(struct handle *handle, PyObject *dtype); /* of the form to compute with */
void handle_fini_forms(struct handle *handle);

/* unshard.c */
int handle_init_shard(struct handle *handle); /* dtypes and the shard; enough to show sharded parameters */
int handle_lazy_init(struct handle *handle);  /* storage, views and dtypes, after the flat parameter as it is now */
/* What a gather does before it, for a caller who wants that on other streams: the user's changes are taken over, and the shard is
 * brought to the device and cast. No-ops unless SHARDED. */
int handle_take_changes(struct handle *handle);
int handle_pre_unshard(struct handle *handle);
int handle_unshard_enqueue(struct handle *handle); /* start the all-gather; a no-op unless SHARDED */
/* What the all-gather reads, where that is not the shard itself; NULL where it is. */
struct buffer *handle_gather_input(struct handle *handle);
int handle_unshard_wait(struct handle *handle); /* the unsharded parameter is there; a no-op unless UNSHARDING */
int handle_reshard(struct handle *handle, bool free_storage);
int handle_alloc_unsharded(
    struct handle *handle); /* the storage alone, for a caller who gathers in steps; SHARDED stays */
/* Take the memory that gathering will take, so that the pool holds it when it is given back. No state changes. 0 or -1. */
int handle_reserve(struct handle *handle);
int handle_release_reserved(struct handle *handle);
void handle_free_unshard(struct handle *handle); /* what a gather that failed has left; an exception stays set */
const struct kernel_stream *handle_stream(const struct handle *handle); /* where its kernels run now */
/* With streams: what was enqueued on the current one comes after `*work` at once, so that an event recorded there covers a
 * backend that has a stream of its own. 0, or -1 and *work is NULL. */
int handle_wait_in_stream(const struct handle *handle, PyObject **work);
bool handle_reshards_after_forward(const struct handle *handle);
int64_t handle_unsharded_nbytes(const struct handle *handle);

/* views.c */
int handle_show_views(struct handle *handle);   /* or what wrap_views made of them */
int handle_wrap_views(struct handle *handle);   /* anew, after their history has changed; a no-op without wrap_views */
int handle_unwrap_views(struct handle *handle); /* nothing keeps the history of the wrapped ones alive */
int handle_show_sharded(struct handle *handle);
int handle_show_full_params(struct handle *handle, PyObject *full /* flat, unsharded */);
int handle_point_params_at_shard(struct handle *handle);                    /* params[i].data = its part of the shard */
PyObject *handle_make_views(struct handle *handle, PyObject *full);         /* new tuple */
PyObject *handle_local_value(const struct handle *handle, PyObject *value); /* borrowed; what a DTensor holds here */
int handle_show_wrapped_grads(struct handle *handle, PyObject *full); /* inside summon: on the Parameters shown there */

/* writeback.c */
/* With `verbose`, a UserWarning that the user's value of a parameter, or of its gradient, is taken over. 0 or -1 (C-136). */
int handle_say_writeback(struct handle *handle, int64_t param, const char *what, PyObject *value);
int handle_follow_flat_param(struct handle *handle); /* lazy init, again if its data is another one now. 0 or -1 */
/* flat_param.data = flat_param.data.to(*args, **kwargs), and the handle and all that is shown follow. 0, or -1 and nothing has moved;
 * AssertionError amid a step. */
int handle_flat_param_to(struct handle *handle, PyObject *args, PyObject *kwargs /* or NULL */);
int handle_writeback(struct handle *handle);        /* take over Parameters and data the user replaced. 0 or -1 */
int handle_take_over_params(struct handle *handle); /* the part of it about original parameters */
int handle_check_unheld(struct handle *handle);     /* RuntimeError for data where this rank holds nothing. 0 or -1 */
int handle_check_views(
    struct handle *handle); /* AssertionError for a view replaced while the storage stays unsharded */

/* published.c: attributes of flat_param under torch's names. 0 or -1 */
int handle_publish(struct handle *handle); /* what storage there is, from now on: lazy init does it again */
int handle_publish_cpu_grad(struct handle *handle, PyObject *grad);

/* summon.c: the verbs of summon_full_params; see _C.pyi */
int handle_summon_enter(struct handle *handle, bool writeback);
int handle_summon_exit(struct handle *handle);
int handle_summon_free(struct handle *handle); /* the modules are to show other tensors */
int handle_summon_hide(struct handle *handle); /* they show sharded ones */
int handle_summon_grads(struct handle *handle);
int handle_summon_grads_exit(struct handle *handle, bool writeback);

/* comm_hook.c */
int handle_set_comm_hook(struct handle *handle, PyObject *function, PyObject *state,
                         PyObject *dtype /* of a native hook, or None */); /* 0, or -1 also when there is one already */
int handle_read_comm_hook(struct handle *handle); /* before gradients are packed: a native hook's state as it is now */
PyObject *handle_call_comm_hook(struct handle *handle); /* reduce what was packed; None, or NULL with an exception */
void comm_hook_fini(struct comm_hook *hook);

/* param_hooks.c: the user's hooks on the flat parameter, see [Note: hooks of the flat parameter] */
/* Call them with what was received since they were called last. They may leave no gradient. A no-op without hooks. 0 or -1. */
int handle_call_param_hooks(struct handle *handle);

/* gradients.c and reduce.c */
int handle_refuse_gradient(struct handle *handle, int64_t param); /* -1 with RuntimeError */
bool handle_has_new_gradients(const struct handle *handle);
int handle_receive(struct handle *handle, PyObject *args); /* one contribution: the arguments of the node's backward */
PyObject *handle_take_received(struct handle *handle); /* the sum of what was received, padded; new reference or NULL */
int handle_prepare_gradient(
    struct handle *handle);             /* first pre-backward: move a sharded .grad aside, to accumulate onto */
int handle_pack(struct handle *handle); /* what was received, and what no_sync left, becomes the reduction's input */
int handle_reduce_enqueue(struct handle *handle);       /* start the reduction of what was packed */
int handle_reduce_finish(struct handle *handle);        /* wait, post-divide, accumulate into saved_shard */
bool handle_reduces_twice(const struct handle *handle); /* in its shard group, and then over the replicas */
/* After that: the reduction's output, for the caller to let go of; NULL where it is kept as the gradient. */
PyObject *handle_take_reduce_output(struct handle *handle);
void handle_reduce_release(struct handle *handle);      /* after that: the reduction's input and output */
int handle_accumulate_unsharded(struct handle *handle); /* no_sync: add what was received, and show it as .grad */
int handle_hand_over(struct handle *handle);            /* saved_shard becomes .grad */
int handle_show_flat_grad(struct handle *handle);       /* the original parameters' .grad follow flat_param.grad */
int handle_show_full_grad(struct handle *handle, PyObject *grad); /* ... follow a full-size flat gradient, or None */
int handle_collect_user_grads(struct handle *handle); /* what the user zeroed or replaced since the last step */
void handle_drop_gradients(struct handle *handle);    /* after an exception: nothing of this backward is kept */

#endif
