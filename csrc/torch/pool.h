/* A memory pool of one root on CUDA, for the buffers of its collectives: their allocations neither wait for
 * other memory nor fragment it. The functions have no effect on other devices, and with an allocator of torch
 * that has no pools.
 *
 *   torch.cuda.MemPool   | arena: block of unit 0 | block of unit 1 | ... | rest |   | other blocks |
 *
 * Freed memory stays in the MemPool and is reused by the rules of torch's allocator. The arena is one free
 * segment, from which the allocator splits the blocks of the units. */
#ifndef FSDP_TORCH_POOL_H
#define FSDP_TORCH_POOL_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stdbool.h>
#include <stdint.h>

struct pool {
    PyObject *pool;                    /* owned torch.cuda.MemPool; NULL without a pool */
    PyObject *id;                      /* owned; id of the MemPool */
    PyObject *enter, *leave, *release; /* owned; functions of torch._C */
    PyObject *device, *index;          /* owned */
    bool entered;                      /* true between pool_enter and pool_leave */
    bool reserved;                     /* set by the owner once all memory of a step has been allocated */
    int64_t arena_nbytes;              /* size of the arena; 0 without one */
    const void *arena_start;
};

/* Constants of torch's allocator: the size to which blocks are rounded, the largest block in a segment for
 * small blocks, and the largest rest that is not split off a block. */
enum { POOL_UNIT = 512, POOL_SMALL = 1 << 20, POOL_LARGEST_REST = 1 << 20 };

/* `device` is a torch.device. 0, or -1 with an exception and `pool` zeroed. */
int pool_init(struct pool *pool, PyObject *device);
void pool_fini(struct pool *pool);

/* Release a reserved pool's free memory to torch's allocator, whose empty_cache() returns it to the driver,
 * and clear `reserved`. 0, or -1 and the pool is unchanged. */
int pool_empty(struct pool *pool);
/* Replace the MemPool by an empty one without an arena. 0, or -1 and the pool is unchanged. */
int pool_recreate(struct pool *pool);

/* Return the size of a block of `nbytes` in the arena; 0 for one in a segment for small blocks. */
int64_t pool_block_nbytes(int64_t nbytes);
/* Return the size of an arena for blocks of `nbytes_of_blocks` in total. The rest is large enough to be split
 * off the last block. */
int64_t pool_arena_nbytes(int64_t nbytes_of_blocks);
/* Allocate an arena of `nbytes` on the current stream, which will own its memory. 0, also when the device has
 * no memory for an arena and blocks will be allocated one by one; -1 with an exception. */
int pool_alloc_arena(struct pool *pool, int64_t nbytes);

/* Return true if the block at `data` is in the arena. Settings of torch's allocator such as max_split_size_mb
 * may keep the arena from being split. */
bool pool_arena_contains(const struct pool *pool, const void *data);

/* Return true if a block of `nbytes` fits into the arena while none of the pool's memory is in use. */
bool pool_arena_fits(const struct pool *pool, int64_t nbytes);

int pool_enter(struct pool *pool); /* Make this thread allocate from the pool. 0 or -1. */
int pool_leave(struct pool *pool); /* 0 or -1; keeps a set exception */

#endif
