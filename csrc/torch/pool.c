#include "torch/pool.h"

#include <string.h>

#include "torch/py_torch.h"
#include "torch/ref.h"

/* Find the functions that torch.cuda.use_mem_pool() calls. An interrupt in the exit of that Python function
 * would leave the pool in use. Return 1, 0 for a torch without functions of these names, or -1. */
static int find_functions(struct pool *pool) {
    if ((pool->enter = ref_find("torch._C", "_cuda_beginAllocateCurrentThreadToPool")) &&
        (pool->leave = ref_find("torch._C", "_cuda_endAllocateToPool")) &&
        (pool->release = ref_find("torch._C", "_cuda_releasePool")))
        return 1;
    if (!PyErr_ExceptionMatches(PyExc_AttributeError))
        return -1;
    PyErr_Clear();
    return 0;
}

/* [Note: deferred pools] torch's allocator aborts the process when a pool is destroyed while another pool is
 * in use on the device, as during a graph capture. A pool that is collected then is kept in `deferred_pools`,
 * which is cleared when a later pool is left, created or destroyed. Captures by other threads and pools that
 * the script enters are not detected. */
static PyObject *deferred_pools; /* owned list, or NULL */
static int num_entered;

static bool release_is_unsafe(void) {
    OWNED *function = ref_find("torch.cuda", "is_current_stream_capturing");
    OWNED *is_capturing = function ? PyObject_CallNoArgs(function) : NULL;
    if (!is_capturing)
        PyErr_Clear(); /* a collection where __builtins__ is empty cannot import */
    return num_entered ||
           is_capturing != Py_False; /* num_entered is read last: the call may run other threads */
}

static void release_deferred(void) {
    if (deferred_pools && !release_is_unsafe())
        Py_CLEAR(deferred_pools);
}

/* Defer the release of `pool` if unsafe; called before the last reference is dropped. */
static void defer_release(PyObject *pool) {
    PyObject *error = PyErr_GetRaisedException();
    release_deferred();
    if (pool && release_is_unsafe() &&
        ((!deferred_pools && !(deferred_pools = PyList_New(0))) || PyList_Append(deferred_pools, pool) < 0))
        PyErr_Clear();
    PyErr_SetRaisedException(error);
}

/* Replace the MemPool by a new one on the pool's device, which is current meanwhile. 0, or -1 and it is
 * unchanged. */
static int new_pool(struct pool *pool, PyObject *module) {
    PyObject *current = context_enter(PyObject_CallMethod(module, "device", "O", pool->device));
    OWNED *mem_pool = current ? PyObject_CallMethod(module, "MemPool", NULL) : NULL;
    OWNED *id = mem_pool ? PyObject_GetAttrString(mem_pool, "id") : NULL;
    if ((current && context_leave(current) < 0) || !id)
        return -1;
    defer_release(pool->pool);
    ref_set(&pool->pool, Py_NewRef(mem_pool));
    ref_set(&pool->id, Py_NewRef(id));
    return 0;
}

int pool_init(struct pool *pool, PyObject *device) {
    memset(pool, 0, sizeof *pool);
    OWNED *type = PyObject_GetAttrString(device, "type");
    if (!type || PyUnicode_CompareWithASCIIString(type, "cuda") != 0)
        return type ? 0 : -1;
    /* torch's cudaMallocAsync allocator has pools for graph captures only */
    OWNED *module = PyImport_ImportModule("torch.cuda");
    OWNED *backend = module ? PyObject_CallMethod(module, "get_allocator_backend", NULL) : NULL;
    pool->device = Py_NewRef(device);
    pool->index = PyObject_GetAttrString(device, "index");
    int is_supported = backend && pool->index ? PyUnicode_CompareWithASCIIString(backend, "native") == 0 : -1;
    if (is_supported > 0)
        is_supported = find_functions(pool);
    int result = is_supported > 0 ? new_pool(pool, module) : is_supported;
    if (result < 0)
        pool_fini(pool);
    return result;
}

int pool_recreate(struct pool *pool) {
    OWNED *module = PyImport_ImportModule("torch.cuda");
    if (!module || new_pool(pool, module) < 0)
        return -1;
    pool->arena_nbytes = 0;
    return 0;
}

