/* What outside code reads on the flat parameter, under the names torch gives it: entries of its __dict__, which follow what the
 * handle holds (B-011, B-023, B-024). Nothing here reads them back. */
#include "handle/handle.h"

/* The entry is `value`, or is not there where that is NULL. */
static int publish(struct handle *handle, const char *name, PyObject *value) {
    PyObject *key = PyUnicode_InternFromString(name);
    int result = key ? 0 : -1;
    if (key && value)
        result = PyDict_SetItem(handle->published, key, value);
    else if (key && PyDict_Contains(handle->published, key) == 1)
        result = PyDict_DelItem(handle->published, key);
    Py_XDECREF(key);
    return PyErr_Occurred() ? -1 : result;
}

/* Without sharding the low-precision copy of the shard is the unsharded parameter. */
static PyObject *low_precision_shard(const struct handle *handle) {
    const struct form *form = &handle->forms[PRECISION_COMPUTE];
    if (!form->low_precision)
        return NULL;
    return handle->sharded ? form->low_precision_shard.tensor : form->full.tensor;
}

int handle_publish(struct handle *handle) {
    const struct form *compute = &handle->forms[PRECISION_COMPUTE], *full = &handle->forms[PRECISION_FULL];
    bool two_precisions = handle->sharded && compute->low_precision;
    if (!handle->published && !(handle->published = PyObject_GetAttrString(handle->flat_param, "__dict__")))
        return -1;
    if (two_precisions && handle_make_form(handle, PRECISION_FULL) < 0)
        return -1;
    if (publish(handle, "_local_shard", handle->local_shard) < 0)
        return -1;
    if (publish(handle, "_full_param_padded", handle->sharded ? compute->full.tensor : NULL) < 0)
        return -1;
    if (publish(handle, "_full_prec_full_param_padded", two_precisions ? full->full.tensor : NULL) < 0)
        return -1;
    return publish(handle, "_mp_shard", low_precision_shard(handle));
}

int handle_publish_cpu_grad(struct handle *handle, PyObject *grad) {
    return handle->published ? publish(handle, "_cpu_grad", grad) : 0;
}
