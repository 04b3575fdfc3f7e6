#include "collective/collective.h"

#include <string.h>
#include <unistd.h>

#include "torch/py_torch.h"

/* A public name of a collective of torch.distributed. Arrays of names have the newest name first. */
struct public_name {
    const char *name;
    PyObject *interned; /* owned */
    /* owned; NULL when torch lacks the name, or a replacement was there before the import of fsdp_c */
    PyObject *original;
};

static struct public_name gather_names[] = {{"all_gather_single", NULL, NULL},
                                            {"all_gather_into_tensor", NULL, NULL}};
static struct public_name scatter_names[] = {{"reduce_scatter_single", NULL, NULL},
                                             {"reduce_scatter_tensor", NULL, NULL}};
static struct public_name reduce_names[] = {{"all_reduce", NULL, NULL}};
static PyObject *public_functions; /* owned; dict of torch.distributed */

/* Owned; never freed. asyncOp is false: NCCL then runs on the current stream and holds no tensors. */
static PyObject *gather_options, *scatter_options, *reduce_options;

/* Return true if the function is defined in the modules where torch defines or decorates its collectives. */
static bool is_defined_by_torch(PyObject *function) {
    static const char *const modules[] = {"torch.distributed.distributed_c10d",
                                          "torch.distributed.c10d_logger"};
    OWNED *globals = PyObject_GetAttrString(function, "__globals__");
    OWNED *module = globals ? PyMapping_GetItemString(globals, "__name__") : NULL;
    bool result = false;
    for (size_t i = 0; module && PyUnicode_Check(module) && i < sizeof modules / sizeof *modules; i++)
        result = result || PyUnicode_CompareWithASCIIString(module, modules[i]) == 0;
    PyErr_Clear(); /* a replacement may be any callable, without __globals__ */
    return result;
}

static int names_find(struct public_name *names, size_t count) {
    for (size_t i = 0; i < count; i++) {
        if (!(names[i].interned = PyUnicode_InternFromString(names[i].name)))
            return -1;
        PyObject *function = PyDict_GetItemWithError(public_functions, names[i].interned);
        if (!function && PyErr_Occurred())
            return -1;
        names[i].original = function && is_defined_by_torch(function) ? Py_NewRef(function) : NULL;
    }
    return 0;
}

/* Return the options of a collective, new reference. The default reduction is the sum. */
static PyObject *make_options(PyObject *module, const char *name) {
    PyObject *options = PyObject_CallMethod(module, name, NULL);
    if (options && PyObject_SetAttrString(options, "asyncOp", Py_False) < 0)
        Py_CLEAR(options);
    return options;
}

static int init_options(void) {
    OWNED *module = PyImport_ImportModule("torch._C._distributed_c10d");
    if (!module)
        return -1;
    gather_options = make_options(module, "AllgatherOptions");
    scatter_options = gather_options ? make_options(module, "ReduceScatterOptions") : NULL;
    reduce_options = scatter_options ? make_options(module, "AllreduceOptions") : NULL;
    return reduce_options ? 0 : -1;
}

int collective_init(void) {
    if (public_functions)
        return 0;
    OWNED *module = PyImport_ImportModule("torch.distributed");
    if (!module)
        return -1;
    public_functions = Py_NewRef(PyModule_GetDict(module));
    if (init_options() < 0 || names_find(gather_names, 2) < 0 || names_find(scatter_names, 2) < 0)
        return -1;
    return names_find(reduce_names, 1);
}

/* Return the replacement of a public function, borrowed; NULL when none is replaced. */
static PyObject *find_replacement(const struct public_name *names, size_t count) {
    for (size_t i = 0; i < count; i++) {
        PyObject *current = PyDict_GetItemWithError(public_functions, names[i].interned);
        if (current != names[i].original && current)
            return current;
    }
    return NULL;
}

/* Raise TypeError in place of a method that the group lacks. `context` is (rank, group, name). */
static PyObject *raise_missing_method(PyObject *context, PyObject *args) {
    (void)args;
    PyErr_Format(PyExc_TypeError,
                 "rank %S: the process group %R has no method %U(), which this collective calls. Pass a "
                 "torch.distributed.ProcessGroup, or one of its backends.",
                 PyTuple_GetItem(context, 0), PyTuple_GetItem(context, 1), PyTuple_GetItem(context, 2));
    return NULL;
}

