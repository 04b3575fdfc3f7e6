/* The Python type FlatLayout: an immutable object that owns one flat_layout. */
#include "python/types.h"

#include <structmember.h>

#include "base/memory.h"

/* The tuples that a layout caches on first access: loops over parameters read them for each parameter. */
enum tuple_kind { PARAM_NUMELS, PARAM_OFFSETS, SEGMENT_NUMELS, PADDING_MASK, OWN_RANGES, NUM_CACHED };

struct layout_object {
    PyObject_HEAD
    struct flat_layout layout; /* owned */
    PyObject
        *cached_tuples[NUM_CACHED]; /* owned, or NULL until read; tuples of numbers, so no reference cycle */
};

static void layout_object_dealloc(PyObject *self) {
    for (int kind = 0; kind < NUM_CACHED; kind++)
        Py_CLEAR(((struct layout_object *)self)->cached_tuples[kind]);
    layout_fini(&((struct layout_object *)self)->layout);
    object_free(self);
}

const struct flat_layout *layout_of(PyObject *object) {
    /* The type is final, so its tp_dealloc identifies its instances, even across reloads of the module. */
    if (PyType_GetSlot(Py_TYPE(object), Py_tp_dealloc) == (void *)layout_object_dealloc)
        return &((struct layout_object *)object)->layout;
    PyErr_Format(PyExc_TypeError, "expected a FlatLayout, got %R", (PyObject *)Py_TYPE(object));
    return NULL;
}

/* ---- construction ---- */

static int check_rank(long long rank, int64_t world_size) {
    if (rank < 0 || rank >= world_size)
        return RAISED(PyExc_ValueError, "Expects `rank` in [0, %lld) but got %lld", (long long)world_size,
                      rank);
    return 0;
}

static int check_arguments(const struct layout_spec *spec) {
    if (spec->num_params == 0)
        return RAISED(PyExc_ValueError, "Expects non-empty `param_numels`");
    if (spec->aligned_numel < 0)
        return RAISED(PyExc_ValueError, "Expects non-negative `aligned_numel` but got %lld",
                      (long long)spec->aligned_numel);
    if (spec->world_size < 1)
        return RAISED(PyExc_ValueError, "Expects positive `world_size` but got %lld",
                      (long long)spec->world_size);
    return check_rank(spec->rank, spec->world_size);
}

static int read_numels(PyObject *numels, int64_t *output) {
    const Py_ssize_t count = PyTuple_Size(numels);
    for (Py_ssize_t index = 0; index < count; index++) {
        output[index] = PyLong_AsLongLong(PyTuple_GetItem(numels, index));
        if (output[index] == -1 && PyErr_Occurred())
            return -1;
        if (output[index] < 0)
            return RAISED(PyExc_ValueError, "Expects non-negative sizes but `param_numels[%zd]` is %lld",
                          index, (long long)output[index]);
    }
    return 0;
}

static int layout_object_init(struct layout_object *self, PyObject *numels, struct layout_spec *spec) {
    spec->num_params = PyTuple_Size(numels);
    if (check_arguments(spec) < 0)
        return -1;
    int64_t *buffer = mem_new_array((size_t)spec->num_params, sizeof *buffer);
    if (buffer && read_numels(numels, buffer) < 0) {
        mem_free(buffer);
        return -1;
    }
    spec->param_numels = buffer;
    const enum status status = buffer ? layout_init(&self->layout, spec) : STATUS_NO_MEMORY;
    mem_free(buffer);
    if (status == STATUS_NO_MEMORY)
        PyErr_NoMemory();
    else if (status) /* each argument is valid here, so their sum overflowed */
        PyErr_SetString(PyExc_OverflowError,
                        "the flat parameter has more elements than a 64-bit integer counts");
    return status ? -1 : 0;
}

