/* Gathering as a sequence: the user's changes, the shard, the all-gather; and in which precision. */
#include "handle/handle.h"
#include "torch/ref.h"

/* ---- before it ---- */

static int take_changes(struct handle *handle) {
    if (handle->writeback.taken || handle->storage.param_state != PARAM_SHARDED)
        return 0;
    if (!handle->param.skip_writeback_check && handle_writeback(handle) < 0)
        return -1;
    if (storage_refuse_elsewhere(&handle->storage) < 0)
        return -1;
    writeback_set_taken(&handle->writeback, true);
    return 0;
}

int handle_take_changes(struct handle *handle, bool *copied) {
    writeback_set_taken(&handle->writeback, false);
    if (take_changes(handle) < 0)
        return -1;
    *copied = writeback_take_copied(&handle->writeback);
    return 0;
}

int handle_pre_unshard(struct handle *handle) {
    if (handle->storage.param_state != PARAM_SHARDED || handle->storage.input_ready)
        return 0;
    if (take_changes(handle) < 0)
        return -1;
    if (storage_make_input(&handle->storage) == 0)
        return 0;
    writeback_set_taken(&handle->writeback, false);
    return -1;
}

/* ---- the gather ---- */

int handle_unshard_enqueue(struct handle *handle) {
    if (handle->storage.param_state != PARAM_SHARDED)
        return 0;
    if (handle_pre_unshard(handle) < 0)
        return -1;
    writeback_set_taken(&handle->writeback, false);
    return storage_unshard_enqueue(&handle->storage);
}

int handle_unshard_add(struct handle *handle, struct gather_batch *batch) {
    if (handle_pre_unshard(handle) < 0)
        return -1;
    writeback_set_taken(&handle->writeback, false);
    return storage_unshard_add(&handle->storage, batch);
}

void handle_free_unshard(struct handle *handle) {
    writeback_set_taken(&handle->writeback, false);
    storage_free_unshard(&handle->storage);
}

int handle_unshard_outside_step(struct handle *handle) {
    if (storage_alloc_outside_step(&handle->storage) == 0 && handle_unshard_enqueue(handle) == 0 &&
        storage_unshard_wait(&handle->storage) == 0)
        return 0;
    if (handle->storage.param_state == PARAM_SHARDED)
        handle_free_unshard(handle);
    return -1;
}

int handle_alloc_unsharded(struct handle *handle) {
    if (!handle->param.skip_writeback_check && handle_writeback(handle) < 0)
        return -1;
    return storage_alloc_unsharded(&handle->storage);
}

static int detach_views(struct handle *handle, bool shows) {
    if (storage_detach_views(&handle->storage) < 0)
        return -1;
    param_views_forget_wrapped(&handle->param_views);
    if (!shows)
        return 0;
    return param_views_show_nothing(&handle->param_views) < 0 ? -1 : handle_show_views(handle);
}

/* A module that keeps a view with its node keeps the whole unit for ever: one failure is not the end. */
int handle_detach_views(struct handle *handle) {
    bool shows = handle->param_views.shown == SHOWN_VIEWS;
    if (detach_views(handle, shows) == 0)
        return 0;
    PyErr_Clear();
    return detach_views(handle, shows);
}

/* ---- precision ---- */

int handle_use_precision(struct handle *handle, enum precision precision) {
    if (storage_precision(&handle->storage) == precision)
        return 0;
    bool orig = handle->param.use_orig_params, shows_views = handle->param_views.shown == SHOWN_VIEWS;
    if (storage_reshard(&handle->storage, true) < 0)
        return -1;
    /* the modules let go of the views; without original parameters they show those of the copy in use then */
    if (shows_views &&
        (orig ? handle_show_sharded(handle) : param_views_show_nothing(&handle->param_views)) < 0)
        return -1;
    if (storage_use_copy(&handle->storage, precision) < 0)
        return -1;
    param_views_forget_wrapped(&handle->param_views);
    return shows_views && !orig ? handle_show_views(handle) : 0;
}

/* A reduction in `dtype` is so from now on, also when lazy init comes later or comes again. */
int handle_set_comm_hook(struct handle *handle, PyObject *function, PyObject *state, PyObject *dtype) {
    if (gradients_check_hookless(&handle->gradients) < 0)
        return -1;
    bool native = dtype != Py_None;
    if (native && handle->ready && handle_use_precision(handle, PRECISION_COMPUTE) < 0)
        return -1;
    if (native && storage_fix_reduce_dtype(&handle->storage, dtype) < 0)
        return -1;
    gradients_set_comm_hook(&handle->gradients, function, state, native);
    return 0;
}
