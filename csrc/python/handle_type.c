/* The Python type Handle, base of FlatParamHandle. */
#include "python/types.h"

#include <structmember.h>

#include "torch/py_torch.h"

struct handle_object {
    PyObject_HEAD
    struct handle handle;
};

static PyTypeObject *handle_type; /* borrowed from module.c */

static struct handle *handle_from_object(PyObject *self) {
    return &((struct handle_object *)self)->handle;
}

struct handle *handle_of(PyObject *object) {
    if (PyObject_TypeCheck(object, handle_type))
        return handle_from_object(object);
    PyErr_Format(PyExc_TypeError, "expected a Handle, got %R", (PyObject *)Py_TYPE(object));
    return NULL;
}

/* ---- life ---- */

static int object_init(PyObject *self, PyObject *args, PyObject *kwargs) {
    static char *names[] = {"config",          "layout",     "flat_param",  "params",
                            "shapes",          "strides",    "param_views", "flat_param_owner",
                            "flat_param_name", "wrap_views", "name",        NULL};
    struct handle_spec spec = {.object = self};
    PyObject *config, *layout;
    if (handle_from_object(self)->param.tensor)
        return RAISED(PyExc_RuntimeError, "a Handle is initialised once");
    if (!PyArg_ParseTupleAndKeywords(
            args, kwargs, "OOOOO!O!O!OUOU", names, &config, &layout, &spec.flat_param, &spec.params,
            &PyTuple_Type, &spec.shapes, &PyTuple_Type, &spec.strides, &PyList_Type, &spec.param_views,
            &spec.flat_param_owner, &spec.flat_param_name, &spec.wrap_views, &spec.name))
        return -1;
    spec.layout_owner = layout;
    if (config_read(&spec.config, config) < 0 || !(spec.layout = layout_of(layout)))
        return -1;
    return handle_init(handle_from_object(self), &spec);
}

static int object_traverse(PyObject *self, visitproc visit, void *arg) {
    Py_VISIT(Py_TYPE(self));
    return handle_visit(handle_from_object(self), visit, arg);
}

static int object_clear(PyObject *self) {
    handle_fini(handle_from_object(self));
    return 0;
}

static void object_dealloc(PyObject *self) {
    PyObject_GC_UnTrack(self);
    handle_fini(handle_from_object(self));
    object_free(self);
}

/* Disarm the gradient hooks before the collector clears any object of the cycle, such as the flat
 * parameter. */
static void object_finalize(PyObject *self) {
    grads_unwatch(&handle_from_object(self)->grads);
}

/* ---- methods ---- */

/* Return the handle; NULL with an exception for an object of `Handle.__new__(Handle)`, which has no
 * fields. */
static struct handle *initialized_handle(PyObject *self) {
    if (handle_from_object(self)->param.tensor)
        return handle_from_object(self);
    PyErr_SetString(PyExc_RuntimeError, "this Handle was not initialised: call its __init__ first");
    return NULL;
}

/* Return the handle after lazy init, which takes the dtype and data of the flat parameter as they are now. */
static struct handle *lazily_initialized_handle(PyObject *self) {
    struct handle *handle = initialized_handle(self);
    return handle && (handle->initialized || handle_lazy_init(handle) == 0) ? handle : NULL;
}

static PyObject *call_verb(struct handle *handle, int (*verb)(struct handle *)) {
    return none_or_error(handle ? verb(handle) : -1);
}

static PyObject *summon_exit(PyObject *self, PyObject *unused) {
    return call_verb(initialized_handle(self), handle_summon_exit);
}

static PyObject *summon_free(PyObject *self, PyObject *unused) {
    return call_verb(initialized_handle(self), handle_summon_free);
}

static PyObject *summon_reshard(PyObject *self, PyObject *unused) {
    return call_verb(initialized_handle(self), handle_summon_reshard);
}

static PyObject *summon_grads(PyObject *self, PyObject *unused) {
    return call_verb(initialized_handle(self), handle_summon_grads);
}

static PyObject *end_move(PyObject *self, PyObject *unused) {
    return call_verb(initialized_handle(self), handle_end_move);
}

