/* The Python type Runtime. */
#include "python/types.h"

#include <structmember.h>

struct runtime_object {
    PyObject_HEAD
    struct runtime runtime;
};

static PyTypeObject *runtime_type; /* borrowed from module.c */

static struct runtime *runtime_from_object(PyObject *self) {
    return &((struct runtime_object *)self)->runtime;
}

/* ---- life ---- */

static struct unit **units_of(PyObject *objects) {
    Py_ssize_t count = PyTuple_Size(objects);
    struct unit **units = PyMem_Calloc((size_t)count + 1, sizeof *units);
    if (!units)
        return (struct unit **)PyErr_NoMemory();
    for (Py_ssize_t i = 0; i < count; i++) {
        units[i] = unit_of(PyTuple_GetItem(objects, i));
        if (units[i] && !units[i]->runtime)
            continue;
        if (units[i])
            PyErr_Format(PyExc_RuntimeError, "unit %S already belongs to a Runtime", units[i]->name);
        PyMem_Free(units);
        return NULL;
    }
    return units;
}

static int object_init(PyObject *self, PyObject *args, PyObject *kwargs) {
    static char *names[] = {"units", NULL};
    PyObject *sequence;
    if (runtime_from_object(self)->units)
        return RAISED(PyExc_RuntimeError, "this Runtime is already initialised: create a new one");
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "O", names, &sequence))
        return -1;
    OWNED *objects = PySequence_Tuple(sequence);
    if (!objects)
        return -1;
    struct unit **units = PyTuple_Size(objects) ? units_of(objects) : NULL;
    if (!units && !PyErr_Occurred())
        PyErr_SetString(PyExc_ValueError, "a Runtime needs at least one unit, the root");
    int result = units ? runtime_init(runtime_from_object(self), self, objects, units) : -1;
    if (result < 0)
        runtime_clear(runtime_from_object(self));
    PyMem_Free(units);
    return result;
}

static int object_traverse(PyObject *self, visitproc visit, void *arg) {
    Py_VISIT(Py_TYPE(self));
    return runtime_visit(runtime_from_object(self), visit, arg);
}

static int object_clear(PyObject *self) {
    runtime_clear(runtime_from_object(self));
    return 0;
}

static void object_dealloc(PyObject *self) {
    PyObject_GC_UnTrack(self);
    runtime_clear(runtime_from_object(self));
    object_free(self);
}

/* ---- methods ---- */

static PyObject *final_callback(PyObject *self, PyObject *unused) {
    return none_or_error(runtime_final_callback(runtime_from_object(self)));
}

static PyObject *await_failed_backward(PyObject *self, PyObject *unused) {
    return none_or_error(runtime_wait_failed_backward(runtime_from_object(self)));
}

static PyObject *begin_walk(PyObject *self, PyObject *unused) {
    return none_or_error(runtime_begin_walk(runtime_from_object(self)));
}

static PyObject *reset_grad_info(PyObject *self, PyObject *unused) {
    return none_or_error(runtime_collect_user_grads(runtime_from_object(self)));
}

static PyObject *recover(PyObject *self, PyObject *unused) {
    struct runtime *runtime = runtime_from_object(self);
    return none_or_error(runtime_check_thread(runtime) < 0 ? -1
                                                           : runtime_reset_after_failed_backward(runtime));
}

static PyObject *begin_state_dict(PyObject *self, PyObject *unused) {
    int is_held = runtime_begin_state_dict(runtime_from_object(self));
    return is_held < 0 ? NULL : PyBool_FromLong(is_held);
}

static PyObject *end_state_dict(PyObject *self, PyObject *unused) {
    runtime_end_state_dict(runtime_from_object(self));
    Py_RETURN_NONE;
}

static PyObject *release(PyObject *self, PyObject *unused) {
    struct runtime *runtime = runtime_from_object(self);
    for (int64_t i = 0; i < runtime->num_units; i++) {
        if (runtime->units[i]->phase == PHASE_IDLE)
            continue;
        PyErr_Format(PyExc_RuntimeError, "unit %S is inside a forward or backward: call this after the step",
                     runtime->units[i]->name);
        return NULL;
    }
    return none_or_error(runtime_release(runtime));
}

static PyObject *check_order(PyObject *self, PyObject *validate) {
    order_set_validation(&runtime_from_object(self)->order, validate);
    return Py_NewRef(Py_None);
}

/* Add pairs of an optional unit and its enclosing unit. optional_add() prepends, so go from the last pair
 * on. */
