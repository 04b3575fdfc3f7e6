/* What a flat parameter is: its tensor, its layout, who shares it and how. The components of a handle read
 * it, and none writes it.
 *
 * Invariant: nothing here changes between flat_param_init and flat_param_fini but the name, which is for
 * messages, the entries of `params`, which follow the user's, and the groups' ways to communicate. `layout`
 * has as many parameters as all of the lists. */
#ifndef FSDP_HANDLE_FLAT_PARAM_H
#define FSDP_HANDLE_FLAT_PARAM_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stdbool.h>
#include <stdint.h>

#include "collective/collective.h"
#include "handle/config.h"
#include "layout/layout.h"

/* Who is using a unit's parameters: `training_state` of a handle, in the order of torch's
 * HandleTrainingState. */
enum training_state {
    USE_IDLE,
    USE_FORWARD,
    USE_BACKWARD_PRE,
    USE_BACKWARD_POST,
    USE_SUMMON_FULL_PARAMS,
    USE_STATES
};
extern const char *const training_state_names[USE_STATES];

struct param_shape {
    int64_t ndim;
    int64_t *sizes;
    int64_t *strides; /* NULL when contiguous */
};

struct flat_param {
    PyObject *tensor; /* owned; the optimizer's and the user's object, never replaced */
    PyObject *params; /* owned; list of the original Parameters, NULL unless use_orig_params */
    PyObject *name;   /* owned; str, names the unit in errors */
    PyObject *device; /* owned; compute device */

    struct flat_layout layout; /* a copy; its arrays belong to layout_owner */
    PyObject *layout_owner;    /* owned */
    int64_t num_params;
    PyObject *shapes, *strides;       /* owned; tuples; a stride entry is None for a contiguous parameter */
    struct param_shape *param_shapes; /* owned; the same as integers */
    PyObject
        *param_views; /* owned; list of (param, module, name, setting): a parameter's own name comes first */
    int64_t op_id;    /* by which torch.ops.fsdp_c find the handle */

    enum sharding_strategy strategy;
    bool sharded; /* not NO_SHARD */
    bool use_orig_params;
    bool keep_low_precision_grads;
    bool skip_writeback_check;
    bool verbose; /* TORCH_DISTRIBUTED_DEBUG=INFO */
    struct collective_group shard_group;
    /* .group NULL unless hybrid, or NO_SHARD that was hybrid over shard groups of one rank */
    struct collective_group replicate_group;
};

/* Everything handle_init needs; references are borrowed for the call. */
struct handle_spec {
    struct config config;
    const struct flat_layout *layout;
    PyObject *layout_owner; /* the object that owns the layout's arrays */
    PyObject *flat_param, *params /* or None */, *shapes, *strides, *name;
    PyObject *param_views;      /* list of (param, module, name, setting) */
    PyObject *flat_param_owner; /* the dict where it is registered, or None */
    PyObject *flat_param_name;  /* by which it is registered there */
    PyObject *wrap_views;       /* or None */
};

/* 0 or -1; flat_param_fini follows in any case. */
int flat_param_init(struct flat_param *param, const struct handle_spec *spec, int64_t op_id);
void flat_param_fini(struct flat_param *param);
int flat_param_visit(const struct flat_param *param, visitproc visit, void *arg);

void flat_param_check(const struct flat_param *param); /* the invariant, where FSDP_C_CHECK is defined */

/* -1 with an exception of this type, "rank R, unit U: ...", which ends in what to do instead. `format` and
 * what follows are as for PyErr_Format. */
int flat_param_error(const struct flat_param *param, PyObject *type, const char *format, ...);

/* -1 with RuntimeError: one of its states may not go from one to the other. `remedy` may be empty. */
int flat_param_refuse(const struct flat_param *param, const char *from, const char *to, const char *remedy);

void flat_param_rename(struct flat_param *param, PyObject *name);

/* For messages: a parameter's name from its unit, or in its module where nobody has named it. New
 * reference. */
PyObject *flat_param_fqn(const struct flat_param *param, int64_t index);

/* One view per parameter over a flat tensor of unsharded values, below autograd. New tuple, or NULL. */
PyObject *flat_param_views(const struct flat_param *param, PyObject *full);

/* 1 when any parameter requires a gradient, 0 or -1. */
int flat_param_is_trainable(const struct flat_param *param);

/* Does the unsharded parameter stay from a forward to its backward? */
bool flat_param_stays_unsharded(const struct flat_param *param);

#endif
