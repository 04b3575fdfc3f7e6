#include "handle/published.h"

void published_fini(struct published *published) {
    Py_CLEAR(published->dict);
}

int published_begin(struct published *published, PyObject *flat_param) {
    if (!published->dict)
        published->dict = PyObject_GetAttrString(flat_param, "__dict__");
    return published->dict ? 0 : -1;
}

/* The entry is `value`, or is not there where that is NULL. */
static int put(struct published *published, const char *name, PyObject *value) {
    PyObject *key = PyUnicode_InternFromString(name);
    int result = key ? 0 : -1;
    if (key && value)
        result = PyDict_SetItem(published->dict, key, value);
    else if (key && PyDict_Contains(published->dict, key) == 1)
        result = PyDict_DelItem(published->dict, key);
    Py_XDECREF(key);
    return PyErr_Occurred() ? -1 : result;
}

int published_storage(struct published *published, struct storage *storage) {
    const struct precision_copy *compute = &storage->copies[PRECISION_COMPUTE];
    const struct precision_copy *full = &storage->copies[PRECISION_FULL];
    bool two_precisions = storage->param->sharded && compute->low_precision;
    if (!published->dict)
        return 0;
    if (two_precisions && storage_make_copy(storage, PRECISION_FULL) < 0)
        return -1;
    if (put(published, "_local_shard", storage->local_shard) < 0)
        return -1;
    if (put(published, "_full_param_padded", published_full(storage)) < 0)
        return -1;
    if (put(published, "_full_prec_full_param_padded", two_precisions ? full->full.tensor : NULL) < 0)
        return -1;
    return put(published, "_mp_shard", published_low_precision_shard(storage));
}

int published_cpu_grad(struct published *published, PyObject *grad) {
    return published->dict ? put(published, "_cpu_grad", grad) : 0;
}
