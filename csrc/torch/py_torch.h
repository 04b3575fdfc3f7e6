/* Calls into torch's Python side, by interned attribute names and objects that are found once per process,
 * and hooks: Python callables through which torch calls the runtime. Each call is a function here, so that
 * the layers above do not handle Python attributes.
 *
 * Unless stated otherwise, functions return 0, or -1 with an exception, and objects as new references, or
 * NULL. */
#ifndef FSDP_TORCH_PY_TORCH_H
#define FSDP_TORCH_PY_TORCH_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stdbool.h>
#include <stdint.h>

#include "torch/ref.h"

/* Attribute names. Each field of this name has the interned string. */
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
    X(_base)                                                                                                 \
    X(_post_accumulate_grad_hooks)                                                                           \
    X(next_id)                                                                                               \
    X(_register_hook_dict)                                                                                   \
    X(view)                                                                                                  \
    X(detach)                                                                                                \
    X(_version)                                                                                              \
    X(_active_ddp_module)                                                                                    \
    X(_is_profiler_enabled)                                                                                  \
    X(training)

/* Objects of torch: field, module, path in the module. */
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

struct torch_names { /* all owned; never freed */
#define TORCH_NAME_FIELD(name)                 PyObject *name;
#define TORCH_OBJECT_FIELD(name, module, path) PyObject *name;
    TORCH_ATTRIBUTES(TORCH_NAME_FIELD)
    TORCH_OBJECTS(TORCH_OBJECT_FIELD)
#undef TORCH_NAME_FIELD
#undef TORCH_OBJECT_FIELD
};

extern struct torch_names torch_names;

/* Fill torch_names. Idempotent. */
int torch_names_init(void);

/* Return a new 1-D tensor of `numel` elements, not initialised. */
PyObject *torch_empty(int64_t numel, PyObject *dtype, PyObject *device);
PyObject *torch_zeros_like(PyObject *tensor);
int torch_zero(PyObject *tensor);             /* tensor.zero_() */
int torch_copy(PyObject *to, PyObject *from); /* to.copy_(from) */
/* to.copy_(from, non_blocking=True): the host does not wait when its memory is pinned */
int torch_enqueue_copy(PyObject *to, PyObject *from);
PyObject *torch_empty_like(PyObject *tensor); /* torch.empty_like(tensor), for a 1-D tensor */
/* Return an empty CPU tensor like `tensor`, pinned when `tensor` is on an accelerator. */
PyObject *torch_empty_pinned_like(PyObject *tensor);

int torch_set_data(PyObject *tensor, PyObject *data); /* tensor.data = data */
/* Set tensor.data where it must succeed: keep a set exception, report a failure as unraisable. */
void torch_restore_data(PyObject *tensor, PyObject *data);
int torch_set_grad(PyObject *tensor, PyObject *grad);         /* tensor.grad = grad; Py_None clears */
int torch_set_foreign_grad(PyObject *tensor, PyObject *grad); /* tensor.grad = grad of any shape and dtype */
PyObject *torch_get_grad(PyObject *tensor);                   /* tensor.grad, Py_None when absent */
/* Return the id of the backward that runs in this thread, -1 outside of a backward; -2 with an exception. */
int64_t torch_graph_task(void);
PyObject *torch_active_ddp(void);       /* Return the DistributedDataParallel whose forward runs, or None. */
int torch_will_execute(PyObject *node); /* Return 1 if the running backward executes `node`, else 0; or -1. */
int torch_keeps_graph(void);            /* Return retain_graph of the running backward: 1, 0 or -1. */
int torch_requires_grad(PyObject *tensor); /* 1, 0 or -1 */
/* Return the version counter: in-place writes, except those through `.data`; or -1. */
int64_t torch_version(PyObject *tensor);
bool torch_is_tensor(PyObject *object);
PyObject *torch_data(PyObject *tensor); /* tensor.data: no history, own version counter */
PyObject *torch_base(PyObject *tensor); /* tensor._base: the tensor of which it is a view, or Py_None */
PyObject *torch_grad_fn(PyObject *tensor);
PyObject *torch_backward_hooks(PyObject *tensor); /* tensor._backward_hooks: a dict, or Py_None */
/* tensor[offset : offset + numel].data */
PyObject *torch_part(PyObject *tensor, int64_t offset, int64_t numel);

/* Return tensor[offset : offset + numel] as a view of `shape`, with `strides` unless Py_None; not recorded by
 * autograd. */
PyObject *torch_view(PyObject *flat, int64_t offset, int64_t numel, PyObject *shape, PyObject *strides);

/* Return 1 if any hook was registered with torch in this process since the last call with the same `*seen`,
 * which starts as NULL, else 0; -1 and `*seen` is unchanged. A look at a tensor's hooks takes 20 times as
 * long. */
int torch_hooks_registered_since(PyObject **seen /* owned by the caller */);

bool torch_inference_mode(void);
/* Leave inference mode, with grad mode off, for work that outlives it: inference mode keeps the history of
 * detached views, and its tensors cannot be written outside of it. The caller must pass `*guard`, NULL when
 * inference mode was off, to torch_return_to_inference_mode(). */
int torch_leave_inference_mode(PyObject **guard);
/* Return to inference mode. Steals `guard`; keeps a set exception. */
int torch_return_to_inference_mode(PyObject *guard);

bool torch_grad_enabled(void);
void torch_set_grad_enabled(bool enabled);

/* ---- ranges in torch's profiler, by FSDP1's names, which users search traces for ---- */

/* Open a range. Return NULL without an exception while no profiler is on, after one dict lookup, and when the
 * range cannot be opened. */
PyObject *profile_begin(const char *name);

/* Open a range directly inside another one, without a second check for a profiler. */
PyObject *profile_begin_inner(const char *name);

/* Close the range; NULL is legal. Keeps a set exception. */
void profile_end(PyObject *range);

/* ---- Python callables over C functions, for torch's hook registrations ---- */

/* Returns 0, or -1 with an exception. The Python call returns None, so a hook changes no gradient. */
typedef int (*hook_function)(void *target);

/* Return a hook that calls `function` with `target`. The hook owns a reference to `owner`; with a NULL owner,
 * `target` must call hook_disarm() before it is destroyed. */
PyObject *hook_new(hook_function function, void *target, PyObject *owner);
/* Called with the hook's identity when the hook is destroyed without ever having been called. */
typedef int (*hook_drop_function)(void *target, const void *hook);
void hook_set_on_drop(PyObject *hook, hook_drop_function function);

void hook_disarm(PyObject *hook);
void *hook_target(PyObject *hook); /* Return the target; NULL once disarmed. */

#endif
