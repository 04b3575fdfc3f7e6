/* One flat parameter with all that belongs to it. The components own their state; what takes several of them
 * is a sequence here.
 *
 *   flat_param   what it is                         storage    shard and unsharded parameters
 *   param_views  what the modules show              gradients  from autograd to .grad
 *   writeback    what the user did to both
 *
 * Invariants: a component writes its own fields alone.
 * `training_state` says who is using the unit, and is written by one function (handle.c) against a table of
 * legal transitions. Between lazy init and the next change of the flat parameter's data `ready` holds, and
 * all components agree on the shard. */
#ifndef FSDP_HANDLE_HANDLE_H
#define FSDP_HANDLE_HANDLE_H

#include "handle/flat_param.h"
#include "handle/gradients.h"
#include "handle/param_views.h"
#include "handle/storage.h"
#include "handle/writeback.h"
#include "torch/names.h"

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
    struct gradients gradients;
    struct writeback writeback;
    struct summon summon;
    enum training_state training_state;
    bool ready;
    bool optimizer_in_backward; /* some parameter has an optimizer attached */
};

/* Of an initializer of `handle`: whom the components above its storage know. */
#define HANDLE_ABOVE_STORAGE(handle)                                                                         \
    .param_views = {.param = &(handle)->param},                                                              \
    .gradients = {.param = &(handle)->param, .storage = &(handle)->storage},                                 \
    .writeback = {                                                                                           \
        .param = &(handle)->param,                                                                           \
        .storage = &(handle)->storage,                                                                       \
        .param_views = &(handle)->param_views,                                                               \
        .gradients = &(handle)->gradients,                                                                   \
        .use = &(handle)->training_state,                                                                    \
    }

int handle_init(struct handle *handle, const struct handle_spec *spec); /* 0, or -1 and handle is zeroed */
void handle_fini(struct handle *handle);
int handle_visit(struct handle *handle, visitproc visit, void *arg);

/* The only writer of training_state. 0, or -1 with RuntimeError naming the unit and both states.
 * From everywhere it may become IDLE. */
int handle_set_training_state(struct handle *handle, enum training_state state);
/* the invariants of all components, where FSDP_C_CHECK is defined and `ready` holds */
void handle_check(const struct handle *handle);

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
/* that, and take over Parameters that the user replaced. 0 or -1 */
int handle_writeback(struct handle *handle);
int handle_publish(struct handle *handle); /* attributes of the flat parameter, from now on. 0 or -1 */
/* Before and after outside code moves the flat parameter, and its .grad, to another dtype or device: between
 * steps it then shows the shard, with what the user did to gradients; what shows it follows. 0 or -1 */
int handle_leave(struct handle *handle);
int handle_follow(struct handle *handle);
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
int handle_summon_free(struct handle *handle); /* the modules are to show other tensors */
int handle_summon_hide(struct handle *handle); /* they show sharded ones */
int handle_summon_grads(struct handle *handle);
int handle_summon_grads_exit(struct handle *handle, bool writeback);

/* ---- what the modules show, of this handle's storage ---- */

/* views without history take their place. 0 or -1 */
int handle_detach_views(struct handle *handle);

static inline int handle_show_views(struct handle *handle) {
    return param_views_show_views(&handle->param_views, handle->storage.copy->views);
}

static inline int handle_show_sharded(struct handle *handle) {
    bool is_trained = (handle->training_state == USE_FORWARD && torch_grad_enabled()) ||
                      handle->training_state == USE_BACKWARD_PRE ||
                      handle->training_state == USE_BACKWARD_POST;
    int result = param_views_show_sharded(&handle->param_views, handle->storage.local_shard,
                                          handle->storage.copy->views);
    return result ? result : param_views_place_guards(&handle->param_views, is_trained);
}

static inline int handle_note_assigned(struct handle *handle) {
    param_views_note_assigned(&handle->param_views);
    return 0;
}

/* A layer that is called now computes with sharded parameters. */
static inline bool handle_shows_sharded(const struct handle *handle) {
    bool freed =
        handle->storage.param_state == PARAM_SHARDED && handle->param_views.shown != SHOWN_FULL_PARAMS;
    return handle->param.sharded && (freed || handle->param_views.shown == SHOWN_SHARDED);
}

/* Do modules show the views between a forward and its backward (C-091)? */
static inline bool handle_leaves_views(const struct handle *handle) {
    return handle->param.use_orig_params && flat_param_stays_unsharded(&handle->param);
}

/* What was written in place to views that stayed after a forward (C-091), or in a recomputation of one that
 * writes, goes into the shard, before what is gathered goes. 0 or -1. */
static inline int handle_take_over_views(struct handle *handle) {
    int64_t last;
    bool in_backward =
        handle->training_state == USE_BACKWARD_PRE || handle->training_state == USE_BACKWARD_POST;
    bool expected = !in_backward || handle_leaves_views(handle) || handle->writeback.forward_writes;
    if (!expected || handle->storage.copy->is_local || handle->param_views.shown != SHOWN_VIEWS ||
        handle->storage.param_state != PARAM_UNSHARDED || handle->param.skip_writeback_check)
        return 0;
    int result = writeback_take_over_views(&handle->writeback, &last) < 0 ? -1 : 0;
    if (!result)
        storage_drop_snapshot(&handle->storage);
    return result;
}

/* What the module has written in place to its parameters in a forward goes into the shard, before what is
 * gathered goes (parity 52). 0 or -1. */
static inline int handle_take_over_writes(struct handle *handle) {
    struct storage *storage = &handle->storage;
    if (storage->copy->is_local || storage->param_state != PARAM_UNSHARDED ||
        handle->param.skip_writeback_check)
        return 0;
    return writeback_take_over_writes(&handle->writeback) < 0 ? -1 : 0;
}

/* No backward comes for which views would stay. 0 or -1. */
static inline int handle_hide_views(struct handle *handle) {
    if (!handle->param.use_orig_params || handle->training_state != USE_IDLE ||
        handle->param_views.shown != SHOWN_VIEWS)
        return 0;
    return handle_take_over_views(handle) < 0 ? -1 : handle_show_sharded(handle);
}

/* What the user did to gradients since the last step. 0 or -1. */
static inline int handle_collect_user_grads(struct handle *handle) {
    return handle->gradients.shard_sizes ? writeback_collect_grads(&handle->writeback)
                                         : 0; /* from the first lazy init on */
}

#endif
