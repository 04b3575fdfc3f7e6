/* Building and dropping a handle. */
#include "handle/handle.h"

#include <string.h>

#include "handle/handle_table.h"

/* A handle that has ended may yet be asked: its components know each other then, too. */
static void zero(struct handle *handle) {
    memset(handle, 0, sizeof *handle);
    storage_bind(&handle->storage, &handle->param);
    slots_bind(&handle->slots, &handle->param);
    gradients_bind(&handle->gradients, &handle->param, &handle->storage, &handle->published);
    edits_bind(&handle->edits, &handle->param, &handle->storage, &handle->slots, &handle->gradients,
               &handle->training_state);
}

static int init_components(struct handle *handle, const struct handle_spec *spec) {
    int64_t op_id = handle_table_add(handle);
    if (op_id < 0 || flat_param_init(&handle->param, spec, op_id) < 0 || storage_init(&handle->storage, spec) < 0 ||
        slots_init(&handle->slots, spec) < 0)
        return -1;
    gradients_init(&handle->gradients, spec);
    handle->summon.flat_param_owner = spec->flat_param_owner == Py_None ? NULL : Py_NewRef(spec->flat_param_owner);
    handle->summon.flat_param_name = Py_NewRef(spec->flat_param_name);
    return 0;
}

int handle_init(struct handle *handle, const struct handle_spec *spec) {
    zero(handle);
    if (init_components(handle, spec) == 0)
        return 0;
    handle_fini(handle);
    return -1;
}

void handle_fini(struct handle *handle) {
    gradients_fini(&handle->gradients);
    storage_fini(&handle->storage);
    slots_fini(&handle->slots);
    handle_table_remove(handle->param.op_id);
    published_fini(&handle->published);
    layer_calls_fini(&handle->layer_calls);
    Py_CLEAR(handle->summon.full);
    Py_CLEAR(handle->summon.grad);
    Py_CLEAR(handle->summon.flat_param_owner);
    Py_CLEAR(handle->summon.flat_param_name);
    flat_param_fini(&handle->param);
    zero(handle);
}

int handle_visit(struct handle *handle, visitproc visit, void *arg) {
    Py_VISIT(handle->summon.flat_param_owner);
    Py_VISIT(handle->published.dict);
    int result = flat_param_visit(&handle->param, visit, arg);
    if (!result)
        result = storage_visit(&handle->storage, visit, arg);
    if (!result)
        result = slots_visit(&handle->slots, visit, arg);
    if (!result)
        result = layer_calls_visit(&handle->layer_calls, visit, arg);
    return result ? result : gradients_visit(&handle->gradients, visit, arg);
}
