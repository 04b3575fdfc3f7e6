/* The Python type Unit. */
#include "python/types.h"

#include <structmember.h>

#include "torch/py_torch.h"

struct unit_object {
    PyObject_HEAD
    struct unit unit;
};

static PyTypeObject *unit_type; /* borrowed from module.c */

static struct unit *unit_from_object(PyObject *self) {
    return &((struct unit_object *)self)->unit;
}

struct unit *unit_of(PyObject *object) {
    if (PyObject_TypeCheck(object, unit_type))
        return unit_from_object(object);
    PyErr_Format(PyExc_TypeError, "expected a Unit, got %R", (PyObject *)Py_TYPE(object));
    return NULL;
}

/* ---- life ---- */

/* Add the segments of the spec to the unit. 0 or -1. */
static int add_segments(struct unit *unit) {
    for (Py_ssize_t i = 0; i < PyTuple_Size(unit->segments); i++) {
        struct unit *segment = unit_of(PyTuple_GetItem(unit->segments, i));
        if (!segment)
            return -1;
        if (!unit->handle || !segment->handle || segment->leader || segment->next_segment)
            return RAISED(
                PyExc_ValueError,
                "unit %S: cannot add a segment. The unit and the segment must have parameters, and the "
                "segment must belong to no other unit.",
                unit->name);
        unit_add_segment(unit, segment);
    }
    return 0;
}

static int object_init(PyObject *self, PyObject *args, PyObject *kwargs) {
    static char *names[] = {"module", "handle", "config", "name", "segments", NULL};
    struct unit_spec spec = {0};
    PyObject *handle, *config;
    if (unit_from_object(self)->module_ref)
        return RAISED(PyExc_RuntimeError, "this Unit is already initialised: create a new one");
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "OOOUO!", names, &spec.module, &handle, &config,
                                     &spec.name, &PyTuple_Type, &spec.segments) ||
        config_read(&spec.config, config) < 0)
        return -1;
    if (handle != Py_None) {
        spec.handle_object = handle;
        if (!(spec.handle = handle_of(handle)))
            return -1;
    }
    return unit_init(unit_from_object(self), self, &spec) < 0 ? -1 : add_segments(unit_from_object(self));
}

static int object_traverse(PyObject *self, visitproc visit, void *arg) {
    Py_VISIT(Py_TYPE(self));
    return unit_visit(unit_from_object(self), visit, arg);
}

static int object_clear(PyObject *self) {
    unit_clear(unit_from_object(self));
    return 0;
}

static void object_dealloc(PyObject *self) {
    PyObject_GC_UnTrack(self);
    unit_clear(unit_from_object(self));
    object_free(self);
}

/* ---- methods ---- */

/* Return the unit; NULL with an exception for an object of `Unit.__new__(Unit)`, which has no fields. */
static struct unit *initialized_unit(PyObject *self) {
    if (unit_from_object(self)->module_ref)
        return unit_from_object(self);
    PyErr_SetString(PyExc_RuntimeError, "this Unit was not initialised: call its __init__ first");
    return NULL;
}

static PyObject *forward(PyObject *self, PyObject *args) {
    PyObject *wrapped, *inputs, *kwargs;
    struct unit *unit = initialized_unit(self);
    if (!unit || !PyArg_ParseTuple(args, "OO!O!", &wrapped, &PyTuple_Type, &inputs, &PyDict_Type, &kwargs))
        return NULL;
    return unit_forward(unit, wrapped, inputs, kwargs);
}

/* Set the phase that stands in for the training state of a handle, which a unit without parameters lacks. */
static PyObject *set_summoning(PyObject *self, PyObject *value) {
    struct unit *unit = initialized_unit(self);
    int enabled = unit ? PyObject_IsTrue(value) : -1;
    if (enabled < 0)
        return NULL;
    return none_or_error(unit_set_phase(unit, enabled ? PHASE_SUMMON_FULL_PARAMS : PHASE_IDLE));
}

static PyObject *unshard(PyObject *self, PyObject *unused) {
    return none_or_error(unit_prefetch_by_user(unit_from_object(self)));
}

static PyObject *register_post_backward_hook(PyObject *self, PyObject *unused) {
    struct unit *unit = initialized_unit(self);
    return none_or_error(unit ? unit_register_post_backward_hook(unit) : -1);
}