static PyObject *begin_move(PyObject *self, PyObject *unused) {
    return call_verb(initialized_handle(self), handle_begin_move);
}

static PyObject *collect_user_grads(PyObject *self, PyObject *unused) {
    return call_verb(initialized_handle(self), handle_collect_user_grads);
}

static PyObject *unexpose_views(PyObject *self, PyObject *unused) {
    return call_verb(initialized_handle(self), handle_unexpose_views);
}

static PyObject *writeback(PyObject *self, PyObject *unused) {
    return call_verb(lazily_initialized_handle(self), handle_writeback);
}

static PyObject *publish(PyObject *self, PyObject *unused) {
    struct handle *handle = lazily_initialized_handle(self);
    return none_or_error(handle ? storage_publish_attributes(&handle->storage) : -1);
}

static PyObject *mark_assigned(PyObject *self, PyObject *unused) {
    struct handle *handle = initialized_handle(self);
    if (!handle)
        return NULL;
    param_views_mark_assigned(&handle->param_views);
    Py_RETURN_NONE;
}

static PyObject *summon_enter(PyObject *self, PyObject *writeback) {
    struct handle *handle = lazily_initialized_handle(self);
    int enabled = handle ? PyObject_IsTrue(writeback) : -1;
    return none_or_error(enabled < 0 ? -1 : handle_summon_enter(handle, enabled));
}

static PyObject *summon_grads_exit(PyObject *self, PyObject *writeback) {
    struct handle *handle = initialized_handle(self);
    int enabled = handle ? PyObject_IsTrue(writeback) : -1;
    return none_or_error(enabled < 0 ? -1 : handle_summon_grads_exit(handle, enabled));
}

static PyObject *sharded_grads(PyObject *self, PyObject *unused) {
    struct handle *handle = initialized_handle(self);
    PyObject *grads = handle ? PyList_New(0) : NULL;
    int64_t count = !handle ? 0 : handle->param.use_orig_params ? handle->param.num_params : 1;
    for (int64_t i = 0; grads && i < count; i++) {
        OWNED *grad = torch_get_grad(handle->param.use_orig_params ? PyList_GetItem(handle->param.params, i)
                                                                   : handle->param.tensor);
        if (!grad || (grad != Py_None && PyList_Append(grads, grad) < 0))
            Py_CLEAR(grads);
    }
    return grads;
}

static PyObject *flat_param_to(PyObject *self, PyObject *args, PyObject *kwargs) {
    struct handle *handle = lazily_initialized_handle(self);
    return none_or_error(handle ? handle_flat_param_to(handle, args, kwargs) : -1);
}

static PyObject *unshard(PyObject *self, PyObject *unused) {
    struct handle *handle = lazily_initialized_handle(self);
    if (!handle || handle_unshard(handle) < 0)
        return NULL;
    return none_or_error(storage_wait_unshard(&handle->storage));
}

/* Return the only argument of a method, by position or keyword, borrowed; NULL with an exception. */
static PyObject *only_argument(PyObject *args, PyObject *kwargs, const char *name) {
    char *names[] = {(char *)name, NULL};
    PyObject *value = NULL;
    return PyArg_ParseTupleAndKeywords(args, kwargs, "O", names, &value) ? value : NULL;
}

/* The steps of unshard by FSDP1's names, for code that replaces FlatParamHandle.unshard(). */

static PyObject *padded_unsharded(const struct handle *handle) {
    const struct storage *storage = &handle->storage;
    return Py_NewRef(storage->copy->is_local ? storage->local_shard : storage->copy->full.tensor);
}

static PyObject *alloc_unsharded(PyObject *self, PyObject *unused) {
    struct handle *handle = lazily_initialized_handle(self);
    if (!handle || (!handle->param.skip_writeback_check && handle_writeback(handle) < 0) ||
        storage_alloc_unsharded(&handle->storage) < 0)
        return NULL;
    return padded_unsharded(handle);
}