static PyMethodDef raise_missing_method_def = {"raise_missing_method", raise_missing_method, METH_VARARGS,
                                               NULL};

/* Return a bound method of the group, new reference. torch.distributed calls `newest` since 2.13, and groups
 * written in Python override it; backends and older versions have `oldest`. */
static PyObject *find_method(PyObject *group, const char *newest, const char *oldest) {
    PyObject *method = PyObject_GetAttrString(group, newest);
    if (method || !PyErr_ExceptionMatches(PyExc_AttributeError))
        return method;
    PyErr_Clear();
    return PyObject_GetAttrString(group, oldest);
}

/* Return `find_method()`. An object without the method raises at the first call. */
static PyObject *bind_method(PyObject *group, PyObject *rank, const char *newest, const char *oldest) {
    PyObject *method = find_method(group, newest, oldest);
    if (method || !PyErr_ExceptionMatches(PyExc_AttributeError))
        return method;
    PyErr_Clear();
    OWNED *context = Py_BuildValue("(OOs)", rank, group, oldest);
    return context ? PyCFunction_New(&raise_missing_method_def, context) : NULL;
}

/* Head of the ring of initialised groups. */
static struct collective_group group_list = {.previous = &group_list, .next = &group_list};
static int64_t num_unfinished; /* enqueued collectives without a successful wait */

int collective_group_init(struct collective_group *group, PyObject *process_group) {
    *group =
        (struct collective_group){.process = getpid(), .previous = group_list.previous, .next = &group_list};
    group->previous->next = group_list.previous = group;
    OWNED *size = PyObject_CallMethod(process_group, "size", NULL);
    OWNED *rank = size ? PyObject_CallMethod(process_group, "rank", NULL) : NULL;
    if (rank) {
        group->world_size = PyLong_AsLongLong(size);
        group->rank = PyLong_AsLongLong(rank);
    }
    if (!PyErr_Occurred() &&
        (group->all_gather = bind_method(process_group, rank, "all_gather_single", "_allgather_base")) &&
        (group->reduce_scatter =
             bind_method(process_group, rank, "reduce_scatter_single", "_reduce_scatter_base")) &&
        (group->all_reduce = bind_method(process_group, rank, "allreduce", "allreduce"))) {
        group->group = Py_NewRef(process_group);
        group->gather_group = Py_NewRef(process_group);
        group->scatter_group = Py_NewRef(process_group);
        return 0;
    }
    collective_group_fini(group);
    return -1;
}

void collective_group_fini(struct collective_group *group) {
    if (group->next) {
        group->previous->next = group->next;
        group->next->previous = group->previous;
        group->previous = group->next = NULL;
    }
    Py_CLEAR(group->group);
    Py_CLEAR(group->gather_group);
    Py_CLEAR(group->scatter_group);
    Py_CLEAR(group->all_gather);
    Py_CLEAR(group->reduce_scatter);
    Py_CLEAR(group->all_reduce);
}

/* Move the references of `group` into `list`. 0, or -1 after some of them. */
static int move_references(struct collective_group *group, PyObject *list) {
    PyObject **references[] = {&group->group,      &group->gather_group,   &group->scatter_group,
                               &group->all_gather, &group->reduce_scatter, &group->all_reduce};
    for (size_t i = 0; i < sizeof references / sizeof *references; i++) {
        if (*references[i] && PyList_Append(list, *references[i]) < 0)
            return -1;
        Py_CLEAR(*references[i]); /* not the last reference: no destructor runs */
    }
    return 0;
}

int collective_release_groups(void) {
    PyObject *released_refs = PyList_New(0), *leaked_refs = PyList_New(0);
    int result = released_refs && leaked_refs ? 0 : -1;
    for (struct collective_group *group = group_list.next; !result && group != &group_list;
         group = group->next)
        result = move_references(group,
                                 num_unfinished || group->process != getpid() ? leaked_refs : released_refs);
    if (leaked_refs && PyList_Size(leaked_refs) == 0)
        Py_CLEAR(leaked_refs); /* a list with references is leaked */
    /* last, when all groups are empty: destructors of groups join threads and let other Python threads run */
    Py_XDECREF(released_refs);
    return result;
}

