#include "handle/attributes.h"

#include "torch/ref.h"

void attributes_fini(struct attributes *attributes) {
    Py_CLEAR(attributes->dict);
}

int attributes_begin(struct attributes *attributes, struct storage *storage) {
    if (!attributes->dict)
        attributes->dict = PyObject_GetAttrString(storage->param->tensor, "__dict__");
    return attributes->dict ? attributes_storage(attributes, storage) : -1;
}

/* The entry is `value`, or is not there where that is NULL. */
static int put(struct attributes *attributes, const char *name, PyObject *value) {
    OWNED *key = PyUnicode_InternFromString(name);
    int result = key ? 0 : -1;
    if (key && value)
        result = PyDict_SetItem(attributes->dict, key, value);
    else if (key && PyDict_Contains(attributes->dict, key) == 1)
        result = PyDict_DelItem(attributes->dict, key);
    return PyErr_Occurred() ? -1 : result;
}

int attributes_storage(struct attributes *attributes, struct storage *storage) {
    const struct precision_copy *compute = &storage->copies[PRECISION_COMPUTE];
    const struct precision_copy *full = &storage->copies[PRECISION_FULL];
    bool two_precisions = storage->param->sharded && compute->low_precision;
    if (!attributes->dict)
        return 0;
    if (two_precisions && storage_make_copy(storage, PRECISION_FULL) < 0)
        return -1;
    if (put(attributes, "_local_shard", storage->local_shard) < 0 ||
        put(attributes, "_full_param_padded", attributes_full(storage)) < 0 ||
        put(attributes, "_full_prec_full_param_padded", two_precisions ? full->full.tensor : NULL) < 0)
        return -1;
    return put(attributes, "_mp_shard", attributes_low_precision_shard(storage));
}

int attributes_cpu_grad(struct attributes *attributes, PyObject *grad) {
    return attributes->dict ? put(attributes, "_cpu_grad", grad) : 0;
}