int pool_empty(struct pool *pool) {
    if (!pool->pool || !pool->reserved)
        return 0;
    int result = pool_recreate(pool);
    pool->reserved = result < 0;
    return result;
}

void pool_fini(struct pool *pool) {
    defer_release(pool->pool);
    PyObject **const owned[] = {&pool->pool,    &pool->id,     &pool->enter, &pool->leave,
                                &pool->release, &pool->device, &pool->index};
    for (size_t i = 0; i < sizeof owned / sizeof *owned; i++)
        Py_CLEAR(*owned[i]);
}

static int call(PyObject *function, const struct pool *pool) {
    return ref_done(PyObject_CallFunctionObjArgs(function, pool->index, pool->id, NULL));
}

int pool_enter(struct pool *pool) {
    if (!pool->pool)
        return 0;
    num_entered++; /* count before the call, which may run the garbage collector */
    pool->entered = call(pool->enter, pool) == 0;
    num_entered -= !pool->entered;
    return pool->entered ? 0 : -1;
}

int pool_leave(struct pool *pool) {
    if (!pool->entered)
        return 0;
    PyObject *error = PyErr_GetRaisedException();
    pool->entered = false;
    int result = call(pool->leave, pool) < 0 ? -1 : call(pool->release, pool);
    num_entered--;
    if (!result)
        release_deferred();
    if (error)
        PyErr_SetRaisedException(error);
    return result;
}

/* ---- the arena ---- */

int64_t pool_block_nbytes(int64_t nbytes) {
    int64_t rounded = (nbytes + POOL_UNIT - 1) / POOL_UNIT * POOL_UNIT;
    return rounded > POOL_SMALL ? rounded : 0;
}

int64_t pool_arena_nbytes(int64_t nbytes_of_blocks) {
    return nbytes_of_blocks ? nbytes_of_blocks + POOL_LARGEST_REST + POOL_UNIT : 0;
}

/* Allocate the arena by growing an empty storage. A tensor with elements would be filled in deterministic
 * mode, on the current stream, while other streams may write to the memory first. */
static int alloc_arena_block(struct pool *pool, int64_t nbytes) {
    OWNED *tensor = torch_empty(0, torch_names.uint8, pool->device);
    OWNED *storage = tensor ? PyObject_CallMethod(tensor, "untyped_storage", NULL) : NULL;
    OWNED *grown = storage ? PyObject_CallMethod(storage, "resize_", "L", (long long)nbytes) : NULL;
    OWNED *arena_start = grown ? PyObject_CallMethod(storage, "data_ptr", NULL) : NULL;
    if (arena_start)
        pool->arena_start = PyLong_AsVoidPtr(arena_start);
    return arena_start ? 0 : -1;
}

/* Allocate the arena in the pool and free it at once: the pool keeps the memory. If the device is out of memory,
 * try once more after empty_cache(): before torch 2.13, the allocator does not release cached memory of other
 * pools for an allocation inside a pool. */
int pool_alloc_arena(struct pool *pool, int64_t nbytes) {
    for (int attempt = 0; pool->pool && nbytes && attempt < 2; attempt++) {
        OWNED *empty_cache = attempt ? ref_find("torch.cuda", "empty_cache") : NULL;
        int result = attempt ? ref_done(empty_cache ? PyObject_CallNoArgs(empty_cache) : NULL) : 0;
        if (!result)
            result = pool_enter(pool) < 0 ? -1 : alloc_arena_block(pool, nbytes);
        if (pool_leave(pool) == 0 && !result) {
            pool->arena_nbytes = nbytes;
            return 0;
        }
        if (!PyErr_ExceptionMatches(PyExc_RuntimeError))
            return -1;
        PyErr_Clear();
    }
    return 0;
}

bool pool_arena_contains(const struct pool *pool, const void *data) {
    uintptr_t arena_start = (uintptr_t)pool->arena_start, at = (uintptr_t)data;
    return at >= arena_start && at - arena_start < (uintptr_t)pool->arena_nbytes;
}

bool pool_arena_fits(const struct pool *pool, int64_t nbytes) {
    int64_t block_nbytes = pool_block_nbytes(nbytes);
    return block_nbytes && pool_arena_nbytes(block_nbytes) <= pool->arena_nbytes;
}
