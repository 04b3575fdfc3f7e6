/* FSDP_USE_FULL_PREC_IN_EVAL: under mixed precision a unit in eval mode computes in the precision of its
 * shard (D-123). */
#include "runtime/runtime.h"
#include "torch/names.h"

int unit_is_training(const struct unit *unit) {
    PyObject *module = PyWeakref_GetObject(unit->module_ref);
    OWNED *wrapped = module ? PyObject_GetAttrString(module, "_fsdp_wrapped_module") : NULL;
    OWNED *training = wrapped ? PyObject_GetAttr(wrapped, torch_names.training) : NULL;
    return training ? PyObject_IsTrue(training) : -1;
}

static int use(struct unit *unit, enum precision precision) {
    struct handle *handle = unit->handle;
    if (storage_precision(&handle->storage) == precision)
        return 0;
    if (handle_take_over_views(handle) < 0)
        return -1;
    return unit_reshard(unit, true) < 0 ? -1 : handle_use_precision(handle, precision);
}

int unit_precision_for_forward(struct unit *unit) {
    if (!unit->full_precision_in_eval)
        return 0;
    int training = unit_is_training(unit);
    if (training < 0)
        return -1;
    unit->evaluating = !training;
    if (!unit->handle)
        return 0;
    FOR_PARTS(part, unit) {
        bool full = !training && storage_has_mixed_precision(&part->handle->storage);
        if (use(part, full ? PRECISION_FULL : PRECISION_COMPUTE) < 0)
            return -1;
    }
    return 0;
}

void unit_note_precision(struct unit *unit) {
    FOR_PARTS(part, unit)
        part->graph_precision = storage_precision(&part->handle->storage);
}

int unit_precision_for_backward(struct unit *unit) {
    FOR_PARTS(part, unit)
        if (use(part, part->graph_precision) < 0)
            return -1;
    return 0;
}
