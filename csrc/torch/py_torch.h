/* The Python side of torch: what the runtime calls of it, by interned attribute names and bound functions,
 * found once per process, and, as hooks, what it calls of the runtime. Each call has a function here, so that
 * the layers above read as verbs. */
#ifndef FSDP_TORCH_PY_TORCH_H
#define FSDP_TORCH_PY_TORCH_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stdbool.h>
#include <stdint.h>

#include "torch/ref.h"

/* attribute name -> field of the same name holding the interned string */
#define TORCH_ATTRIBUTES(X)                                                                                  \
    X(data)                                                                                                  \
    X(grad)                                                                                                  \
    X(requires_grad)                                                                                         \
    X(grad_fn)                                                                                               \
    X(grad_dtype)                                                                                            \
    X(dtype)                                                                                                 \
    X(device)                                                                                                \
    X(wait)                                                                                                  \
    X(unit)                                                                                                  \
    X(parts)                                                                                                 \
    X(materialize_grads)                                                                                     \
    X(non_differentiable)                                                                                    \
    X(_backward_hooks)                                                                                       \
    X(_post_accumulate_grad_hooks)                                                                           \
    X(next_id)                                                                                               \
    X(_register_hook_dict)                                                                                   \
    X(view)                                                                                                  \
    X(detach)                                                                                                \
    X(_version)                                                                                              \
    X(_active_ddp_module)                                                                                    \
    X(_module_parameters)                                                                                    \
    X(_is_profiler_enabled)                                                                                  \
    X(training)

/* field, and what it holds: a module, and the path in it */
#define TORCH_OBJECTS(X)                                                                                     \
    X(tensor_type, "torch", "Tensor")                                                                        \
    X(empty, "torch", "empty")                                                                               \
    X(empty_like, "torch", "empty_like")                                                                     \
    X(uint8, "torch", "uint8")                                                                               \
    X(int32, "torch", "int32")                                                                               \
    X(split_with_sizes, "torch", "split_with_sizes")                                                         \
    X(is_inference_mode_enabled, "torch", "is_inference_mode_enabled")                                       \
    X(parameter_type, "torch.nn", "Parameter")                                                               \
    X(data_parallel, "torch.nn.parallel", "DistributedDataParallel")                                         \
    X(removable_handle, "torch.utils.hooks", "RemovableHandle")                                              \
    X(inference_mode_guard, "torch._C", "_InferenceMode")                                                    \
    X(no_dispatch_guard, "torch._C", "_DisableTorchDispatch")                                                \
    X(profiler, "torch.autograd", "profiler")                                                                \
    X(record_function, "torch.autograd.profiler", "record_function")                                         \
    X(graph_task_id, "torch._C", "_current_graph_task_id")                                                   \
    X(count_dispatch_modes, "torch._C", "_len_torch_dispatch_stack")                                         \
    X(will_execute, "torch._C", "_will_engine_execute_node")                                                 \
    X(keeps_graph, "torch._C", "_autograd._get_current_graph_task_keep_graph")                               \
    X(queue_callback, "torch.autograd.variable", "Variable._execution_engine.queue_callback")

struct torch_names { /* owned for ever, all of them */
#define TORCH_NAME_FIELD(name)                 PyObject *name;
#define TORCH_OBJECT_FIELD(name, module, path) PyObject *name;
    TORCH_ATTRIBUTES(TORCH_NAME_FIELD)
    TORCH_OBJECTS(TORCH_OBJECT_FIELD)
#undef TORCH_NAME_FIELD
#undef TORCH_OBJECT_FIELD
};

extern struct torch_names torch_names;

/* Fill torch_names. 0, or -1 with an exception. Idempotent. */
int torch_names_init(void);

/* New 1-D tensor of `numel` elements, not initialised. NULL with an exception. */
PyObject *torch_empty(int64_t numel, PyObject *dtype, PyObject *device);
PyObject *torch_zeros_like(PyObject *tensor);
int torch_zero(PyObject *tensor);             /* tensor.zero_(). 0 or -1 */
int torch_copy(PyObject *to, PyObject *from); /* to.copy_(from). 0 or -1 */
/* the same; nobody waits where the host's memory is pinned */
int torch_enqueue_copy(PyObject *to, PyObject *from);
PyObject *torch_empty_like(PyObject *tensor); /* of one dimension */
/* in CPU memory, pinned where there is a GPU to copy from */
PyObject *torch_empty_pinned_like(PyObject *tensor);