static PyObject *wait_unsharded(PyObject *self, PyObject *unused) {
    struct unit *unit = unit_from_object(self);
    return none_or_error(unit->handle && unit->runtime ? unit_wait_unshard(unit) : 0);
}

static PyObject *post_backward_reshard(PyObject *self, PyObject *unused) {
    struct unit *unit = unit_from_object(self);
    return none_or_error(unit->handle && unit->runtime ? unit_post_backward_reshard(unit) : 0);
}

static PyObject *handle_to_prefetch(PyObject *self, PyObject *value) {
    struct unit *unit = unit_from_object(self);
    long state = PyLong_AsLong(value);
    if (state == -1 && PyErr_Occurred())
        return NULL;
    struct unit *next =
        unit->handle && unit->runtime ? unit_next_to_prefetch(unit, (enum training_state)state) : NULL;
    return Py_NewRef(next ? next->handle_object : Py_None);
}

static PyObject *register_pre_backward_hooks(PyObject *self, PyObject *outputs) {
    struct unit *unit = initialized_unit(self);
    return none_or_error(unit ? unit_register_pre_backward_hooks(unit, &outputs) : -1);
}

static PyMethodDef methods[] = {
    {"handle_to_prefetch", handle_to_prefetch, METH_O, NULL},
    {"register_post_backward_hook", register_post_backward_hook, METH_NOARGS, NULL},
    {"register_pre_backward_hooks", register_pre_backward_hooks, METH_O, NULL},
    {"post_backward_reshard", post_backward_reshard, METH_NOARGS, NULL},
    {"unshard", unshard, METH_NOARGS, NULL},
    {"wait_unsharded", wait_unsharded, METH_NOARGS, NULL},
    {"set_summoning", set_summoning, METH_O, NULL},
    {"forward", forward, METH_VARARGS, NULL},
    {NULL, NULL, 0, NULL},
};

/* ---- attributes ---- */

static PyObject *get_is_root(PyObject *self, void *unused) {
    if (!unit_from_object(self)->runtime)
        Py_RETURN_NONE;
    return PyBool_FromLong(unit_from_object(self)->is_root);
}

/* Return the training state as FSDP1's TrainingState, which has one value for forward and backward. */
static PyObject *get_training_state(PyObject *self, void *unused) {
    static const enum training_state states[UNIT_PHASES] = {
        [PHASE_IDLE] = USE_IDLE,
        [PHASE_IN_STEP] = USE_FORWARD,
        [PHASE_SUMMON_FULL_PARAMS] = USE_SUMMON_FULL_PARAMS,
    };
    const struct unit *unit = unit_from_object(self);
    if (unit->handle && unit->handle->training_state == USE_SUMMON_FULL_PARAMS)
        return PyLong_FromLong(USE_SUMMON_FULL_PARAMS);
    return PyLong_FromLong(states[unit->phase]);
}

static PyObject *get_sync_gradients(PyObject *self, void *unused) {
    return PyBool_FromLong(unit_from_object(self)->sync_gradients);
}

static int set_sync_gradients(PyObject *self, PyObject *value, void *unused) {
    if (!value)
        return RAISED(PyExc_AttributeError, "sync_gradients of a unit cannot be deleted");
    int enabled = PyObject_IsTrue(value);
    if (enabled < 0)
        return -1;
    unit_set_sync_gradients(unit_from_object(self), enabled);
    return 0;
}

/* T_OBJECT returns None for NULL. */
static PyMemberDef members[] = {
    READ_ONLY("handle", T_OBJECT, struct unit_object, unit.handle_object),
    READ_ONLY("runtime", T_OBJECT, struct unit_object, unit.runtime_object),
    {"name_index", T_INT, offsetof(struct unit_object, unit.name_index), 0, NULL},
    {NULL, 0, 0, 0, NULL},
};

static PyGetSetDef attributes[] = {
    {"is_root", get_is_root, NULL, NULL, NULL},
    {"training_state", get_training_state, NULL, NULL, NULL},
    {"sync_gradients", get_sync_gradients, set_sync_gradients, NULL, NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

OBJECT_SPEC(struct unit_object, "fsdp_c._C.Unit", 0,
            "One FullyShardedDataParallel instance: the entry points of the step.", );

PyObject *unit_type_create(PyObject *module) {
    unit_type = (PyTypeObject *)PyType_FromModuleAndSpec(module, &type_spec, NULL);
    return (PyObject *)unit_type;
}
