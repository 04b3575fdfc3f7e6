#include "torch/py_torch.h"

#include "kernels/convert.h"
#include "torch/tensor.h"
#include "torch/torch_abi.h"

struct torch_names torch_names;

static PyObject *profiler_dict; /* borrowed; dict of torch.autograd.profiler */
static bool profiler_is_on;     /* value at the last call of profile_begin() */

static int find_torch_objects(void) {
#define TORCH_NAME_INTERN(name)                                                                              \
    if (!(torch_names.name = PyUnicode_InternFromString(#name)))                                             \
        return -1;
#define TORCH_OBJECT_FIND(name, module, path)                                                                \
    if (!(torch_names.name = ref_find(module, path)))                                                        \
        return -1;
    TORCH_ATTRIBUTES(TORCH_NAME_INTERN)
    TORCH_OBJECTS(TORCH_OBJECT_FIND)
#undef TORCH_NAME_INTERN
#undef TORCH_OBJECT_FIND
    return 0;
}

/* A frequently used attribute of Parameter. A call of its descriptor saves the slower attribute lookup. */
struct attribute {
    PyObject *descriptor; /* owned; never freed */
    descrgetfunc get;     /* slot of the descriptor's type, or NULL */
    descrsetfunc set;     /* slot of the descriptor's type, or NULL */
};

static struct attribute grad_attribute, data_attribute, requires_grad_attribute, version_attribute;
static struct attribute base_attribute, grad_fn_attribute, backward_hooks_attribute;

static int find_attribute(const char *name, struct attribute *attribute) {
    attribute->descriptor = PyObject_GetAttrString(torch_names.parameter_type, name);
    if (!attribute->descriptor)
        return -1;
    attribute->get = (descrgetfunc)PyType_GetSlot(Py_TYPE(attribute->descriptor), Py_tp_descr_get);
    attribute->set = (descrsetfunc)PyType_GetSlot(Py_TYPE(attribute->descriptor), Py_tp_descr_set);
    return 0;
}

static bool is_parameter(PyObject *tensor) {
    return (PyObject *)Py_TYPE(tensor) == torch_names.parameter_type;
}

static PyObject *read_attribute(PyObject *tensor, const struct attribute *attribute, PyObject *name) {
    bool is_plain = is_parameter(tensor) || (PyObject *)Py_TYPE(tensor) == torch_names.tensor_type;
    if (is_plain && attribute->get) /* Tensor and Parameter share the descriptors that they inherit */
        return attribute->get(attribute->descriptor, tensor, torch_names.parameter_type);
    return PyObject_GetAttr(tensor, name);
}

static int write_attribute(PyObject *tensor, const struct attribute *attribute, PyObject *name,
                           PyObject *value) {
    if (is_parameter(tensor) && attribute->set)
        return attribute->set(attribute->descriptor, tensor, value);
    return PyObject_SetAttr(tensor, name, value);
}

/* Set rounds_once_to_float16, which is true for torch's default kernels for aarch64. 0 or -1. */
static int init_float16_rounding(void) {
    int result = 0;
#ifdef __aarch64__
    OWNED *get_capability = ref_find("torch._C", "_get_cpu_capability");
    OWNED *kernels = get_capability ? PyObject_CallNoArgs(get_capability) : NULL;
    result = kernels ? 0 : -1;
    rounds_once_to_float16 = kernels && PyUnicode_CompareWithASCIIString(kernels, "DEFAULT") == 0;
#endif
    return result;
}

/* ---- the type of hooks ---- */

struct hook {
    PyObject_HEAD
    hook_function function;
    hook_drop_function on_drop; /* called once when the hook is dropped; NULL if none, and after the call */
    void *target;               /* borrowed; NULL once disarmed */
    PyObject *owner;            /* owned, or NULL */
};

static PyTypeObject *hook_type; /* owned; never freed */

static PyObject *hook_call(PyObject *self, PyObject *args, PyObject *kwargs) {
    struct hook *hook = (struct hook *)self;
    (void)args;
    (void)kwargs;
    hook->on_drop = NULL;
    if (hook->target && hook->function && hook->function(hook->target) < 0)
        return NULL;
    Py_RETURN_NONE;
}

static int hook_traverse(PyObject *self, visitproc visit, void *arg) {
    Py_VISIT(Py_TYPE(self));
    Py_VISIT(((struct hook *)self)->owner);
    return 0;
}

static int hook_clear(PyObject *self) {
    struct hook *hook = (struct hook *)self;
    hook->target = NULL;
    Py_CLEAR(hook->owner);
    return 0;
}

static void hook_dealloc(PyObject *self) {
    PyTypeObject *type = Py_TYPE(self);
    struct hook *hook = (struct hook *)self;
    PyObject_GC_UnTrack(self);
    if (hook->on_drop && hook->target) {
        PyObject *error = PyErr_GetRaisedException();
        if (hook->on_drop(hook->target, hook) < 0)
            PyErr_WriteUnraisable((PyObject *)type);
        PyErr_SetRaisedException(error);
    }
    hook_clear(self);
    PyObject_GC_Del(self);
    Py_DECREF(type);
}

static PyType_Slot slots[] = {
    {Py_tp_call, hook_call},
    {Py_tp_traverse, hook_traverse},
    {Py_tp_clear, hook_clear},
    {Py_tp_dealloc, hook_dealloc},
    {Py_tp_doc, "A hook of the fsdp_c runtime. Not serialisable."},
    {0, NULL},
};

static PyType_Spec spec = {
    .name = "fsdp_c._C.Hook",
    .basicsize = sizeof(struct hook),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_DISALLOW_INSTANTIATION,
    .slots = slots,
};

static int make_hook_type(void) {
    hook_type = (PyTypeObject *)PyType_FromSpec(&spec);
    if (!hook_type)
        return -1;
    /* torch warns that hooks are not serialised with their tensor, except for types with this attribute */
    return PyObject_SetAttrString((PyObject *)hook_type, "__torch_unserializable__", Py_True);
}

/* ---- once per process ---- */

int torch_names_init(void) {
    static bool initialised;
    if (!initialised &&
        (find_torch_objects() < 0 || find_attribute("grad", &grad_attribute) < 0 ||
         find_attribute("data", &data_attribute) < 0 ||
         find_attribute("requires_grad", &requires_grad_attribute) < 0 ||
         find_attribute("_version", &version_attribute) < 0 || find_attribute("_base", &base_attribute) < 0 ||
         find_attribute("grad_fn", &grad_fn_attribute) < 0 ||
         find_attribute("_backward_hooks", &backward_hooks_attribute) < 0 || init_float16_rounding() < 0 ||
         make_hook_type() < 0))
        return -1;
    profiler_dict = PyModule_GetDict(torch_names.profiler);
    initialised = true;
    return 0;
}

PyObject *torch_empty(int64_t numel, PyObject *dtype, PyObject *device) {
    OWNED *args = Py_BuildValue("(L)", (long long)numel);
    OWNED *kwargs = Py_BuildValue("{sOsO}", "dtype", dtype, "device", device);
    return args && kwargs ? PyObject_Call(torch_names.empty, args, kwargs) : NULL;
}

PyObject *torch_empty_like(PyObject *tensor) {
    OWNED *modes = PyObject_CallNoArgs(torch_names.count_dispatch_modes);
    long count = modes ? PyLong_AsLong(modes) : -1;
    if (!count)
        return PyObject_CallFunctionObjArgs(torch_names.empty_like, tensor, NULL);
    /* `tensor` may have no memory: keep it from a TorchDispatchMode, which may read its arguments */
    OWNED *numel = count > 0 ? PyObject_CallMethod(tensor, "numel", NULL) : NULL;
    OWNED *dtype = numel ? PyObject_GetAttr(tensor, torch_names.dtype) : NULL;
    OWNED *device = dtype ? PyObject_GetAttr(tensor, torch_names.device) : NULL;
    return device ? torch_empty(PyLong_AsLongLong(numel), dtype, device) : NULL;
}

PyObject *torch_zeros_like(PyObject *tensor) {
    PyObject *zeros = torch_empty_like(tensor);
    if (zeros && torch_zero(zeros) < 0)
        Py_CLEAR(zeros);
    return zeros;
}

int torch_zero(PyObject *tensor) {
    return ref_done(PyObject_CallMethod(tensor, "zero_", NULL));
}

int torch_copy(PyObject *to, PyObject *from) {
    return ref_done(PyObject_CallMethod(to, "copy_", "(O)", from));
}

int torch_enqueue_copy(PyObject *to, PyObject *from) {
    return ref_done(PyObject_CallMethod(to, "copy_", "OO", from, Py_True));
}

PyObject *torch_empty_pinned_like(PyObject *tensor) {
    struct tensor_view view;
    if (tensor_view_of(tensor, &view) < 0)
        return NULL;
    OWNED *args = PyTuple_Pack(1, tensor);
    OWNED *kwargs = Py_BuildValue("{sssO}", "device", "cpu", "pin_memory",
                                  view.device != DEVICE_CPU ? Py_True : Py_False);
    return args && kwargs ? PyObject_Call(torch_names.empty_like, args, kwargs) : NULL;
}

int torch_set_data(PyObject *tensor, PyObject *data) {
    return write_attribute(tensor, &data_attribute, torch_names.data, data);
}

int torch_set_grad(PyObject *tensor, PyObject *grad) {
    return write_attribute(tensor, &grad_attribute, torch_names.grad, grad);
}

/* Set the data again after a failure: a tensor with the data of a gradient would look edited by the user. */
void torch_restore_data(PyObject *tensor, PyObject *data) {
    PyObject *error = PyErr_GetRaisedException();
    if (torch_set_data(tensor, data) < 0)
        PyErr_WriteUnraisable(tensor);
    PyErr_SetRaisedException(error);
}

/* torch checks that a `.grad` fits the tensor's data: `.data` is the gradient itself during the
 * assignment. */
int torch_set_foreign_grad(PyObject *tensor, PyObject *grad) {
    OWNED *data = torch_data(tensor);
    int result = data ? torch_set_data(tensor, grad) : -1;
    if (!result) {
        result = torch_set_grad(tensor, grad);
        if (result < 0 || (result = torch_set_data(tensor, data)) < 0)
            torch_restore_data(tensor, data);
    }
    return result;
}

PyObject *torch_get_grad(PyObject *tensor) {
    return read_attribute(tensor, &grad_attribute, torch_names.grad);
}

PyObject *torch_part(PyObject *tensor, int64_t offset, int64_t numel) {
    OWNED *view = PyObject_CallMethod(tensor, "narrow", "iLL", 0, (long long)offset, (long long)numel);
    return view ? torch_data(view) : NULL;
}

PyObject *torch_data(PyObject *tensor) {
    return read_attribute(tensor, &data_attribute, torch_names.data);
}

PyObject *torch_base(PyObject *tensor) {
    return read_attribute(tensor, &base_attribute, torch_names._base);
}

PyObject *torch_grad_fn(PyObject *tensor) {
    return read_attribute(tensor, &grad_fn_attribute, torch_names.grad_fn);
}

PyObject *torch_backward_hooks(PyObject *tensor) {
    return read_attribute(tensor, &backward_hooks_attribute, torch_names._backward_hooks);
}

int64_t torch_graph_task(void) {
    OWNED *id = PyObject_CallNoArgs(torch_names.graph_task_id);
    return id ? PyLong_AsLongLong(id) : -2;
}

PyObject *torch_active_ddp(void) {
    PyObject *module = PyObject_GetAttr(torch_names.data_parallel, torch_names._active_ddp_module);
    if (module)
        return module;
    PyErr_Clear(); /* older versions of torch lack the attribute */
    return Py_NewRef(Py_None);
}

int torch_will_execute(PyObject *node) {
    OWNED *result = PyObject_CallFunctionObjArgs(torch_names.will_execute, node, NULL);
    return result ? PyObject_IsTrue(result) : -1;
}

int torch_keeps_graph(void) {
    OWNED *result = PyObject_CallNoArgs(torch_names.keeps_graph);
    return result ? PyObject_IsTrue(result) : -1;
}

int torch_requires_grad(PyObject *tensor) {
    PyObject *value = read_attribute(tensor, &requires_grad_attribute, torch_names.requires_grad);
    int result = value ? value == Py_True : -1;
    Py_XDECREF(value); /* no OWNED, whose cleanup would keep the compiler from inlining this function */
    return result;
}

/* Inference tensors have no version counter: return 0. */
int64_t torch_version(PyObject *tensor) {
    OWNED *value = read_attribute(tensor, &version_attribute, torch_names._version);
    if (!value && PyErr_ExceptionMatches(PyExc_RuntimeError)) {
        PyErr_Clear();
        return 0;
    }
    return value ? PyLong_AsLongLong(value) : -1;
}

bool torch_is_tensor(PyObject *object) {
    PyTypeObject *type = Py_TYPE(object);
    return (PyObject *)type == torch_names.tensor_type ||
           PyType_IsSubtype(type, (PyTypeObject *)torch_names.tensor_type);
}

PyObject *torch_view(PyObject *flat, int64_t offset, int64_t numel, PyObject *shape, PyObject *strides) {
    OWNED *data = torch_data(flat);
    OWNED *view = NULL;
    if (!data)
        return NULL;
    if (strides == Py_None) {
        OWNED *part = PyObject_CallMethod(data, "narrow", "iLL", 0, (long long)offset, (long long)numel);
        view = part ? PyObject_CallMethod(part, "view", "(O)", shape) : NULL;
    } else {
        view = PyObject_CallMethod(data, "as_strided", "OOL", shape, strides, (long long)offset);
    }
    return view ? torch_data(view) : NULL;
}

/* Every RemovableHandle takes its id from the class attribute `next_id`: a different object there means a new
 * registration. */
int torch_hooks_registered_since(PyObject **seen) {
    PyObject *next = PyObject_GetAttr(torch_names.removable_handle, torch_names.next_id);
    if (!next)
        return -1;
    int result = next != *seen;
    ref_set(seen, next);
    return result;
}

bool torch_inference_mode(void) {
    OWNED *enabled = PyObject_CallNoArgs(torch_names.is_inference_mode_enabled);
    bool result = enabled == Py_True;
    if (!enabled)
        PyErr_Clear();
    return result;
}

int torch_leave_inference_mode(PyObject **guard) {
    *guard = NULL;
    if (!torch_inference_mode())
        return 0;
    *guard = context_enter(PyObject_CallFunctionObjArgs(torch_names.inference_mode_guard, Py_False, NULL));
    if (*guard)
        torch_set_grad_enabled(false);
    return *guard ? 0 : -1;
}

int torch_return_to_inference_mode(PyObject *guard) {
    return guard ? context_leave(guard) : 0;
}

bool torch_grad_enabled(void) {
    return torch_abi.aoti_torch_grad_mode_is_enabled();
}

void torch_set_grad_enabled(bool enabled) {
    torch_abi.aoti_torch_grad_mode_set_enabled(enabled);
}

/* ---- ranges in the profiler ---- */

PyObject *profile_begin(const char *name) {
    profiler_is_on = PyDict_GetItemWithError(profiler_dict, torch_names._is_profiler_enabled) == Py_True;
    return profile_begin_inner(name);
}

PyObject *profile_begin_inner(const char *name) {
    if (!profiler_is_on)
        return NULL;
    PyObject *range = context_enter(PyObject_CallFunction(torch_names.record_function, "s", name));
    if (!range)
        PyErr_Clear();
    return range;
}

void profile_end(PyObject *range) {
    if (!range)
        return;
    bool is_failing = PyErr_Occurred();
    if (context_leave(range) < 0 && !is_failing)
        PyErr_Clear();
}

/* ---- hooks ---- */

PyObject *hook_new(hook_function function, void *target, PyObject *owner) {
    struct hook *hook = PyObject_GC_New(struct hook, hook_type);
    if (!hook)
        return NULL;
    hook->function = function;
    hook->on_drop = NULL;
    hook->target = target;
    hook->owner = Py_XNewRef(owner);
    PyObject_GC_Track((PyObject *)hook);
    return (PyObject *)hook;
}

void hook_set_on_drop(PyObject *hook, hook_drop_function function) {
    ((struct hook *)hook)->on_drop = function;
}

void hook_disarm(PyObject *hook) {
    ((struct hook *)hook)->target = NULL;
}

void *hook_target(PyObject *hook) {
    return Py_TYPE(hook) == hook_type ? ((struct hook *)hook)->target : NULL;
}
