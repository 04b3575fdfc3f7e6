/* One thread at a time uses a tree.
 *
 * A state dict, or a look at whole parameters, in one thread while another steps the same model would take what that one is amid for
 * what a failed backward has left, and drop it. It is refused, and so is a step that begins while another thread is amid a state dict:
 * each before it changes anything. Both are asked once per step, so that a forward of an inner unit alone is not. */
#include "handle/unit_error.h"
#include "runtime/runtime.h"

static bool is_in_backward(void) {
    return torch_graph_task() >= 0;
}

static int refuse(const struct runtime *runtime, const char *what, const char *remedy) {
    if (!runtime->num_units)
        return 0;
    return unit_error(PyExc_RuntimeError, unit_rank(runtime->units[0]), runtime->units[0]->name,
                      "another thread is amid %s of this model, and %s. The other thread goes on.", what, remedy);
}

/* On a GPU autograd's own thread runs the backward of the thread of the forward. */
int runtime_check_thread(const struct runtime *runtime) {
    unsigned long thread = PyThread_get_thread_ident();
    bool is_stepped = runtime->num_in_forward || runtime->callback_queued;
    if (is_stepped && runtime->forward_thread != thread && !is_in_backward())
        return refuse(
            runtime, "a forward or backward",
            "whoever looks at its parameters meanwhile, as state_dict() does, must be the thread that trains: "
            "call it there, or after the step");
    return runtime_check_holder(runtime);
}

int runtime_check_holder(const struct runtime *runtime) {
    if (!runtime->holder || runtime->holder == PyThread_get_thread_ident())
        return 0;
    return refuse(runtime, "a state dict",
                  "nothing else can use its parameters until that is done: wait for that thread");
}

int runtime_hold(struct runtime *runtime) {
    if (runtime_check_thread(runtime) < 0)
        return -1;
    bool held = runtime->holder;
    runtime->holder = PyThread_get_thread_ident();
    return !held;
}

void runtime_let_go(struct runtime *runtime) {
    runtime->holder = 0;
}
