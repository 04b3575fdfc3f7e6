/* Lifecycle of a handle, its training state, lazy init, moves of the flat parameter, exposed parameters and
 * precision. */
#include "handle/handle.h"

#include "torch/py_torch.h"
#include "torch/tensor.h"

#include "base/check.h"

/* ---- training state ---- */

static const bool training_allowed[USE_STATES][USE_STATES] = {
    [USE_IDLE] = {[USE_IDLE] = true,
                  [USE_FORWARD] = true,       /* pre-forward */
                  [USE_BACKWARD_PRE] = true,  /* pre-backward hook */
                  [USE_BACKWARD_POST] = true, /* no pre-backward ran: no output carried a hook */
                  [USE_SUMMON_FULL_PARAMS] = true},
    [USE_FORWARD] = {[USE_IDLE] = true},               /* post-forward */
    [USE_BACKWARD_PRE] = {[USE_BACKWARD_POST] = true,  /* all gradients were received */
                          [USE_IDLE] = true},          /* final callback without a gradient */
    [USE_BACKWARD_POST] = {[USE_BACKWARD_POST] = true, /* a second graph over the unit in the same backward */
                           [USE_BACKWARD_PRE] = true,
                           /* a reentrant checkpoint recomputes the unit after its gradients */
                           [USE_FORWARD] = true,
                           [USE_IDLE] = true}, /* final callback */
    [USE_SUMMON_FULL_PARAMS] = {[USE_IDLE] = true},
};

int handle_set_training_state(struct handle *handle, enum training_state state) {
    enum training_state from = handle->training_state;
    bool is_nested_backward =
        from == USE_FORWARD && (state == USE_BACKWARD_PRE || state == USE_BACKWARD_POST);
    if (!training_allowed[from][state])
        return flat_param_refuse(
            &handle->param, training_state_names[from], training_state_names[state],
            is_nested_backward
                ? ": a backward inside the unit's own forward has reached its parameters, which the rest of "
                  "the forward reads. Call backward() on the forward's output, after the forward, or wrap "
                  "the modules of the inner backward as units of their own."
                : "");
    handle->training_state = state;
    return 0;
}

/* ---- init and fini ---- */

/* Reset all fields but the pointers between components: getters must work after handle_fini(). */
static void zero(struct handle *handle) {
    *handle = (struct handle){
        .storage = {.param = &handle->param, .copy = handle->storage.copies},
        .param_views = {.param = &handle->param},
        .grads = {.param = &handle->param, .storage = &handle->storage},
    };
}

static struct handle *live_handles; /* borrowed; the latest live handle */

int handle_refuse_freed_view(const PyObject *tensor) {
    for (const struct handle *handle = live_handles; handle; handle = handle->next_live)
        if (storage_refuse_freed_view(&handle->storage, tensor) < 0)
            return -1; /* at once: raising may collect the handle */
    return 0;
}

int handle_init(struct handle *handle, const struct handle_spec *spec) {
    zero(handle);
    handle->next_live = live_handles;
    handle->live_place = &live_handles;
    if (live_handles)
        live_handles->live_place = &handle->next_live;
    live_handles = handle;
    if (flat_param_init(&handle->param, spec) < 0 || storage_init(&handle->storage, &spec->config) < 0 ||
        param_views_init(&handle->param_views, spec) < 0) {
        handle_fini(handle);
        return -1;
    }
    grads_init(&handle->grads, &spec->config);
    handle->summon.flat_param_owner =
        spec->flat_param_owner == Py_None ? NULL : Py_NewRef(spec->flat_param_owner);
    handle->summon.flat_param_name = Py_NewRef(spec->flat_param_name);
    return 0;
}

void handle_fini(struct handle *handle) {
    grads_fini(&handle->grads);
    storage_fini(&handle->storage);
    param_views_fini(&handle->param_views);
    if (handle->live_place)
        *handle->live_place = handle->next_live;
    if (handle->next_live)
        handle->next_live->live_place = handle->live_place;
    handle->live_place = NULL;
    handle->next_live = NULL;
    Py_CLEAR(handle->summon.full);
    Py_CLEAR(handle->summon.grad);
    Py_CLEAR(handle->summon.flat_param_owner);
    Py_CLEAR(handle->summon.flat_param_name);
    flat_param_fini(&handle->param);
    zero(handle);
}

int handle_visit(struct handle *handle, visitproc visit, void *arg) {
    const struct param_views *param_views = &handle->param_views;
    Py_VISIT(handle->summon.flat_param_owner);
    Py_VISIT(handle->param.tensor);
    Py_VISIT(handle->param.params);
    for (int i = 0; i < PRECISIONS; i++)
        Py_VISIT(handle->storage.copies[i].views);
    Py_VISIT(handle->storage.attributes);
    for (int64_t i = 0; param_views->all && i < param_views->count; i++) {
        Py_VISIT(param_views->all[i].module);
        Py_VISIT(param_views->all[i].parameters);
        Py_VISIT(param_views->all[i].attributes);
    }
    Py_VISIT(param_views->wrapped_views);
    Py_VISIT(param_views->wrap_views);
    Py_VISIT(handle->grads.comm_hook.function);
    Py_VISIT(handle->grads.comm_hook.state);
    Py_VISIT(handle->grads.pending);
    Py_VISIT(handle->grads.stashed_hooks);
    return 0;
}

