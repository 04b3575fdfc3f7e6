/* Description of a flat parameter: tensor, layout, process groups and options. The components of a handle
 * read this struct, none writes to it.
 *
 * Invariant: nothing changes between flat_param_init and flat_param_fini but the name (used in messages), the
 * entries of `params` (a Parameter that the user registers in place of another is adopted), and the
 * collective functions of the groups. All lists have one entry per parameter of `layout`. */
#ifndef FSDP_HANDLE_FLAT_PARAM_H
#define FSDP_HANDLE_FLAT_PARAM_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stdbool.h>
#include <stdint.h>

#include "collective/collective.h"
#include "handle/config.h"
#include "layout/layout.h"

/* User of a unit's unsharded parameters: `training_state` of a handle, in the order of torch's
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
    int64_t *strides; /* owned; NULL if contiguous */
};

struct flat_param {
    PyObject *object; /* borrowed; the Python object that contains the handle */
    PyObject *tensor; /* owned; the flat Parameter, referenced by optimizers and users: never replaced */
    PyObject *params; /* owned; list of the original Parameters; NULL unless use_orig_params */
    PyObject *name;   /* owned; str, the unit's name in errors */
    PyObject *device; /* owned; compute device */

    struct flat_layout layout; /* copied; the arrays belong to layout_owner */
    PyObject *layout_owner;    /* owned */
    int64_t num_params;
    PyObject *shapes, *strides;       /* owned; tuples; a stride entry is None if contiguous */
    struct param_shape *param_shapes; /* owned; `shapes` and `strides` as integers */
    PyObject *fqns;                   /* owned; list of the parameters' fully qualified names */
    int64_t registration_id; /* never reused; marks Parameters that the user registers in the modules */

    enum sharding_strategy strategy;
    bool sharded; /* true unless NO_SHARD */
    bool use_orig_params;
    bool keep_low_precision_grads;
    bool skip_writeback_check;
    bool verbose; /* true under TORCH_DISTRIBUTED_DEBUG=INFO */
    struct collective_group shard_group;
    /* .group is NULL unless the strategy is hybrid, or is NO_SHARD in place of a hybrid strategy with one
     * rank per shard group */
    struct collective_group replicate_group;
};

/* Arguments of handle_init. References are borrowed for the call. */
struct handle_spec {
    PyObject *object; /* the Python object that contains the handle */
    struct config config;
    const struct flat_layout *layout;
    PyObject *layout_owner; /* owner of the layout's arrays */
    PyObject *flat_param, *params /* or None */, *shapes, *strides, *name;
    /* list of (param, module, name, setting): the first num_params entries are the parameters' own names, then
     * follow the other names of shared parameters */
    PyObject *param_views;
    PyObject *flat_param_owner; /* the module dict that holds the flat parameter, or None */
    PyObject *flat_param_name;  /* key of the flat parameter in that dict */
    PyObject *wrap_views;       /* or None */
};

/* Return 0, or -1 with an exception. Call flat_param_fini in either case. */
int flat_param_init(struct flat_param *param, const struct handle_spec *spec);
void flat_param_fini(struct flat_param *param);

/* Set an exception "rank R, unit U: ..." of the given type and return -1. The arguments after `type` are
 * those of PyErr_Format. The text ends with a remedy. */
int flat_param_error(const struct flat_param *param, PyObject *type, const char *format, ...);

/* Raise RuntimeError for an illegal transition and return -1. `remedy` may be empty. */
int flat_param_refuse(const struct flat_param *param, const char *from, const char *to, const char *remedy);

void flat_param_rename(struct flat_param *param, PyObject *name);

/* Return the parameter's fully qualified name. New reference. */
PyObject *flat_param_fqn(const struct flat_param *param, int64_t index);

/* Return one view per parameter of the unsharded tensor `full`, without autograd history. New tuple, or
 * NULL. flat_param_views_init() registers the op for it, once per process: 0, or -1 with ImportError. */
int flat_param_views_init(void);
PyObject *flat_param_views(const struct flat_param *param, PyObject *full);

/* Return 1 if some parameter requires a gradient, 0 if none does, -1 with an exception. */
int flat_param_is_trainable(const struct flat_param *param);

/* Return true if the strategy keeps parameters unsharded between forward and backward. */
bool flat_param_stays_unsharded(const struct flat_param *param);

#endif
