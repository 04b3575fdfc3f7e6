/* Parameters that the modules of a unit expose: sharded Parameters, views of the unsharded storage, or full
 * Parameters.
 *
 * Invariant: unless `exposed` is EXPOSED_NOTHING, all param_views expose the same kind of tensor. A change of
 * kind passes EXPOSED_NOTHING, and stays there on failure. Without use_orig_params there are no sharded
 * Parameters to expose: modules keep the views. */
#ifndef FSDP_HANDLE_PARAM_VIEWS_H
#define FSDP_HANDLE_PARAM_VIEWS_H

#include "handle/flat_param.h"

enum exposed {
    EXPOSED_NOTHING, /* the state before the first exposure, and during a change */
    /* use_orig_params: 1-D Parameters over the shard. Otherwise modules keep their views. */
    EXPOSED_SHARDED,
    EXPOSED_VIEWS,       /* tensors over the unsharded storage, with autograd history in a forward */
    EXPOSED_FULL_PARAMS, /* Parameters of full shape, inside summon_full_params */
    EXPOSED_KINDS
};

/* Way to set a parameter in a module. */
enum setting {
    SETTING_DIRECT,     /* plain entry of _parameters or __dict__, as in nn.Module */
    SETTING_BY_SETATTR, /* delattr and setattr, for classes that override them (RNNs keep a second list) */
    /* FSDP_USE_UNSAFE_SETATTR: bypass setattr; also in __dict__, which bypasses __getattr__ */
    SETTING_BYPASS
};

/* Place of a parameter in a module. Shared parameters have one per name. */
struct param_view {
    PyObject *module;     /* owned */
    PyObject *parameters; /* owned; module._parameters */
    PyObject *attributes; /* owned; module.__dict__ */
    PyObject *name;       /* owned; interned str */
    int64_t param;
    enum setting setting;
};

struct param_views {
    const struct flat_param *param; /* borrowed */
    enum exposed exposed;           /* written by param_views_set_exposed */
    /* owned; the first num_params entries are the parameters in order, then follow other names of shared
     * ones */
    struct param_view *all;
    int64_t count;
    bool uses_setattr; /* true if some entry is SETTING_BY_SETATTR */
    /* owned; callable from views to the tensors that modules expose (DTensors); NULL: the views themselves */
    PyObject *wrap_views;
    /* owned; result of wrap_views for the current views and their history, or NULL */
    PyObject *wrapped_views;
    /* true while `data` of the original parameters may be full: point them at the shard before exposing
     * them */
    bool params_are_full;
    uint32_t num_reused; /* number of forwards that found views exposed already */
    /* true if a Parameter was assigned to a module since the last check; unused with use_orig_params */
    bool assigned;
    /* owned; 1-D tensor of size 0, exposed for parameters outside this rank's shard */
    PyObject *empty_param;
};

/* Return 0, or -1 with an exception. Call param_views_fini in either case. */
int param_views_init(struct param_views *param_views, const struct handle_spec *spec);
void param_views_fini(struct param_views *param_views);

/* Write `exposed`; the only function that does. EXPOSED_NOTHING makes the next exposure set all entries
 * again. Return 0, or -1 with RuntimeError that names the unit and both kinds. */
int param_views_set_exposed(struct param_views *param_views, enum exposed exposed);
/* Assert the invariant under FSDP_C_CHECK. */
void param_views_check(const struct param_views *param_views);

/* Expose `views`, one per parameter, or the tensors that wrap_views returns for them. Return 0 or -1. */
int param_views_expose_views(struct param_views *param_views, PyObject *views);
void param_views_mark_assigned(struct param_views *param_views);
/* Without use_orig_params: move views that torch.func.functional_call has restored as parameters back to
 * plain attributes. Return 0 or -1. */
int param_views_restore_attributes(struct param_views *param_views, PyObject *views);
/* Wrap the views again after a change of their history. No-op without wrap_views. Return 0 or -1. */
int param_views_wrap_views(struct param_views *param_views, PyObject *views);
void param_views_drop_wrapped(struct param_views *param_views); /* call after the views were replaced */

/* Expose the original parameters, with their parts of `shard` as data; without use_orig_params, the views.
 * Return 0 or -1. */
int param_views_expose_sharded(struct param_views *param_views, PyObject *shard, PyObject *views);
int param_views_expose_full_params(struct param_views *param_views, PyObject *full /* flat, unsharded */);

/* Set params[i].data to its part of the shard. Return 0 or -1. */
int param_views_point_params_at(struct param_views *param_views, PyObject *shard);

/* Return the entry in the module's _parameters, or NULL if there is none: check PyErr_Occurred().
 * Borrowed. */
PyObject *param_views_value(const struct param_views *param_views, int64_t index);
/* Register the sharded Parameter under all its names again. Return 0 or -1. */
int param_views_restore_param(const struct param_views *param_views, int64_t param);
/* Return the local tensor of a DTensor, and other values unchanged. Borrowed. */
PyObject *param_views_local_value(const struct param_views *param_views, PyObject *value);
/* Inside summon: set wrapped gradients on the exposed Parameters. Return 0 or -1. */
int param_views_expose_wrapped_grads(struct param_views *param_views, PyObject *full);

#endif
