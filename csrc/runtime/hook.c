#include "runtime/hook.h"

struct hook {
    PyObject_HEAD
    hook_function function;
    hook_drop_function on_drop; /* or NULL; cleared by the first call */
    void *target;               /* borrowed */
    PyObject *owner;            /* owned; or NULL */
};

static PyTypeObject *hook_type; /* owned for ever */

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
        PyObject *error_type, *value, *traceback;
        PyErr_Fetch(&error_type, &value, &traceback);
        if (hook->on_drop(hook->target, hook) < 0)
            PyErr_WriteUnraisable((PyObject *)type);
        PyErr_Restore(error_type, value, traceback);
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

int hook_init(void) {
    if (hook_type)
        return 0;
    hook_type = (PyTypeObject *)PyType_FromSpec(&spec);
    if (!hook_type)
        return -1;
    /* torch looks for this mark before it warns that a hook is not saved with its tensor */
    return PyObject_SetAttrString((PyObject *)hook_type, "__torch_unserializable__", Py_True);
}

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

void hook_on_drop(PyObject *hook, hook_drop_function function) {
    ((struct hook *)hook)->on_drop = function;
}

void hook_disarm(PyObject *hook) {
    ((struct hook *)hook)->target = NULL;
}

void *hook_target(PyObject *hook) {
    return Py_TYPE(hook) == hook_type ? ((struct hook *)hook)->target : NULL;
}
