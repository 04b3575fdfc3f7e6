/* One warning per root for units whose trainable parameters never receive a gradient. */
#include "runtime/no_gradient.h"

#include "runtime/callbacks.h"
#include "runtime/runtime.h"

void no_gradient_mark_reached(struct unit *unit) {
    unit->no_gradient.had_gradient = true;
}

int no_gradient_expect(struct unit *unit) {
    if (!unit->handle || !unit->runtime || !unit->node.views_attached || unit->no_gradient.had_gradient ||
        unit->runtime->no_gradient.warned || unit->optional.enclosing)
        return 0;
    int training = unit_is_training(unit);
    unit->no_gradient.expected = training > 0;
    return training < 0 ? -1 : 0;
}

void no_gradient_mark_backward_end(struct runtime *runtime) {
    runtime->no_gradient.ended_backward = true;
}

int no_gradient_warn(struct runtime *runtime) {
    OWNED *names = NULL;
    for (int64_t i = 0; !runtime->no_gradient.warned && i < runtime->num_units; i++) {
        struct unit *unit = runtime->units[i];
        bool lacks_gradient = unit->no_gradient.expected && runtime->no_gradient.ended_backward &&
                              !unit->no_gradient.had_gradient;
        unit->no_gradient.expected = false;
        if (lacks_gradient &&
            ((!names && !(names = PyList_New(0))) || PyList_Append(names, unit->handle->param.name) < 0))
            return -1;
    }
    runtime->no_gradient.ended_backward = false;
    OWNED *module = names ? unit_module(runtime->units[0]) : NULL;
    if (!module)
        return 0;
    runtime->no_gradient.warned = true;
    return callbacks_call(callbacks.warn_of_units_without_gradient, module, names);
}
