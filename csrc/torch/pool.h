/* Memory of one root's own on CUDA, so that what its steps gather never waits for, or breaks up, anybody
 * else's. Nothing elsewhere, and nothing with an allocator of torch's that has no pools.
 *
 * It is a torch.cuda.MemPool: what is freed stays in it and is handed out again, by the rules of torch's
 * allocator. */
#ifndef FSDP_TORCH_POOL_H
#define FSDP_TORCH_POOL_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stdbool.h>
#include <stdint.h>

struct pool {
    PyObject *pool;                    /* owned; NULL where there is none */
    PyObject *id;                      /* owned; of the pool, as torch's functions take it */
    PyObject *enter, *leave, *release; /* owned; functions of torch._C, which use_mem_pool calls as well */
    PyObject *device, *index;          /* owned */
    bool entered;                      /* between pool_enter and pool_leave */
    /* written by the owner, once it has taken all that its steps will take */
    bool reserved;
    /* bytes of the one that pool_alloc_arena has made, or 0; free where nothing of the pool is in use */
    int64_t arena_nbytes;
    const void *arena_start; /* of the arena_nbytes */
};

/* As torch's allocator has it: at most this much comes from segments for small blocks, and so large a rest
 * stays with a block. */
enum { POOL_UNIT = 512, POOL_SMALL = 1 << 20, POOL_LARGEST_REST = 1 << 20 };

/* `device` is a torch.device. 0, or -1 with an exception and `pool` zeroed. */
int pool_init(struct pool *pool, PyObject *device);
void pool_fini(struct pool *pool);

/* What it holds free goes to torch's allocator, whose empty_cache() gives it to the driver; it holds nothing,
 * and nothing is reserved. 0, or -1 and the pool is as before. */
int pool_empty(struct pool *pool);
/* The same, amid a reservation: it has no arena_nbytes. 0, or -1 and the pool is as before. */
int pool_recreate(struct pool *pool);

/* What a block of `nbytes` takes of a arena_nbytes; 0 where it comes from segments for small blocks. */
int64_t pool_block_nbytes(int64_t nbytes);
/* How large a arena_nbytes is that is cut into blocks of so much in all: what is over stays free, as it would belong
 * to one of them otherwise. */
int64_t pool_arena_nbytes(int64_t nbytes_of_blocks);
/* On the stream whose memory it is to be: a free arena_nbytes of so much is there, unless the device has none. 0 or
 * -1. */
int pool_alloc_arena(struct pool *pool, int64_t nbytes);

/* Does the block that begins at `data` lie in the arena_nbytes? Settings of torch's allocator, as max_split_size_mb,
 * may keep it whole. */
bool pool_arena_contains(const struct pool *pool, const void *data);

/* Where nothing of the pool is in use: is a block of `nbytes` cut of the arena_nbytes? */
bool pool_arena_fits(const struct pool *pool, int64_t nbytes);

int pool_enter(struct pool *pool); /* this thread allocates from the pool from now on. 0 or -1 */
int pool_leave(struct pool *pool); /* 0 or -1; an exception that is set stays */

#endif
