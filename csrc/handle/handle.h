/* A handle: one flat parameter with its storage, views and gradients. Each component owns its state;
 * operations over several components are declared here.
 *
 * Invariants: a component writes its own fields alone. `training_state` is written by
 * handle_set_training_state, against a table of legal transitions. While `initialized`, all components agree
 * on the shard; a new `.data` of the flat parameter is noticed by handle_follow_flat_param. */
#ifndef FSDP_HANDLE_HANDLE_H
#define FSDP_HANDLE_HANDLE_H

#include "handle/flat_param.h"
#include "handle/grads.h"
#include "handle/param_views.h"
#include "handle/storage.h"

/* State of summon_full_params; summon.c. */
struct summon {
    PyObject *full; /* owned; the exposed full flat parameter; NULL outside of summon and while resharded */
    PyObject *grad; /* owned; the exposed full gradient, or NULL */
    bool writeback, freed_after;
    /* owned; the module dict that holds the flat parameter, or NULL */
    PyObject *flat_param_owner;
    PyObject *flat_param_name; /* owned; key of the flat parameter in that dict */
};

/* User edits of parameters and gradients; writeback.c. */
struct writeback {
    /* true if the shard was written on the current stream, or replaced, since the last
     * writeback_pop_copied */
    bool copied;
    int64_t next_outside_shard; /* index of the last parameter outside the shard whose data was checked */
    bool forward_writes;        /* true if some forward has written to its parameters in place */
    /* number of forwards with and without gradients: see [Note: writes in a forward] in writeback.c */
    int64_t num_forwards[2];
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
    bool optimizer_in_backward; /* true if some parameter has an optimizer attached */
    /* borrowed; list of live handles: the next one, and the place that points to this one */
    struct handle *next_live, **live_place;
};

/* Return 0, or -1 with `handle` zeroed. */
int handle_init(struct handle *handle, const struct handle_spec *spec);
void handle_fini(struct handle *handle);
int handle_visit(struct handle *handle, visitproc visit, void *arg);

/* Write training_state; the only function that does. Return 0, or -1 with RuntimeError that names the unit
 * and both states. IDLE is legal from every state. */
int handle_set_training_state(struct handle *handle, enum training_state state);
/* Assert the invariants of all components under FSDP_C_CHECK; requires `initialized`. */
void handle_check(const struct handle *handle);

/* Raise RuntimeError and return -1 if `tensor` is a freed view of some live handle. Return 0 otherwise. */
int handle_refuse_freed_view(const PyObject *tensor);

/* ---- lazy init. Return 0, or -1 with an exception ---- */

/* Read the flat parameter, then build storage, views and dtypes. */
int handle_lazy_init(struct handle *handle);
/* Run lazy init, again if the flat parameter has new data. */
int handle_follow_flat_param(struct handle *handle);
/* Raise RuntimeError if another tensor is registered in place of the flat parameter. */
int handle_check_flat_param(const struct handle *handle);
/* Bracket a move of the flat parameter and its .grad by outside code, to another dtype or device. Between
 * steps, begin_move reshards and writes back user edits; end_move makes handle, views and gradients follow.
 * During a step begin_move does nothing. */
int handle_begin_move(struct handle *handle);
int handle_end_move(struct handle *handle);
/* Run `flat_param.data = flat_param.data.to(*args, **kwargs)` and make the handle follow. Nothing has moved
 * on failure. Raise AssertionError during a step. */
int handle_flat_param_to(struct handle *handle, PyObject *args, PyObject *kwargs /* or NULL */);

/* ---- unshard. Return 0, or -1 with an exception ---- */

/* Write user edits back to the shard, on the current stream. Fails if the user has moved the shard to another
 * device. */
int handle_pre_unshard(struct handle *handle);
/* Run handle_pre_unshard, storage_pre_unshard and storage_unshard. No-op unless SHARDED. A step calls the
 * three itself, on different streams. */
int handle_unshard(struct handle *handle);
/* Unshard and wait, in memory of the current stream. Memory of the pool is not used, as a step expects to
 * find it there. */
int handle_unshard_outside_step(struct handle *handle);
/* Select the precision of unsharded parameters. Parameters that are unsharded in another precision are
 * freed. */
int handle_use_precision(struct handle *handle, enum precision precision);
/* Register a communication hook. `dtype` is the dtype that a native hook reduces in, None for a custom hook.
 * Fails if a hook is registered already. */
int handle_set_comm_hook(struct handle *handle, PyObject *function, PyObject *state, PyObject *dtype);

/* ---- summon.c: summon_full_params; described in _C.pyi ---- */

int handle_summon_enter(struct handle *handle, bool writeback);
int handle_summon_exit(struct handle *handle);
int handle_summon_free(struct handle *handle);    /* the caller exposes other tensors next */
int handle_summon_reshard(struct handle *handle); /* expose sharded parameters */
int handle_summon_grads(struct handle *handle);
int handle_summon_grads_exit(struct handle *handle, bool writeback);

/* ---- writeback.c: user edits of parameters and gradients. Return 0, or -1 with an exception ---- */

bool writeback_pop_copied(struct handle *handle); /* return and clear `copied` */
/* Write replaced Parameters to a new shard: see [Note: another shard]. Return 1 if the shard was replaced, in
 * which case the caller calls handle_follow_flat_param; 0 if not, -1 with an exception. */
int writeback_replace_shard(struct handle *handle);
/* Return the number of visible writes to parameters, in-place writes and replaced Parameters alike; or -1. */
int64_t writeback_count_writes(const struct handle *handle);
/* Raise RuntimeError if a parameter outside this rank's shard was given data. Return 0 or -1. */
int writeback_check_params_outside_shard(struct handle *handle);
/* Raise AssertionError if a view was replaced while the storage stays unsharded. Return 0 or -1. */
int writeback_check_views(struct handle *handle);

/* Check and follow the flat parameter, then write back views and replaced Parameters. */
int handle_writeback(struct handle *handle);
/* Copy in-place writes to exposed views into the shard, before the unsharded storage is freed. Views are
 * writable by users after a forward that keeps them exposed, and by the module in a forward that is
 * recomputed. */
int handle_writeback_views(struct handle *handle);
/* Copy in-place writes by the module's own forward into the shard. */
int handle_writeback_forward(struct handle *handle);
int handle_collect_user_grads(struct handle *handle); /* gradients zeroed or replaced since the last step */

/* ---- views and sharded parameters in the modules. Return 0, or -1 with an exception ---- */

int handle_expose_views(struct handle *handle);
int handle_expose_sharded(struct handle *handle);
int handle_detach_views(struct handle *handle); /* replace the views by views without autograd history */
/* Expose sharded parameters again: no backward will need the views. */
int handle_unexpose_views(struct handle *handle);
/* Return true if a layer called now would compute with sharded parameters. */
bool handle_exposes_sharded(const struct handle *handle);
/* Return true if modules keep views exposed between forward and backward, as FSDP1 does for SHARD_GRAD_OP
 * with use_orig_params. */
bool handle_keeps_views_exposed(const struct handle *handle);

#endif
