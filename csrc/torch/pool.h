/* Memory of one root's own on CUDA, so that what its steps gather never waits for, or breaks up, anybody else's. Nothing elsewhere,
 * and nothing with an allocator of torch's that has no pools.
 *
 * It is a torch.cuda.MemPool: what is freed stays in it and is handed out again, by the rules of torch's allocator. */
#ifndef FSDP_TORCH_POOL_H
#define FSDP_TORCH_POOL_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stdbool.h>

struct pool {
    PyObject *pool;    /* owned; NULL where there is none */
    PyObject *use;     /* owned; torch.cuda.use_mem_pool */
    PyObject *device;  /* owned */
    PyObject *entered; /* owned; the context between pool_enter and pool_leave */
    bool reserved;     /* written by the owner, once it has taken all that its steps will take */
};

/* `device` is a torch.device. 0, or -1 with an exception and `pool` zeroed. */
int pool_init(struct pool *pool, PyObject *device);
void pool_fini(struct pool *pool);

/* What it holds free goes to torch's allocator, whose empty_cache() gives it to the driver; it holds nothing, and nothing is
 * reserved. 0, or -1 and the pool is as before. */
int pool_empty(struct pool *pool);

int pool_enter(struct pool *pool); /* this thread allocates from the pool from now on. 0 or -1 */
int pool_leave(struct pool *pool); /* 0 or -1; an exception that is set stays */

#endif
