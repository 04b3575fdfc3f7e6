/* What outside code reads on the flat parameter, under the names torch gives it: entries of its __dict__, which follow what the
 * handle holds (B-011, B-023, B-024).
 *
 * Invariant: nothing here is read back. Without published_begin every function is a no-op. */
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

#endif