static PyObject *layout_object_new(PyTypeObject *type, PyObject *args, PyObject *kwargs) {
    static char *names[] = {"param_numels", "aligned_numel", "world_size", "rank", "sharded", NULL};
    PyObject *sequence;
    long long aligned_numel, world_size, rank;
    int sharded;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "OLLLp:FlatLayout", names, &sequence, &aligned_numel,
                                     &world_size, &rank, &sharded)) {
        return NULL;
    }
    struct layout_spec spec = {
        .aligned_numel = aligned_numel, .world_size = world_size, .rank = rank, .sharded = sharded != 0};
    OWNED *numels = PySequence_Tuple(sequence);
    if (!numels)
        return NULL;
    PyObject *self = ((allocfunc)PyType_GetSlot(type, Py_tp_alloc))(type, 0);
    if (self && layout_object_init((struct layout_object *)self, numels, &spec) < 0)
        Py_CLEAR(self);
    return self;
}

/* ---- attributes ---- */

static PyObject *item_of(const struct flat_layout *layout, enum tuple_kind kind, int64_t index,
                         int64_t rank) {
    switch (kind) {
    case PARAM_NUMELS:
        return PyLong_FromLongLong(layout_param_numel(layout, index));
    case PARAM_OFFSETS:
        return PyLong_FromLongLong(layout_param_offset(layout, index));
    case SEGMENT_NUMELS:
        return PyLong_FromLongLong(layout->segments[index].numel);
    case PADDING_MASK:
        return PyBool_FromLong(layout->segments[index].param == LAYOUT_PADDING);
    case OWN_RANGES:
    case NUM_CACHED:
    default:
        break;
    }
    const struct layout_shard_range range = layout_shard_range(layout, index, rank);
    return Py_BuildValue("(OLLL)", range.in_shard ? Py_True : Py_False, (long long)range.offset_in_shard,
                         (long long)range.numel_in_shard, (long long)range.offset_in_param);
}

/* Return a tuple with one item per parameter, or per segment. New reference, or NULL with an exception. */
static PyObject *tuple_of(const struct flat_layout *layout, enum tuple_kind kind, int64_t rank) {
    const bool per_segment = kind == SEGMENT_NUMELS || kind == PADDING_MASK;
    const int64_t count = per_segment ? layout->num_segments : layout->num_params;
    PyObject *tuple = PyTuple_New((Py_ssize_t)count);
    for (int64_t index = 0; tuple && index < count; index++) {
        PyObject *item = item_of(layout, kind, index, rank);
        if (!item || PyTuple_SetItem(tuple, (Py_ssize_t)index, item) < 0)
            Py_CLEAR(tuple);
    }
    return tuple;
}

/* Return a tuple of this rank from the cache, new reference, or NULL with an exception. */
static PyObject *get_cached_tuple(struct layout_object *self, enum tuple_kind kind) {
    if (!self->cached_tuples[kind]) {
        PyObject *tuple = tuple_of(&self->layout, kind, self->layout.rank);
        Py_XDECREF(self->cached_tuples[kind]); /* garbage collection meanwhile may have filled the cache */
        self->cached_tuples[kind] = tuple;
    }
    return Py_XNewRef(self->cached_tuples[kind]);
}

static PyObject *get_tuple(PyObject *self, void *kind) {
    return get_cached_tuple((struct layout_object *)self, *(const enum tuple_kind *)kind);
}

/* Return the rank in `object`, or this rank for None; -1 with an exception if it is out of range. */
static int64_t parse_rank(const struct flat_layout *layout, PyObject *object) {
    if (object == Py_None)
        return layout->rank;
    const long long rank = PyLong_AsLongLong(object);
    if (rank == -1 && PyErr_Occurred())
        return -1;
    return check_rank(rank, layout->world_size) < 0 ? -1 : rank;
}

