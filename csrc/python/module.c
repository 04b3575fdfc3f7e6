/* The extension module fsdp_c._C. */
#include "collective/collective.h"
#include "handle/handle.h"
#include "kernels/loops.h"
#include "python/types.h"
#include "runtime/callbacks.h"
#include "runtime/operations.h"
#include "torch/buffer.h"
#include "torch/data_guard.h"
#include "torch/freed_views.h"
#include "torch/kernel_library.h"
#include "torch/ops.h"
#include "torch/py_torch.h"
#include "torch/tensor.h"
#include "torch/torch_abi.h"

static PyObject *live_unsharded_nbytes(PyObject *self, PyObject *unused) {
    return PyLong_FromLongLong(buffer_live_nbytes());
}

static PyObject *peak_unsharded_nbytes(PyObject *self, PyObject *args, PyObject *kwargs) {
    static char *names[] = {"reset", NULL};
    int reset = 0;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "|p", names, &reset))
        return NULL;
    return PyLong_FromLongLong(buffer_peak_nbytes(reset));
}

static PyObject *prefer_large_pages(PyObject *self, PyObject *tensor) {
    struct tensor_view view;
    if (tensor_view_of(tensor, &view) < 0)
        return NULL;
    tensor_prefer_large_pages(&view);
    Py_RETURN_NONE;
}

static PyObject *replace(PyObject *self, PyObject *args) {
    const char *name;
    PyObject *function;
    if (!PyArg_ParseTuple(args, "sO", &name, &function))
        return NULL;
    return none_or_error(operations_replace(name, function));
}

static PyObject *bind_callbacks(PyObject *self, PyObject *args, PyObject *kwargs) {
    return none_or_error(callbacks_bind(kwargs));
}

static PyObject *cpu_capabilities(PyObject *self, PyObject *unused) {
    OWNED *names = PyList_New(0);
    for (int i = 0; names && loops_version(i); i++)
        if (ref_append(names, PyUnicode_FromString(loops_version(i)->name)) < 0)
            return NULL;
    return names ? PyList_AsTuple(names) : NULL;
}

static PyObject *use_cpu_capability(PyObject *self, PyObject *args) {
    const char *name;
    if (!PyArg_ParseTuple(args, "z", &name))
        return NULL;
    if (!loops_use(name))
        return PyErr_Format(PyExc_ValueError,
                            "no kernels for \"%s\" on this processor: see cpu_capabilities()", name);
    Py_RETURN_NONE;
}

static PyObject *why_no_kernels(PyObject *self, PyObject *args) {
    const char *device, *reason = NULL;
    if (!PyArg_ParseTuple(args, "s", &device))
        return NULL;
    kernels_of(tensor_device_named(device), 0, &reason);
    return reason ? PyUnicode_FromString(reason) : Py_NewRef(Py_None);
}

static PyObject *bind_operator_kernels(PyObject *self, PyObject *module) {
    operator_kernels_bind(module);
    Py_RETURN_NONE;
}

static PyObject *bind_freed_view(PyObject *self, PyObject *type) {
    return none_or_error(freed_views_bind(type));
}

static PyObject *refuse_freed_view(PyObject *self, PyObject *tensor) {
    return none_or_error(handle_refuse_freed_view(tensor));
}

/* ---- progress ---- */

static PyObject *print_progress_on_signal(PyObject *self, PyObject *rank) {
    int64_t number = PyLong_AsLongLong(rank);
    int result = number == -1 && PyErr_Occurred() ? -1 : progress_print_on_signal(number);
    if (result < 0)
        return PyErr_Occurred() ? NULL : PyErr_SetFromErrno(PyExc_OSError);
    return PyBool_FromLong(result);
}

static PyObject *add_unit_name(PyObject *self, PyObject *args) {
    const char *name;
    return PyArg_ParseTuple(args, "s", &name) ? PyLong_FromLong(progress_add_unit(name)) : NULL;
}

static PyObject *enter_phase(PyObject *self, PyObject *args) {
    int phase;
    if (!PyArg_ParseTuple(args, "i", &phase))
        return NULL;
    if (phase < 0 || phase >= PROGRESS_PHASES)
        return PyErr_Format(PyExc_ValueError, "a phase must be in [0, %d), got %d", PROGRESS_PHASES, phase);
    return PyLong_FromUnsignedLongLong(progress_enter(-1, (enum progress_phase)phase));
}

/* Allocates nothing, so that it ends each phase that was entered. */
static PyObject *leave_phase(PyObject *self, PyObject *number) {
    unsigned long long place = PyLong_AsUnsignedLongLong(number);
    if (PyErr_Occurred())
        return NULL;
    progress_leave(place);
    Py_RETURN_NONE;
}

static PyObject *describe_progress(PyObject *self, PyObject *unused) {
    char text[PROGRESS_TEXT_NBYTES];
    progress_describe(text);
    return PyUnicode_DecodeUTF8(text, (Py_ssize_t)strlen(text), "replace");
}