static PyObject *all_gather(PyObject *self, PyObject *args, PyObject *kwargs) {
    PyObject *tensor = only_argument(args, kwargs, "padded_unsharded_flat_param");
    struct handle *handle = tensor ? lazily_initialized_handle(self) : NULL;
    PyObject *full = handle && handle_unshard(handle) == 0 ? padded_unsharded(handle) : NULL;
    if (full && full != tensor) {
        flat_param_error(&handle->param, PyExc_ValueError,
                         "_all_gather_flat_param takes the tensor that _alloc_padded_unsharded_flat_param "
                         "returned, and got a different one");
        Py_CLEAR(full);
    }
    return full;
}

/* Without sharding there is no all-gather: unshard the handle here. */
static PyObject *use_unsharded(PyObject *self, PyObject *args, PyObject *kwargs) {
    struct handle *handle =
        only_argument(args, kwargs, "padded_unsharded_flat_param") ? lazily_initialized_handle(self) : NULL;
    if (!handle || (!handle->param.sharded && handle_unshard(handle) < 0))
        return NULL;
    return none_or_error(storage_wait_unshard(&handle->storage));
}

static PyObject *needs_unshard(PyObject *self, PyObject *unused) {
    struct handle *handle = initialized_handle(self);
    if (!handle)
        return NULL;
    return PyBool_FromLong(handle->param.sharded && handle->storage.param_state == PARAM_SHARDED);
}

static PyObject *reshard(PyObject *self, PyObject *args, PyObject *kwargs) {
    struct handle *handle = initialized_handle(self);
    PyObject *free_storage = handle ? only_argument(args, kwargs, "free_unsharded_flat_param") : NULL;
    int enabled = free_storage ? PyObject_IsTrue(free_storage) : -1;
    return none_or_error(enabled < 0 ? -1 : storage_reshard(&handle->storage, enabled));
}

static PyObject *set_comm_hook(PyObject *self, PyObject *args) {
    PyObject *function, *state, *dtype;
    struct handle *handle = initialized_handle(self);
    if (!handle || !PyArg_ParseTuple(args, "OOO", &function, &state, &dtype))
        return NULL;
    return none_or_error(handle_set_comm_hook(handle, function, state, dtype));
}

static PyObject *fake_all_gather(PyObject *self, PyObject *group) {
    struct handle *handle = initialized_handle(self);
    return none_or_error(handle ? collective_fake_all_gather(&handle->param.shard_group, group) : -1);
}

static PyObject *fake_reduce_scatter(PyObject *self, PyObject *group) {
    struct handle *handle = initialized_handle(self);
    return none_or_error(handle ? collective_fake_reduce_scatter(&handle->param.shard_group, group) : -1);
}

static PyMethodDef methods[] = {
    {"fake_all_gather", fake_all_gather, METH_O, NULL},
    {"fake_reduce_scatter", fake_reduce_scatter, METH_O, NULL},
    {"set_comm_hook", set_comm_hook, METH_VARARGS, NULL},
    {"summon_enter", summon_enter, METH_O, NULL},
    {"summon_exit", summon_exit, METH_NOARGS, NULL},
    {"summon_free", summon_free, METH_NOARGS, NULL},
    {"summon_reshard", summon_reshard, METH_NOARGS, NULL},
    {"summon_grads", summon_grads, METH_NOARGS, NULL},
    {"summon_grads_exit", summon_grads_exit, METH_O, NULL},
    {"sharded_grads", sharded_grads, METH_NOARGS, NULL},
    {"begin_move", begin_move, METH_NOARGS, NULL},
    {"end_move", end_move, METH_NOARGS, NULL},
    {"collect_user_grads", collect_user_grads, METH_NOARGS, NULL},
    {"writeback", writeback, METH_NOARGS, NULL},
    {"publish", publish, METH_NOARGS, NULL},
    {"unexpose_views", unexpose_views, METH_NOARGS, NULL},
    {"mark_assigned", mark_assigned, METH_NOARGS, NULL},
    {"flat_param_to", (PyCFunction)(void (*)(void))flat_param_to, METH_VARARGS | METH_KEYWORDS,
     "flat_param_to($self, *args, **kwargs)\n--\n\n"},
    {"unshard", unshard, METH_NOARGS, "unshard($self)\n--\n\n"},
    {"needs_unshard", needs_unshard, METH_NOARGS, "needs_unshard($self)\n--\n\n"},
    {"_alloc_padded_unsharded_flat_param", alloc_unsharded, METH_NOARGS,
     "_alloc_padded_unsharded_flat_param($self)\n--\n\n"},
    {"_all_gather_flat_param", (PyCFunction)(void (*)(void))all_gather, METH_VARARGS | METH_KEYWORDS,
     "_all_gather_flat_param($self, padded_unsharded_flat_param)\n--\n\n"},
    {"_use_unsharded_flat_param", (PyCFunction)(void (*)(void))use_unsharded, METH_VARARGS | METH_KEYWORDS,
     "_use_unsharded_flat_param($self, padded_unsharded_flat_param)\n--\n\n"},
    {"reshard", (PyCFunction)(void (*)(void))reshard, METH_VARARGS | METH_KEYWORDS,
     "reshard($self, free_unsharded_flat_param)\n--\n\n"},
    {NULL, NULL, 0, NULL},
};

