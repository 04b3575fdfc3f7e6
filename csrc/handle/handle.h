/* One flat parameter with all that belongs to it. The components own their state; what takes several of them
 * is a sequence here.
 *
 *   flat_param   what it is                         storage    shard and unsharded parameters
 *   param_views  what the modules show              grads      from autograd to .grad
 *   writeback    what the user did to both
 *
 * Invariants: a component writes its own fields alone.
 * `training_state` says who is using the unit, and is written by one function (handle.c) against a table of
 * legal transitions. Between lazy init and the next change of the flat parameter's data `ready` holds, and
 * all components agree on the shard. */
#ifndef FSDP_HANDLE_HANDLE_H
#define FSDP_HANDLE_HANDLE_H

#include "handle/flat_param.h"
#include "handle/grads.h"
#include "handle/param_views.h"
#include "handle/storage.h"
#include "handle/writeback.h"

/* Inside summon_full_params; summon.c. */
struct summon {
    PyObject *full; /* owned; the full flat parameter shown, NULL outside and when hidden */
    PyObject *grad; /* owned; the full gradient shown, NULL when there is none */
    bool writeback, freed_after;
    /* owned; the dict where the flat parameter is registered, NULL when it is not */
    PyObject *flat_param_owner;
    PyObject *flat_param_name; /* owned; by which it is registered there */
};

struct handle {
    struct flat_param param;
    struct storage storage;
    struct param_views param_views;
    struct grads grads;
    struct writeback writeback;
    struct summon summon;
    enum training_state training_state;
    bool initialized;
    bool optimizer_in_backward; /* some parameter has an optimizer attached */
};

int handle_init(struct handle *handle, const struct handle_spec *spec); /* 0, or -1 and handle is zeroed */
void handle_fini(struct handle *handle);
int handle_visit(struct handle *handle, visitproc visit, void *arg);

/* The only writer of training_state. 0, or -1 with RuntimeError naming the unit and both states.
 * From everywhere it may become IDLE. */
int handle_set_training_state(struct handle *handle, enum training_state state);
/* the invariants of all components, where FSDP_C_CHECK is defined and `ready` holds */
void handle_check(const struct handle *handle);

/* handle_table.c: its id, from 1 on and never given twice, or -1 with MemoryError. */
int64_t handle_table_add(struct handle *handle);
void handle_table_remove(int64_t id);
/* One that is alive, by the id that torch.ops.fsdp_c are called with. Borrowed, or NULL; without Python's
 * lock as well. */
struct handle *handle_table_find(int64_t id);
/* -1 with RuntimeError of the unit of which `tensor` is a freed view. 0: it is of none that is alive */
int handle_table_refuse_freed_view(const PyObject *tensor);
int handle_ops_init(void); /* handle_ops.c: register the ops, once per process. 0, or -1 with ImportError */

/* ---- lazy init: after the flat parameter as it is now ---- */

int handle_lazy_init(struct handle *handle); /* storage, views and dtypes */
/* lazy init, again if its data is another one now. 0 or -1 */
int handle_follow_flat_param(struct handle *handle);
/* RuntimeError where another tensor than the flat parameter is registered in its place */
int handle_check_flat_param(const struct handle *handle);
int handle_publish(struct handle *handle); /* attributes of the flat parameter, from now on. 0 or -1 */
/* Before and after outside code moves the flat parameter, and its .grad, to another dtype or device: between
 * steps it then shows the shard, with what the user did to gradients; what shows it follows. 0 or -1 */
int handle_begin_move(struct handle *handle);
int handle_end_move(struct handle *handle);
/* flat_param.data = flat_param.data.to(*args, **kwargs), and the handle and all that is shown follow. 0, or
 * -1 and nothing has moved; AssertionError amid a step. */
int handle_flat_param_to(struct handle *handle, PyObject *args, PyObject *kwargs /* or NULL */);

/* ---- gathering ---- */

/* Before an all-gather, on the stream that is current: what the user changed goes into the shard. 0, or -1
 * where the user has moved the shard away */
int handle_pre_unshard(struct handle *handle);
/* That, what the all-gather reads, and the all-gather; a no-op unless SHARDED. A step does the three on streams of
 * their own. 0 or -1 */
int handle_unshard(struct handle *handle);
/* All of it, in memory of the stream that is current and not of the pool, which a step would not find there.
 * 0 or -1. */
int handle_unshard_outside_step(struct handle *handle);
/* Unsharded parameters are of this precision from now on; what is gathered in another is freed. 0 or -1. */
int handle_use_precision(struct handle *handle, enum precision precision);
/* `dtype`: in which a native hook reduces, or None for a custom one. 0, or -1, also when there is a hook
 * already. */
int handle_set_comm_hook(struct handle *handle, PyObject *function, PyObject *state, PyObject *dtype);

/* ---- summon.c: the verbs of summon_full_params; see _C.pyi ---- */

int handle_summon_enter(struct handle *handle, bool writeback);
int handle_summon_exit(struct handle *handle);
int handle_summon_free(struct handle *handle);    /* the modules are to show other tensors */
int handle_summon_reshard(struct handle *handle); /* they show sharded ones */
int handle_summon_grads(struct handle *handle);
int handle_summon_grads_exit(struct handle *handle, bool writeback);

/* ---- writeback.c: what the user did to parameters and gradients. 0 or -1 ---- */

/* handle_check_flat_param, and take over Parameters that the user replaced */
int handle_writeback(struct handle *handle);
/* What was written in place to views that stayed after a forward (C-091), or in a recomputation of one that
 * writes, goes into the shard, before what is gathered goes. */
int handle_writeback_views(struct handle *handle);
/* so does what the module has written in place to its parameters in a forward (parity 52) */
int handle_writeback_forward(struct handle *handle);
int handle_collect_user_grads(struct handle *handle); /* since the last step: zeroed or replaced */

/* ---- what the modules show, of this handle's storage. 0 or -1 ---- */

int handle_expose_views(struct handle *handle);
int handle_expose_sharded(struct handle *handle);
int handle_detach_views(struct handle *handle);   /* views without history take their place */
int handle_unexpose_views(struct handle *handle); /* no backward comes for which views would stay */
int handle_mark_assigned(struct handle *handle);
bool handle_exposes_sharded(
    const struct handle *handle); /* a layer that is called now computes with sharded parameters */
bool handle_keeps_views_exposed(
    const struct handle *handle); /* do modules show them from a forward to its backward (C-091)? */

#endif
