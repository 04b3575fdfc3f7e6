/* What the ranks of a node keep of a forward's unsharded parameters, for the backward to gather from. */
#include "handle/storage.h"
#include "torch/names.h"
#include "torch/tensor.h"

int storage_init_node_part(const struct storage *storage, struct precision_copy *copy) {
    const struct flat_param *param = storage->param;
    if (!param->node_group.group || copy->is_local || !flat_param_reshards_after_forward(param))
        return 0;
    int64_t numel = param->layout.padded_numel / param->node_group.world_size;
    copy->node_source = torch_part(copy->full.tensor, param->node_group.rank * numel, numel);
    if (!copy->node_source || buffer_init(&copy->node_part, numel, copy->dtype, param->device, true) < 0)
        return -1;
    return buffer_free(&copy->node_part);
}

/* On the stream that computes, to which the memory belongs: the backward's gather comes after the last use of what is gathered now,
 * and is waited for before the part is forgotten. */
int storage_keep_node_part(struct storage *storage) {
    struct precision_copy *copy = storage->copy;
    if (!copy->node_source || storage->param_state == PARAM_SHARDED)
        return 0;
    if (buffer_alloc(&copy->node_part) < 0)
        return -1;
    PyObject *done = PyObject_CallMethod(copy->node_part.tensor, "copy_", "O", copy->node_source);
    Py_XDECREF(done);
    return done ? 0 : -1;
}

/* A gather that is in flight may read it: whoever waits for that forgets it. */
int storage_forget_node_part(struct storage *storage) {
    for (int i = 0; storage->param_state != PARAM_UNSHARDING && i < PRECISIONS; i++)
        if (buffer_free(&storage->copies[i].node_part) < 0)
            return -1;
    return 0;
}
