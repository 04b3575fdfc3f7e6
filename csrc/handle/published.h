/* What outside code reads on the flat parameter, under the names torch gives it: entries of its __dict__, which follow what the
 * handle holds (B-011, B-023, B-024).
 *
 * Invariant: nothing here is read back, and from published_storage on the entries are what the storage holds. Without published_begin
 * every function is a no-op. */
#ifndef FSDP_HANDLE_PUBLISHED_H
#define FSDP_HANDLE_PUBLISHED_H

#include "handle/storage.h"

struct published {
    PyObject *dict; /* owned; the flat parameter's __dict__, NULL until somebody asks for the attributes */
};

void published_fini(struct published *published);
int published_begin(struct published *published, PyObject *flat_param);      /* 0 or -1 */
int published_storage(struct published *published, struct storage *storage); /* after lazy init, each time. 0 or -1 */
int published_cpu_grad(struct published *published, PyObject *grad);         /* 0 or -1 */
void published_check(const struct published *published,
                     const struct storage *storage); /* the invariant, where FSDP_C_CHECK is defined */

/* What stands under "_full_param_padded" and "_mp_shard". Borrowed; NULL where that entry is not there. Without sharding the low-precision
 * copy of the shard is the unsharded parameter. */
static inline PyObject *published_full(const struct storage *storage) {
    return storage->param->sharded ? storage->copies[PRECISION_COMPUTE].full.tensor : NULL;
}

static inline PyObject *published_low_precision_shard(const struct storage *storage) {
    const struct precision_copy *copy = &storage->copies[PRECISION_COMPUTE];
    if (!copy->low_precision)
        return NULL;
    return storage->param->sharded ? copy->low_precision_shard.tensor : copy->full.tensor;
}

#endif
