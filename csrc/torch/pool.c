#include "torch/pool.h"

#include <string.h>

static int is_cuda(PyObject *device) {
    PyObject *type = PyObject_GetAttrString(device, "type");
    int result = type ? PyUnicode_CompareWithASCIIString(type, "cuda") == 0 : -1;
    Py_XDECREF(type);
    return result;
}

int pool_init(struct pool *pool, PyObject *device) {
    memset(pool, 0, sizeof *pool);
    int cuda = is_cuda(device);
    if (cuda <= 0)
        return cuda;
    PyObject *module = PyImport_ImportModule("torch.cuda");
    if (module && (pool->use = PyObject_GetAttrString(module, "use_mem_pool")))
        pool->pool = PyObject_CallMethod(module, "MemPool", NULL);
    Py_XDECREF(module);
    pool->device = Py_NewRef(device);
    if (pool->pool)
        return 0;
    pool_fini(pool);
    return -1;
}

void pool_fini(struct pool *pool) {
    Py_CLEAR(pool->entered);
    Py_CLEAR(pool->pool);
    Py_CLEAR(pool->use);
    Py_CLEAR(pool->device);
}

int pool_enter(struct pool *pool) {
    if (!pool->pool)
        return 0;
    PyObject *context = PyObject_CallFunctionObjArgs(pool->use, pool->pool, pool->device, NULL);
    PyObject *entered = context ? PyObject_CallMethod(context, "__enter__", NULL) : NULL;
    Py_XDECREF(entered);
    if (!entered)
        Py_CLEAR(context);
    pool->entered = context;
    return context ? 0 : -1;
}

int pool_leave(struct pool *pool) {
    PyObject *context = pool->entered, *type, *value, *traceback;
    pool->entered = NULL;
    if (!context)
        return 0;
    PyErr_Fetch(&type, &value, &traceback);
    PyObject *done = PyObject_CallMethod(context, "__exit__", "OOO", Py_None, Py_None, Py_None);
    Py_DECREF(context);
    Py_XDECREF(done);
    if (type)
        PyErr_Restore(type, value, traceback);
    return done ? 0 : -1;
}