/* ---- attributes ---- */

static PyObject *get_shows_sharded(PyObject *self, void *unused) {
    return PyBool_FromLong(handle_exposes_sharded(handle_from_object(self)));
}

static PyObject *get_unsharded_nbytes(PyObject *self, void *unused) {
    struct handle *handle = initialized_handle(self);
    const struct buffer *full = handle ? &handle->storage.copy->full : NULL;
    return full ? PyLong_FromLongLong(full->allocated ? full->nbytes : 0) : NULL;
}

static PyObject *get_padded_unsharded(PyObject *self, void *unused) {
    struct handle *handle = lazily_initialized_handle(self);
    return handle ? padded_unsharded(handle) : NULL;
}

static PyObject *get_sharded_grad(PyObject *self, void *unused) {
    struct handle *handle = initialized_handle(self);
    return handle ? grads_sharded(&handle->grads) : NULL;
}

static PyObject *get_name(PyObject *self, void *unused) {
    PyObject *name = handle_from_object(self)->param.name;
    return Py_NewRef(name ? name : Py_None);
}

static int set_name(PyObject *self, PyObject *name, void *unused) {
    if (!name || !PyUnicode_Check(name))
        return RAISED(PyExc_TypeError, "the name of a unit must be a str");
    flat_param_rename(&handle_from_object(self)->param, name);
    return 0;
}

/* T_INT members are enums. T_OBJECT returns None for NULL. */
static PyMemberDef members[] = {
    READ_ONLY("flat_param", T_OBJECT, struct handle_object, handle.param.tensor),
    READ_ONLY("layout", T_OBJECT, struct handle_object, handle.param.layout_owner),
    READ_ONLY("param_state", T_INT, struct handle_object, handle.storage.param_state),
    READ_ONLY("training_state", T_INT, struct handle_object, handle.training_state),
    READ_ONLY("local_shard", T_OBJECT, struct handle_object, handle.storage.local_shard),
    READ_ONLY("registration_id", T_LONGLONG, struct handle_object, handle.param.registration_id),
    {"optimizer_in_backward", T_BOOL, offsetof(struct handle_object, handle.optimizer_in_backward), 0, NULL},
    {NULL, 0, 0, 0, NULL},
};

static PyGetSetDef attributes[] = {
    {"name", get_name, set_name, NULL, NULL},
    {"sharded_grad", get_sharded_grad, NULL, NULL, NULL},
    {"shows_sharded", get_shows_sharded, NULL, NULL, NULL},
    {"unsharded_nbytes", get_unsharded_nbytes, NULL, NULL, NULL},
    {"padded_unsharded_flat_param", get_padded_unsharded, NULL, NULL, NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

OBJECT_SPEC(struct handle_object, "fsdp_c._C.Handle", Py_TPFLAGS_BASETYPE,
            "One flat parameter: its storage, views and gradients.", {Py_tp_finalize, object_finalize}, );

PyObject *handle_type_create(PyObject *module) {
    handle_type = (PyTypeObject *)PyType_FromModuleAndSpec(module, &type_spec, NULL);
    return (PyObject *)handle_type;
}