/* Raise the error of a released group. Return NULL. */
static PyObject *raise_groups_released(const struct collective_group *group) {
    PyErr_Format(
        PyExc_RuntimeError,
        "rank %lld: the process is ending and its process groups were destroyed, so FullyShardedDataParallel "
        "cannot communicate. Call this before destroy_process_group().",
        (long long)group->rank);
    return NULL;
}

/* Count a collective that was enqueued, and return its work. */
static PyObject *count_unfinished(PyObject *work) {
    num_unfinished += work && work != Py_None;
    return work;
}

int collective_fake_all_gather(struct collective_group *group, PyObject *fake) {
    ref_set(&group->gather_group, Py_NewRef(fake));
    ref_set(&group->all_gather, PyObject_GetAttrString(fake, "_allgather_base"));
    return group->all_gather ? 0 : -1;
}

int collective_fake_reduce_scatter(struct collective_group *group, PyObject *fake) {
    ref_set(&group->scatter_group, Py_NewRef(fake));
    ref_set(&group->reduce_scatter, PyObject_GetAttrString(fake, "_reduce_scatter_base"));
    return group->reduce_scatter ? 0 : -1;
}

static PyObject *call_replacement(PyObject *function, PyObject *group, PyObject *output, PyObject *input) {
    OWNED *args = input ? PyTuple_Pack(2, output, input) : PyTuple_Pack(1, output);
    OWNED *kwargs = Py_BuildValue("{sO}", "group", group);
    return args && kwargs ? PyObject_Call(function, args, kwargs) : NULL;
}

PyObject *collective_all_gather(const struct collective_group *group, PyObject *output, PyObject *input) {
    PyObject *function = find_replacement(gather_names, 2);
    if (!group->all_gather)
        return raise_groups_released(group);
    if (function)
        return count_unfinished(call_replacement(function, group->gather_group, output, input));
    return count_unfinished(
        PyObject_CallFunctionObjArgs(group->all_gather, output, input, gather_options, NULL));
}

bool collective_can_coalesce(const struct collective_group *group) {
    return group->all_gather && !find_replacement(gather_names, 2) &&
           PyObject_HasAttrString(group->gather_group, "allgather_into_tensor_coalesced");
}

PyObject *collective_all_gather_coalesced(const struct collective_group *group, PyObject *outputs,
                                          PyObject *inputs) {
    OWNED *method =
        find_method(group->gather_group, "all_gather_single_coalesced", "allgather_into_tensor_coalesced");
    if (!method)
        return NULL;
    return count_unfinished(PyObject_CallFunctionObjArgs(method, outputs, inputs, gather_options, NULL));
}

PyObject *collective_reduce_scatter(const struct collective_group *group, PyObject *output, PyObject *input) {
    PyObject *function = find_replacement(scatter_names, 2);
    if (!group->reduce_scatter)
        return raise_groups_released(group);
    if (function)
        return count_unfinished(call_replacement(function, group->scatter_group, output, input));
    return count_unfinished(
        PyObject_CallFunctionObjArgs(group->reduce_scatter, output, input, scatter_options, NULL));
}

PyObject *collective_all_reduce(const struct collective_group *group, PyObject *tensor) {
    PyObject *function = find_replacement(reduce_names, 1);
    if (!group->all_reduce)
        return raise_groups_released(group);
    if (function)
        return count_unfinished(call_replacement(function, group->group, tensor, NULL));
    OWNED *tensors = PyList_New(1);
    if (!tensors || PyList_SetItem(tensors, 0, Py_NewRef(tensor)) < 0)
        return NULL;
    return count_unfinished(PyObject_CallFunctionObjArgs(group->all_reduce, tensors, reduce_options, NULL));
}

int collective_wait(PyObject *work) {
    OWNED *waited = work;
    if (work == Py_None)
        return 0;
    if (ref_done(PyObject_CallMethodObjArgs(waited, torch_names.wait, NULL)) < 0)
        return -1;
    num_unfinished--;
    return 0;
}