static PyObject *set_optional(PyObject *self, PyObject *pairs) {
    if (!PyList_Check(pairs))
        return PyErr_Format(PyExc_TypeError, "expected a list of pairs, got %R", (PyObject *)Py_TYPE(pairs));
    for (Py_ssize_t i = PyList_Size(pairs) - 1; i >= 0; i--) {
        PyObject *pair = PyList_GetItem(pairs, i), *object, *enclosing_object;
        if (!PyTuple_Check(pair))
            return PyErr_Format(PyExc_TypeError, "expected a pair, got %R", (PyObject *)Py_TYPE(pair));
        if (!PyArg_ParseTuple(pair, "OO", &object, &enclosing_object))
            return NULL;
        struct unit *unit = unit_of(object), *enclosing = unit ? unit_of(enclosing_object) : NULL;
        if (!enclosing)
            return NULL;
        optional_add(unit, enclosing);
    }
    Py_RETURN_NONE;
}

static PyMethodDef methods[] = {
    {"set_optional", set_optional, METH_O, NULL},
    {"check_order", check_order, METH_O, NULL},
    {"final_callback", final_callback, METH_NOARGS, NULL},
    {"recover", recover, METH_NOARGS, NULL},
    {"begin_state_dict", begin_state_dict, METH_NOARGS, NULL},
    {"end_state_dict", end_state_dict, METH_NOARGS, NULL},
    {"reset_grad_info", reset_grad_info, METH_NOARGS, NULL},
    {"release", release, METH_NOARGS, NULL},
    {"await_failed_backward", await_failed_backward, METH_NOARGS, NULL},
    {"begin_walk", begin_walk, METH_NOARGS, NULL},
    {NULL, NULL, 0, NULL},
};

/* ---- attributes ---- */

static PyObject *get_units(PyObject *self, void *unused) {
    PyObject *units = runtime_from_object(self)->unit_objects;
    return units ? Py_NewRef(units) : PyTuple_New(0);
}

static PyObject *get_handles_with_views(PyObject *self, void *unused) {
    const struct runtime *runtime = runtime_from_object(self);
    PyObject *handles = PyList_New(0);
    for (int64_t i = 0; handles && i < runtime->num_units && !runtime->callback_queued; i++)
        if (unit_exposes_views(runtime->units[i]) &&
            PyList_Append(handles, runtime->units[i]->handle_object) < 0)
            Py_CLEAR(handles);
    return handles;
}

static const bool is_forward = true;

static PyObject *get_limit(PyObject *self, void *forward) {
    const struct order *order = &runtime_from_object(self)->order;
    return PyLong_FromLongLong(forward ? order->forward_prefetch_limit : order->backward_prefetch_limit);
}

static int set_limit(PyObject *self, PyObject *value, void *forward) {
    long long limit = value ? PyLong_AsLongLong(value) : -1;
    if (limit < 0 && !PyErr_Occurred())
        PyErr_SetString(PyExc_ValueError, "a prefetch limit must be a number of units, 0 or more");
    if (limit < 0)
        return -1;
    struct order *order = &runtime_from_object(self)->order;
    int64_t clamped = limit < INT32_MAX ? limit : INT32_MAX; /* the sum with an index must not overflow */
    if (forward)
        order_set_limits(order, order->backward_prefetch_limit, clamped);
    else
        order_set_limits(order, clamped, order->forward_prefetch_limit);
    return 0;
}

static PyMemberDef members[] = {
    READ_ONLY("iteration", T_LONGLONG, struct runtime_object, runtime.order.iteration),
    READ_ONLY("callback_queued", T_BOOL, struct runtime_object, runtime.callback_queued),
    {"unchecked", T_BOOL, offsetof(struct runtime_object, runtime.checks_next_backward), 0, NULL},
    {NULL, 0, 0, 0, NULL},
};

static PyGetSetDef attributes[] = {
    {"_backward_prefetch_limit", get_limit, set_limit, NULL, NULL},
    {"_forward_prefetch_limit", get_limit, set_limit, NULL, (void *)&is_forward},
    {"handles_with_views", get_handles_with_views, NULL, NULL, NULL},
    {"units", get_units, NULL, NULL, NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

OBJECT_SPEC(struct runtime_object, "fsdp_c._C.Runtime", 0,
            "One root and its units: execution order, prefetch, final callback.", );

PyObject *runtime_type_create(PyObject *module) {
    runtime_type = (PyTypeObject *)PyType_FromModuleAndSpec(module, &type_spec, NULL);
    return (PyObject *)runtime_type;
}