static PyObject *shard_ranges(PyObject *self, PyObject *args, PyObject *kwargs) {
    static char *names[] = {"rank", NULL};
    const struct flat_layout *layout = &((struct layout_object *)self)->layout;
    PyObject *object = Py_None;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "|O:shard_ranges", names, &object))
        return NULL;
    const int64_t rank = parse_rank(layout, object);
    if (rank == layout->rank)
        return get_cached_tuple((struct layout_object *)self, OWN_RANGES);
    return rank < 0 ? NULL : tuple_of(layout, OWN_RANGES, rank);
}

/* ---- the type ---- */

#define COUNT(name, doc) {#name, T_LONGLONG, offsetof(struct layout_object, layout.name), READONLY, doc}
static PyMemberDef members[] = {
    COUNT(num_params, "Parameters in the flat parameter."),
    COUNT(numel,
          "Elements of the flat parameter, inner and divisibility padding included, right padding not."),
    COUNT(shard_numel, "Elements of one shard, the same on all ranks; numel when not sharded."),
    COUNT(padded_numel, "shard_numel * world_size; numel when not sharded."),
    COUNT(shard_start, "First element of this rank's shard; may lie beyond numel."),
    COUNT(shard_numel_valid, "Elements of this rank's shard that exist in the flat parameter."),
    COUNT(shard_numel_padded, "Right padding of this rank's shard."),
    COUNT(world_size, NULL),
    COUNT(rank, NULL),
    {"sharded", T_BOOL, offsetof(struct layout_object, layout.sharded), READONLY,
     "False: every rank holds everything."},
    {NULL, 0, 0, 0, NULL},
};

static const enum tuple_kind numels = PARAM_NUMELS, offsets = PARAM_OFFSETS;
static const enum tuple_kind segment_numels = SEGMENT_NUMELS, padding_mask = PADDING_MASK;

static PyGetSetDef getters[] = {
    {"param_numels", get_tuple, NULL, "Elements per parameter.", (void *)&numels},
    {"param_offsets", get_tuple, NULL, "First element of each parameter in the flat parameter.",
     (void *)&offsets},
    {"numels_with_padding", get_tuple, NULL, "Elements per segment, padding included.",
     (void *)&segment_numels},
    {"is_padding_mask", get_tuple, NULL, "Per segment, whether it is padding.", (void *)&padding_mask},
    {NULL, NULL, NULL, NULL, NULL},
};

static PyMethodDef methods[] = {
    {"shard_ranges", (PyCFunction)(void (*)(void))shard_ranges, METH_VARARGS | METH_KEYWORDS,
     "shard_ranges($self, rank=None)\n--\n\n"
     "Per parameter (in_shard, offset_in_shard, numel_in_shard, offset_in_param) for a rank, by default this "
     "one.\n\nAll zero where the shard holds nothing of the parameter. ValueError for a rank outside the "
     "world."},
    {NULL, NULL, 0, NULL},
};

static const char type_doc[] =
    "FlatLayout(param_numels, aligned_numel, world_size, rank, sharded)\n--\n\n"
    "Offsets, padding and shards of one flat parameter; element counts only. Immutable.\n\n"
    "aligned_numel 0 packs the parameters without any padding (use_orig_params=False). ValueError for no "
    "parameters,\na negative size or alignment, or a rank outside the world; OverflowError when the total "
    "exceeds 64 bits.";

PyObject *layout_type_create(PyObject *module) {
    PyType_Slot slots[] = {
        {Py_tp_doc, (void *)type_doc},
        {Py_tp_new, layout_object_new},
        {Py_tp_dealloc, layout_object_dealloc},
        {Py_tp_members, members},
        {Py_tp_getset, getters},
        {Py_tp_methods, methods},
        {0, NULL},
    };
    PyType_Spec spec = {
        .name = "fsdp_c._C.FlatLayout",
        .basicsize = sizeof(struct layout_object),
        .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_IMMUTABLETYPE,
        .slots = slots,
    };
    return PyType_FromModuleAndSpec(module, &spec, NULL);
}