void handle_check(const struct handle *handle) {
    INVARIANT(handle->storage.param == &handle->param && handle->param_views.param == &handle->param);
    INVARIANT(handle->grads.param == &handle->param && handle->grads.storage == &handle->storage);
    INVARIANT(!handle->summon.full || handle->training_state == USE_SUMMON_FULL_PARAMS);
    INVARIANT(handle->param.layout.rank == handle->param.shard_group.rank);
    storage_check(&handle->storage);
    param_views_check(&handle->param_views);
    grads_check(&handle->grads);
}

/* ---- lazy init ---- */

/* Read dtype and data of the shard, enough to expose sharded parameters. */
static int init_shard(struct handle *handle) {
    handle->initialized = false;
    if (storage_read_shard(&handle->storage) < 0)
        return -1;
    return handle->param.params
               ? param_views_point_params_at(&handle->param_views, handle->storage.local_shard)
               : 0;
}

/* Return 1 if the flat parameter's data is the known shard, 0 if not, -1 with an exception. */
static int has_shard_data(const struct handle *handle) {
    struct tensor_view view;
    const struct storage *storage = &handle->storage;
    if (tensor_view_of(handle->param.tensor, &view) < 0)
        return -1;
    return view.data == storage->local_view.data && view.dtype == storage->local_view.dtype;
}

int handle_lazy_init(struct handle *handle) {
    int same_data = handle->storage.local_shard && !handle->initialized ? has_shard_data(handle) : 0;
    if (same_data < 0 || (same_data && writeback_replace_shard(handle) < 0))
        return -1;
    if (init_shard(handle) < 0 || storage_follow_shard(&handle->storage) < 0)
        return -1;
    param_views_drop_wrapped(&handle->param_views);
    if (grads_lazy_init(&handle->grads) < 0)
        return -1;
    handle->initialized = true;
    if (storage_update_attributes(&handle->storage) < 0)
        return -1;
    CHECKED(handle_check(handle));
    return 0;
}

/* A user may assign `flat_param.data = other`: the new tensor becomes the shard. */
int handle_follow_flat_param(struct handle *handle) {
    PyObject *inference_guard;
    if (!handle->initialized)
        return handle_lazy_init(handle);
    int same_data = has_shard_data(handle);
    if (same_data)
        return same_data < 0 ? -1 : 0;
    if (torch_leave_inference_mode(&inference_guard) < 0)
        return -1;
    handle->writeback.copied = true;
    bool orig = handle->param.use_orig_params;
    int result = orig ? 0 : param_views_set_exposed(&handle->param_views, EXPOSED_NOTHING);
    if (!result)
        result = handle_lazy_init(handle);
    if (!result && !orig)
        result = handle_expose_views(handle);
    return torch_return_to_inference_mode(inference_guard) < 0 ? -1 : result;
}

/* torch.func.functional_call swaps the flat parameter without use_orig_params: see [Note: swapped parameters]
 * in writeback.c. */
int handle_check_flat_param(const struct handle *handle) {
    const struct summon *summon = &handle->summon;
    PyObject *registered = handle->param.use_orig_params || !summon->flat_param_owner
                               ? NULL
                               : PyDict_GetItemWithError(summon->flat_param_owner, summon->flat_param_name);
    if (!registered || registered == handle->param.tensor)
        return PyErr_Occurred() ? -1 : 0;
    return flat_param_error(
        &handle->param, PyExc_RuntimeError,
        "%S is another tensor than the unit's flat parameter, and its values would be ignored; "
        "torch.func.functional_call swaps tensors in this way. Call it under torch.no_grad() inside "
        "FullyShardedDataParallel.summon_full_params(module), with full parameters by their own names, or "
        "call it on a submodule inside the unit's forward. To change the shard, assign to flat_param.data.",
        summon->flat_param_name);
}

/* ---- a flat parameter that moves ---- */

int handle_begin_move(struct handle *handle) {
    if (handle->training_state != USE_IDLE)
        return 0;
    if (handle_collect_user_grads(handle) < 0)
        return -1;
    if (handle->storage.param_state == PARAM_SHARDED)
        return 0;
    if (handle_writeback_views(handle) < 0)
        return -1;
    return storage_reshard(&handle->storage, true) < 0 ? -1 : handle_expose_sharded(handle);
}

int handle_end_move(struct handle *handle) {
    if (param_views_set_exposed(&handle->param_views, EXPOSED_NOTHING) < 0)
        return -1;
    if ((handle->param.use_orig_params ? init_shard(handle) : handle_lazy_init(handle)) < 0)
        return -1;
    return handle_expose_sharded(handle) < 0 ? -1 : grads_move(&handle->grads);
}

