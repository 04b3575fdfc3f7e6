/* The configuration of one unit: the fields of fsdp_c.sharding.configuration.UnitConfig. The constructor of
 * a handle and that of a unit read it; each copies the fields that it keeps. */
#ifndef FSDP_HANDLE_CONFIG_H
#define FSDP_HANDLE_CONFIG_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>

enum sharding_strategy {
    FULL_SHARD = 1,
    SHARD_GRAD_OP,
    NO_SHARD,
    HYBRID_SHARD,
    HYBRID_SHARD_ZERO2
}; /* torch's values */

enum backward_prefetch { PREFETCH_NONE, PREFETCH_BACKWARD_PRE, PREFETCH_BACKWARD_POST }; /* torch's values */

/* Settings of a unit's steps. */
struct unit_options {
    int backward_prefetch; /* enum backward_prefetch; the other fields are booleans */
    int cast_forward_inputs, cast_root_forward_inputs, forward_prefetch, limit_all_gathers;
    int full_precision_in_eval; /* FSDP_USE_FULL_PREC_IN_EVAL */
};

/* All references are borrowed from the UnitConfig. */
struct config {
    PyObject *shard_group, *replicate_group /* or None */, *device;
    PyObject *param_dtype, *reduce_dtype; /* or None */
    int strategy;                         /* enum sharding_strategy */
    int use_orig_params, offload_params, keep_low_precision_grads, skip_writeback_check, verbose; /* bools */
    double predivide, postdivide;
    struct unit_options options;
};

/* 0, or -1 with TypeError for an object that is no UnitConfig. */
int config_read(struct config *config, PyObject *unit_config);

#endif
