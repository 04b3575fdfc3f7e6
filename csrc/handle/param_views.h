/* What the modules of a unit show as their parameters.
 *
 * Invariant: while `shown` is not EXPOSED_NOTHING, all param_views show the same kind of tensor. A change of
 * kind passes EXPOSED_NOTHING, where it also ends when it fails half-way. Without original parameters there is
 * nothing sharded to show: the views stay.
 */
#ifndef FSDP_HANDLE_PARAM_VIEWS_H
#define FSDP_HANDLE_PARAM_VIEWS_H

#include "handle/flat_param.h"

enum exposed {
    EXPOSED_NOTHING, /* just built, or amid a change */
    /* use_orig_params: Parameters that are 1-D parts of the shard; else what was shown before */
    EXPOSED_SHARDED,
    EXPOSED_VIEWS,       /* tensors over the unsharded storage, with autograd history in a forward */
    EXPOSED_FULL_PARAMS, /* Parameters of full shape, inside summon_full_params */
    EXPOSED_KINDS
};

/* How a module is made to show something else. */
enum setting {
    SETTING_DIRECT,     /* in the dicts, as nn.Module does it */
    SETTING_BY_SETATTR, /* delattr and setattr: somebody takes part in them (RNNs keep a second list) */
    /* FSDP_USE_UNSAFE_SETATTR: past all of that; in __dict__ too, where no __getattr__ is asked */
    SETTING_BYPASS
};

/* Where one parameter (or one more name of a shared one) is found in a module. */
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
    /* owned; the first num_params are the parameters in order, then shared names */
    struct param_view *all;
    int64_t count;
    bool uses_setattr; /* some module is set by setattr */
    /* owned; tuple of views -> what modules show for them (DTensors), NULL: the views */
    PyObject *wrap_views;
    PyObject *wrapped_views; /* owned; what wrap_views made of the views in use, with history; or NULL */
    /* original parameters may have full values for their data, and are pointed back first */
    bool params_are_full;
    uint32_t num_reused; /* forwards that have found the views where an earlier one had put them */
    bool assigned; /* without original parameters: a Parameter was, to a module, since they were all found */
    /* owned; the 1-D tensor of size 0 shown where the shard holds nothing of a parameter */
    PyObject *empty_param;
};

/* 0 or -1; fini follows in any case */
int param_views_init(struct param_views *param_views, const struct handle_spec *spec);
void param_views_fini(struct param_views *param_views);
int param_views_visit(const struct param_views *param_views, visitproc visit, void *arg);

/* The only writer of `shown`. EXPOSED_NOTHING: what they show is shown anew the next time. 0, or -1 with
 * RuntimeError naming the unit and both kinds. */
int param_views_set_exposed(struct param_views *param_views, enum exposed exposed);
/* the invariant, where FSDP_C_CHECK is defined */
void param_views_check(const struct param_views *param_views);

/* `views`: a tuple, one per parameter. Modules show them, or what wrap_views makes of them. 0 or -1. */
int param_views_expose_views(struct param_views *param_views, PyObject *views);
void param_views_mark_assigned(struct param_views *param_views);
/* Without original parameters: views that torch.func.functional_call has put back among the parameters, where it
 * had assigned Parameters, are attributes again. 0 or -1. */
int param_views_restore_attributes(struct param_views *param_views, PyObject *views);
int param_views_wrap_views(struct param_views *param_views,
                           /* anew, after their history has changed; a no-op without wrap_views */
                           PyObject *views);
void param_views_drop_wrapped(struct param_views *param_views); /* other views are in use from now on */

/* The original parameters, each with its part of `shard` for its data; without them the views. 0 or -1. */
int param_views_expose_sharded(struct param_views *param_views, PyObject *shard, PyObject *views);
int param_views_expose_full_params(struct param_views *param_views, PyObject *full /* flat, unsharded */);

/* params[i].data = its part of the shard. 0 or -1 */
int param_views_point_params_at(struct param_views *param_views, PyObject *shard);

/* The entry in the module's _parameters. Borrowed, or NULL where it is not there; look at
 * PyErr_Occurred(). */
PyObject *param_views_value(const struct param_views *param_views, int64_t index);
int param_views_restore_param(const struct param_views *param_views,
                              int64_t param); /* the sharded Parameter, under all its names. 0 or -1 */
/* borrowed; what a DTensor holds here */
PyObject *param_views_local_value(const struct param_views *param_views, PyObject *value);
/* inside summon: on the Parameters shown there */
int param_views_expose_wrapped_grads(struct param_views *param_views, PyObject *full);

#endif
