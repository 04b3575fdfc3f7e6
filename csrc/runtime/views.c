/* The views of a unit lose their history: see [Note: one node per unit]. */
#include "runtime/runtime.h"

static int detach_part(struct unit *part) {
    part->in_node = false;
    return handle_detach_views(part->handle);
}

int unit_detach_part(struct unit *part) {
    PyObject *left;
    if (torch_leave_inference_mode(&left) < 0)
        return -1;
    int result = detach_part(part);
    return torch_return_to_inference_mode(left) < 0 ? -1 : result;
}

int unit_detach_views(struct unit *unit) {
    if (!unit->views_attached || !unit->handle)
        return 0;
    unit->views_attached = false;
    FOR_PARTS(part, unit)
        if (unit_detach_part(part) < 0)
            return -1;
    return 0;
}

void runtime_detach_views(struct runtime *runtime) {
    for (int64_t i = 0; i < runtime->num_units; i++)
        if (unit_detach_views(runtime->units[i]) < 0)
            PyErr_WriteUnraisable(runtime->units[i]->name);
}
