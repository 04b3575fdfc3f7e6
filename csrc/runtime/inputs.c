/* What a unit does with the inputs of its forward: they are moved and cast, and a frozen unit waits for their gradients. */
#include "runtime/callbacks.h"
#include "runtime/hook.h"
#include "runtime/runtime.h"
#include "torch/names.h"
#include "torch/profile.h"
#include "torch/tensor.h"

static bool is_on(const struct tensor_view *view, const struct tensor_view *device) {
    return view->device == device->device && view->device_index == device->device_index;
}

/* Must this input be walked? Only containers, tensors of other devices, and floating tensors of another dtype must. `mover` is
 * NULL where inputs stay where they are. */
static bool input_is_ready(const struct unit *unit, PyObject *value, const struct handle *mover, bool cast) {
    struct tensor_view view;
    if (value == Py_None || PyBool_Check(value) || PyLong_Check(value) || PyFloat_Check(value) ||
        PyUnicode_Check(value))
        return true;
    if (!torch_is_tensor(value))
        return false;
    if (tensor_view_of(value, &view) < 0) {
        PyErr_Clear();
        return false;
    }
    if (mover && !is_on(&view, &mover->storage.compute_view))
        return false;
    if (!cast)
        return true;
    PyObject *dtype = PyObject_GetAttr(value, torch_names.dtype);
    if (!dtype) {
        PyErr_Clear();
        return false;
    }
    bool ready = dtype == unit->param_dtype || !dtype_is_known(view.dtype);
    Py_DECREF(dtype);
    return ready;
}

static bool inputs_are_ready(const struct unit *unit, PyObject *args, PyObject *kwargs, const struct handle *mover,
                             bool cast) {
    Py_ssize_t position = 0;
    PyObject *key, *value;
    for (Py_ssize_t i = 0; i < PyTuple_Size(args); i++)
        if (!input_is_ready(unit, PyTuple_GetItem(args, i), mover, cast))
            return false;
    bool ready = true;
    while (ready && PyDict_Next(kwargs, &position, &key, &value)) {
        Py_INCREF(value); /* looking at it may run code of the user's, which may take it out of the dict */
        ready = input_is_ready(unit, value, mover, cast);
        Py_DECREF(value);
    }
    return ready;
}

/* A root casts as a root, and any unit with parameters as a unit (D-023, D-031). */
static bool casts_inputs(const struct unit *unit) {
    const struct handle *handle = unit->handle;
    if (!unit->param_dtype || (handle && storage_precision(&handle->storage) == PRECISION_FULL))
        return false;
    if (unit->is_root && unit->cast_root_forward_inputs && !unit->evaluating)
        return true;
    return handle && unit->cast_forward_inputs;
}

/* Move and cast the inputs; *args and *kwargs are replaced by new references where anything changed. A root moves them, also
 * one whose parameters all belong to inner units. */
static int convert_inputs(struct unit *unit, PyObject **args, PyObject **kwargs) {
    const struct handle *mover = unit->is_root ? unit_handle_or_first(unit) : NULL;
    bool cast = casts_inputs(unit);
    if ((!mover && !cast) || inputs_are_ready(unit, *args, *kwargs, mover, cast))
        return 0;
    PyObject *converted =
        PyObject_CallFunctionObjArgs(callbacks.convert_inputs, *args, *kwargs, mover ? mover->param.device : Py_None,
                                     cast ? unit->param_dtype : Py_None, NULL);
    if (!converted)
        return -1;
    PyObject *new_args, *new_kwargs;
    int parsed = PyArg_ParseTuple(converted, "OO", &new_args, &new_kwargs);
    if (parsed) {
        ref_set(args, Py_NewRef(new_args));
        ref_set(kwargs, Py_NewRef(new_kwargs));
    }
    Py_DECREF(converted);
    return parsed ? 0 : -1;
}

int unit_convert_inputs(struct unit *unit, PyObject **args, PyObject **kwargs) {
    struct trace trace = trace_begin(unit->is_root ? TRACED_TO_KWARGS : TRACED_NOTHING, unit->recorder_index);
    int result = convert_inputs(unit, args, kwargs);
    trace_end(trace);
    return result;
}

/* ---- gradients of the inputs ---- */

static int reshard_only(void *target) {
    return unit_reshard_only(target);
}

int unit_watch_inputs(struct unit *unit, PyObject *args, PyObject *kwargs) {
    if (unit->reshard_hook || !torch_grad_enabled())
        return 0;
    PyObject *hook = hook_new(reshard_only, unit, unit->object);
    PyObject *removable = hook ? PyObject_CallFunctionObjArgs(callbacks.hook_inputs, args, kwargs, hook, NULL) : NULL;
    Py_XDECREF(hook);
    if (!removable)
        return -1;
    if (removable == Py_None) {
        Py_DECREF(removable);
        return 0;
    }
    unit->reshard_hook = removable;
    return 0;
}
