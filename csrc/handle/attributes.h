/* What outside code reads on the flat parameter, under the names torch gives it: entries of its __dict__,
 * which follow what the handle holds (B-011, B-023, B-024).
 *
 * Invariant: nothing here is read back, and from attributes_storage on the entries are what the storage
 * holds. Without attributes_begin every function is a no-op. */
#ifndef FSDP_HANDLE_ATTRIBUTES_H
#define FSDP_HANDLE_ATTRIBUTES_H

#include "handle/storage.h"

struct attributes {
    PyObject *dict; /* owned; the flat parameter's __dict__, NULL until somebody asks for the attributes */
};

void attributes_fini(struct attributes *attributes);
int attributes_begin(struct attributes *attributes, struct storage *storage); /* 0 or -1 */
/* after lazy init, each time. 0 or -1 */
int attributes_storage(struct attributes *attributes, struct storage *storage);
int attributes_cpu_grad(struct attributes *attributes, PyObject *grad); /* 0 or -1 */
/* the invariant, where FSDP_C_CHECK is defined */
void attributes_check(const struct attributes *attributes, const struct storage *storage);

/* What stands under "_full_param_padded" and "_mp_shard". Borrowed; NULL where that entry is not there.
 * Without sharding the low-precision copy of the shard is the unsharded parameter. */
static inline PyObject *attributes_full(const struct storage *storage) {
    return storage->param->sharded ? storage->copies[PRECISION_COMPUTE].full.tensor : NULL;
}

static inline PyObject *attributes_low_precision_shard(const struct storage *storage) {
    const struct precision_copy *copy = &storage->copies[PRECISION_COMPUTE];
    if (!copy->low_precision)
        return NULL;
    return storage->param->sharded ? copy->low_precision_shard : copy->full.tensor;
}

#endif