int torch_set_data(PyObject *tensor, PyObject *data); /* tensor.data = data */
/* where it must succeed; an exception stays set */
void torch_restore_data(PyObject *tensor, PyObject *data);
int torch_set_grad(PyObject *tensor, PyObject *grad);         /* tensor.grad = grad; Py_None clears */
int torch_set_foreign_grad(PyObject *tensor, PyObject *grad); /* of any shape and dtype */
PyObject *torch_get_grad(PyObject *tensor);                   /* new reference, Py_None when absent */
int64_t torch_graph_task(void); /* of the backward that runs in this thread; -1: none. -2 */
/* new reference to the DistributedDataParallel amid its forward, or None */
PyObject *torch_active_ddp(void);
int torch_will_execute(PyObject *node);    /* in that backward? 1, 0 or -1 */
int torch_keeps_graph(void);               /* retain_graph of that backward: 1, 0 or -1 */
int torch_requires_grad(PyObject *tensor); /* 1, 0, or -1 */
/* counts what was written in place, but not through `.data`; or -1 */
int64_t torch_version(PyObject *tensor);
bool torch_is_tensor(PyObject *object);
PyObject *torch_data(PyObject *tensor); /* tensor.data: own version counter, no history */
/* that of tensor[offset:offset + numel] */
PyObject *torch_part(PyObject *tensor, int64_t offset, int64_t numel);

/* tensor[offset : offset + numel] as a tensor of `shape`, with `strides` unless that is Py_None; outside of
 * autograd. */
PyObject *torch_view(PyObject *flat, int64_t offset, int64_t numel, PyObject *shape, PyObject *strides);

/* Has anybody in this process registered a hook with torch since the call before with the same `*seen`, which
 * is NULL at first? Looking at a tensor's hooks is 20 times slower. 1, 0, or -1 and `*seen` is as it was. */
int torch_hooks_registered_since(PyObject **seen /* owned by the caller */);

bool torch_inference_mode(void);
/* In inference mode no history is let go of, and nothing that is made may be written outside of it: so it is
 * left, without grad mode, for what outlives it. `*guard`: what to return to it with, which comes in any case;
 * NULL where it was not on. 0 or -1 */
int torch_leave_inference_mode(PyObject **guard);
/* Steals `left`. An exception that is set stays. 0 or -1 */
int torch_return_to_inference_mode(PyObject *guard);

/* Grad mode around code that must or must not record. */
bool torch_grad_enabled(void);
void torch_set_grad_enabled(bool enabled);

/* ---- ranges in torch's profiler, under the names that users grep traces for (D-130). One dict lookup while
 * no profiler is on. ---- */

/* Open a range. NULL, without an exception, when no profiler is on or the range cannot be opened. */
PyObject *profile_begin(const char *name);

/* The same for a range directly inside one: whether a profiler is on is not asked anew. */
PyObject *profile_begin_inner(const char *name);

/* Close it; NULL is legal. A pending exception stays as it is. */
void profile_end(PyObject *range);

/* ---- Python callables over C functions, for torch's hook registrations ---- */

/* 0 or -1 with an exception. A hook answers Python with None: it changes no gradient. */
typedef int (*hook_function)(void *target);

/* A hook on `target`. `owner`, when not NULL, is kept alive by the hook; without one the target must call
 * hook_disarm before it goes. New reference or NULL. */
PyObject *hook_new(hook_function function, void *target, PyObject *owner);
/* `function` is called when the hook goes without ever having been called, with the hook to know it by. */
typedef int (*hook_drop_function)(void *target, const void *hook);
void hook_set_on_drop(PyObject *hook, hook_drop_function function);

void hook_disarm(PyObject *hook);
void *hook_target(PyObject *hook); /* NULL once disarmed */

#endif