static int add_phases(PyObject *module) {
    OWNED *phases = PyTuple_New(PROGRESS_PHASES);
    for (int i = 0; phases && i < PROGRESS_PHASES; i++) {
        PyObject *text = PyUnicode_FromString(progress_phases[i]);
        if (!text || PyTuple_SetItem(phases, i, text) < 0)
            return -1;
    }
    return phases ? PyModule_AddObjectRef(module, "PHASES", phases) : -1;
}

static PyObject *release_process_groups(PyObject *self, PyObject *unused) {
    return none_or_error(collective_release_groups());
}

static PyMethodDef functions[] = {
    {"bind_callbacks", (PyCFunction)(void (*)(void))bind_callbacks, METH_VARARGS | METH_KEYWORDS, NULL},
    {"bind_operator_kernels", bind_operator_kernels, METH_O, NULL},
    {"bind_freed_view", bind_freed_view, METH_O, NULL},
    {"refuse_freed_view", refuse_freed_view, METH_O, NULL},
    {"print_progress_on_signal", print_progress_on_signal, METH_O, NULL},
    {"add_unit_name", add_unit_name, METH_VARARGS, NULL},
    {"enter_phase", enter_phase, METH_VARARGS, NULL},
    {"leave_phase", leave_phase, METH_O, NULL},
    {"describe_progress", describe_progress, METH_NOARGS, NULL},
    {"cpu_capabilities", cpu_capabilities, METH_NOARGS, NULL},
    {"use_cpu_capability", use_cpu_capability, METH_VARARGS, NULL},
    {"why_no_kernels", why_no_kernels, METH_VARARGS, NULL},
    {"replace", replace, METH_VARARGS, NULL},
    {"release_process_groups", release_process_groups, METH_NOARGS, NULL},
    {"prefer_large_pages", prefer_large_pages, METH_O, NULL},
    {"live_unsharded_nbytes", live_unsharded_nbytes, METH_NOARGS, NULL},
    {"peak_unsharded_nbytes", (PyCFunction)(void (*)(void))peak_unsharded_nbytes,
     METH_VARARGS | METH_KEYWORDS, NULL},
    {NULL, NULL, 0, NULL},
};

/* Add a type, which all imports share: objects of an earlier import may be alive, and C refers to one
 * type. */
static int add_type(PyObject *module, const char *name, PyObject **type, PyObject *(*create)(PyObject *)) {
    if (!*type)
        *type = create(module);
    return *type ? PyModule_AddObjectRef(module, name, *type) : -1;
}

static int add_types(PyObject *module) {
    static PyObject *layout, *handle, *unit, *runtime; /* owned; never freed */
    if (layout_functions_add(module) < 0 || add_type(module, "FlatLayout", &layout, layout_type_create) < 0 ||
        add_type(module, "Handle", &handle, handle_type_create) < 0 ||
        add_type(module, "Unit", &unit, unit_type_create) < 0)
        return -1;
    return add_type(module, "Runtime", &runtime, runtime_type_create);
}

static int add_constants(PyObject *module) {
    static const struct {
        const char *name;
        long value;
    } constants[] = {
#define SAME(name) {#name, name}
        SAME(PARAM_SHARDED),
        SAME(PARAM_UNSHARDING),
        SAME(PARAM_UNSHARDED),
        SAME(USE_IDLE),
        SAME(USE_FORWARD),
        SAME(USE_BACKWARD_PRE),
        SAME(USE_BACKWARD_POST),
        SAME(USE_SUMMON_FULL_PARAMS),
        {"SET_DIRECTLY", SETTING_DIRECT},
        {"SET_BY_SETATTR", SETTING_BY_SETATTR},
        {"SET_BYPASSING", SETTING_BYPASS},
        SAME(PROGRESS_SAVE),
        SAME(PROGRESS_LOAD),
        SAME(PROGRESS_STATE_DICT),
        SAME(PROGRESS_LOAD_STATE_DICT),
        SAME(PROGRESS_OPTIM_STATE_DICT),
        SAME(PROGRESS_SUMMON),
        SAME(PROGRESS_WRAP)
#undef SAME
    };
    for (size_t i = 0; i < sizeof constants / sizeof *constants; i++)
        if (PyModule_AddIntConstant(module, constants[i].name, constants[i].value) < 0)
            return -1;
    return 0;
}

/* Initialise the torch layer first: symbols, Python names, ops. The later layers use it. */
static int module_exec(PyObject *module) {
    if (torch_abi_init() < 0 || torch_names_init() < 0 || tensor_init() < 0 || ops_init() < 0 ||
        data_guard_init_flags() < 0)
        return -1;
    if (flat_param_views_init() < 0 || collective_init() < 0 || node_init() < 0)
        return -1;
    return add_types(module) < 0 || add_phases(module) < 0 ? -1 : add_constants(module);
}

static PyModuleDef_Slot slots[] = {{Py_mod_exec, module_exec}, {0, NULL}};

static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT,
    "fsdp_c._C",
    "The C runtime of fsdp_c, declared in _C.pyi.",
    0,
    functions,
    slots,
    NULL,
    NULL,
    NULL,
};

PyMODINIT_FUNC PyInit__C(void);
PyMODINIT_FUNC PyInit__C(void) {
    return PyModuleDef_Init(&definition);
}
