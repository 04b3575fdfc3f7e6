/* [Note: checkpoints inside a unit]
 * A reentrant checkpoint around a part of a unit's module runs a backward of its own within the unit's. It brings the gradients of the
 * part, and the anchor's hook, but the backward around it reads the parameters still, and brings the other gradients. Then they are
 * added up as under no_sync, and it is that one's hook that reduces and frees the unit. If it does not come to the anchor, since all
 * of the module is checkpointed, that is done at once. Autograd is asked which it is: in the first backward of a unit, and in all
 * that follow one within which another was seen. Where nobody has asked, the end of the backward reduces what is left. */
#include "runtime/runtime.h"
#include "torch/names.h"

int unit_begin_backward(struct unit *unit) {
    unit->graph_task = unit->recomputed ? torch_graph_task() : unit->runtime->graph_task;
    unit->nested = false;
    int comes = unit->may_nest && unit->anchor_node ? torch_will_execute(unit->anchor_node) : 1;
    unit->anchor_comes = comes;
    return unit->graph_task == -2 || comes < 0 ? -1 : 0;
}

int unit_awaits_gradients(struct unit *unit) {
    int64_t current = unit->ran_pre_backward ? torch_graph_task() : unit->graph_task;
    if (current == -2)
        return -1;
    if (current == unit->graph_task)
        unit->may_nest = unit->nested;
    else
        unit->may_nest = unit->nested = true;
    return current != unit->graph_task && unit->anchor_comes;
}