static int adopt_data(struct handle *handle, PyObject *data) {
    if (torch_set_data(handle->param.tensor, data) < 0 || handle_follow_flat_param(handle) < 0)
        return -1;
    const struct storage *storage = &handle->storage;
    if (!storage->shard_moved_off_device)
        return 0;
    /* free the memory kept on the compute device */
    if (deferred_free_flush_buffer(storage->full_free, &handle->storage.copy->full) < 0)
        return -1;
    return storage->pool ? pool_empty(storage->pool) : 0;
}

int handle_flat_param_to(struct handle *handle, PyObject *args, PyObject *kwargs) {
    if (handle->training_state != USE_IDLE)
        return flat_param_error(&handle->param, PyExc_AssertionError,
                                "the flat parameter cannot be moved in state %s. Move it between steps, "
                                "outside of summon_full_params.",
                                training_state_names[handle->training_state]);
    if ((!handle->param.skip_writeback_check && handle_writeback(handle) < 0) ||
        storage_reshard(&handle->storage, true) < 0)
        return -1;
    OWNED *data = torch_data(handle->param.tensor);
    OWNED *method = data ? PyObject_GetAttrString(data, "to") : NULL;
    OWNED *to = method ? PyObject_Call(method, args, kwargs) : NULL;
    if (!to || adopt_data(handle, to) == 0)
        return to ? 0 : -1;
    /* Roll back to the previous data, and keep the first exception. */
    PyObject *error = PyErr_GetRaisedException();
    if (adopt_data(handle, data) < 0)
        PyErr_WriteUnraisable(handle->param.name);
    PyErr_SetRaisedException(error);
    return -1;
}

/* ---- exposed parameters ---- */

int handle_expose_views(struct handle *handle) {
    return param_views_expose_views(&handle->param_views, handle->storage.copy->views);
}

int handle_expose_sharded(struct handle *handle) {
    return param_views_expose_sharded(&handle->param_views, handle->storage.local_shard,
                                      handle->storage.copy->views);
}

bool handle_exposes_sharded(const struct handle *handle) {
    bool freed =
        handle->storage.param_state == PARAM_SHARDED && handle->param_views.exposed != EXPOSED_FULL_PARAMS;
    return handle->param.sharded && (freed || handle->param_views.exposed == EXPOSED_SHARDED);
}

bool handle_keeps_views_exposed(const struct handle *handle) {
    return handle->param.use_orig_params && flat_param_stays_unsharded(&handle->param);
}

int handle_unexpose_views(struct handle *handle) {
    if (!handle->param.use_orig_params || handle->training_state != USE_IDLE ||
        handle->param_views.exposed != EXPOSED_VIEWS)
        return 0;
    return handle_writeback_views(handle) < 0 ? -1 : handle_expose_sharded(handle);
}

/* Retry once: a module that keeps a view with autograd history would leak the unit. */
int handle_detach_views(struct handle *handle) {
    bool exposes_views = handle->param_views.exposed == EXPOSED_VIEWS;
    int result = -1;
    for (int attempt = 0; attempt < 2 && result < 0; attempt++) {
        if (attempt > 0)
            PyErr_Clear();
        result = storage_detach_views(&handle->storage);
        if (!result)
            param_views_drop_wrapped(&handle->param_views);
        if (!result && exposes_views)
            result = param_views_set_exposed(&handle->param_views, EXPOSED_NOTHING) < 0
                         ? -1
                         : handle_expose_views(handle);
    }
    return result;
}

/* ---- precision ---- */

int handle_use_precision(struct handle *handle, enum precision precision) {
    if (storage_precision(&handle->storage) == precision)
        return 0;
    bool orig = handle->param.use_orig_params, exposes_views = handle->param_views.exposed == EXPOSED_VIEWS;
    if (storage_reshard(&handle->storage, true) < 0)
        return -1;
    /* Drop the views of the former copy. Without use_orig_params modules always expose views, so those of the
     * new copy follow below. */
    if (exposes_views && (orig ? handle_expose_sharded(handle)
                               : param_views_set_exposed(&handle->param_views, EXPOSED_NOTHING)) < 0)
        return -1;
    if (storage_use_copy(&handle->storage, precision) < 0)
        return -1;
    param_views_drop_wrapped(&handle->param_views);
    return exposes_views && !orig ? handle_expose_views(handle) : 0;
}

/* The hook's dtype also holds for copies that a later lazy init makes. */
int handle_set_comm_hook(struct handle *handle, PyObject *function, PyObject *state, PyObject *dtype) {
    if (handle->grads.in_backward)
        return flat_param_error(&handle->param, PyExc_RuntimeError,
                                "a communication hook must be registered before a backward");
    bool native = dtype != Py_None;
    if (native && handle->initialized && handle_use_precision(handle, PRECISION_COMPUTE) < 0)
        return -1;
    if (native && storage_fix_reduce_dtype(&handle->storage, dtype) < 0)
        return -1;
    grads_set_comm_hook(&handle->grads, function, state, native);
    return 0;
}
