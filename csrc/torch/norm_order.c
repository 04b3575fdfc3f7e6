/* Probes torch.linalg.vector_norm with numbers whose norm shows in its last bits how the sum was made. */
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include "torch/norm_order.h"

/* Short tensors: the longer the sum, the rarer the probe that tells two orders apart. Lengths 9 to 15 have every tail. */
enum { SHORTEST = 9, LONGEST = 15, PROBES_LEAST = 14, PROBES_MOST = 140 };

enum { READ_ROUNDED = 1, READ_FUSED = 2 };

/* Numbers in [0, 1) with full mantissas; any fixed sequence would do. */
static double next_value(uint64_t *state) {
    *state = *state * 6364136223846793005u + 1442695040888963407u;
    return (double)(*state >> 11) / 9007199254740992.0;
}

/* New reference to a list of floats, or NULL. */
static PyObject *make_list(const double *values, int64_t numel) {
    PyObject *list = PyList_New((Py_ssize_t)numel);
    for (int64_t i = 0; list && i < numel; i++) {
        PyObject *value = PyFloat_FromDouble(values[i]);
        if (!value || PyList_SetItem(list, (Py_ssize_t)i, value) != 0)
            Py_CLEAR(list);
    }
    return list;
}

/* New reference to a CPU tensor of these values, or NULL. */
static PyObject *make_tensor(PyObject *torch, const double *values, int64_t numel, const char *dtype_name) {
    PyObject *list = make_list(values, numel);
    PyObject *make = list ? PyObject_GetAttrString(torch, "tensor") : NULL;
    PyObject *dtype = make ? PyObject_GetAttrString(torch, dtype_name) : NULL;
    PyObject *keywords = dtype ? Py_BuildValue("{s:O,s:s}", "dtype", dtype, "device", "cpu") : NULL;
    PyObject *arguments = keywords ? Py_BuildValue("(O)", list) : NULL;
    PyObject *tensor = arguments ? PyObject_Call(make, arguments, keywords) : NULL;
    Py_XDECREF(arguments);
    Py_XDECREF(keywords);
    Py_XDECREF(dtype);
    Py_XDECREF(make);
    Py_XDECREF(list);
    return tensor;
}

/* torch.linalg.vector_norm of these values; -1 with no exception left when it cannot be had. */
static double torch_norm(PyObject *torch, const double *values, int64_t numel, const char *dtype_name) {
    PyObject *linalg = PyObject_GetAttrString(torch, "linalg");
    PyObject *tensor = linalg ? make_tensor(torch, values, numel, dtype_name) : NULL;
    PyObject *result = tensor ? PyObject_CallMethod(linalg, "vector_norm", "(O)", tensor) : NULL;
    PyObject *number = result ? PyObject_CallMethod(result, "item", NULL) : NULL;
    double norm = number ? PyFloat_AsDouble(number) : -1.0;
    PyErr_Clear();
    Py_XDECREF(number);
    Py_XDECREF(result);
    Py_XDECREF(tensor);
    Py_XDECREF(linalg);
    return norm;
}

static double kernel_norm(const void *values, enum dtype dtype, int64_t numel, const struct kernel_stream *stream) {
    struct tensor_view view = {.data = (void *)values, .dtype = dtype, .ndim = 1, .sizes = &numel};
    double as_double = -1.0;
    float as_float = -1.0f;
    bool is_double = dtype == DTYPE_FLOAT64;
    if (kernel_norms(is_double ? (void *)&as_double : (void *)&as_float, &view, &numel, 1, 2.0, stream) != STATUS_OK)
        return -2.0;
    return is_double ? as_double : (double)as_float;
}

/* Of the readings of the tail, keep those that explain this probe as well. */
static unsigned explain(PyObject *torch, const double *values, int64_t numel, unsigned readings) {
    float narrow[LONGEST];
    double norm_double = torch_norm(torch, values, numel, "float64");
    double norm_float = torch_norm(torch, values, numel, "float32");
    for (int64_t i = 0; i < numel; i++)
        narrow[i] = (float)values[i];
    for (unsigned reading = READ_ROUNDED; reading <= READ_FUSED; reading++) {
        struct kernel_stream stream = {.vector_nbytes = 32, .fused_tail = reading == READ_FUSED};
        if (kernel_norm(values, DTYPE_FLOAT64, numel, &stream) != norm_double ||
            kernel_norm(narrow, DTYPE_FLOAT32, numel, &stream) != norm_float) {
            readings &= ~reading;
        }
    }
    return readings;
}

static bool is_decided(unsigned readings, int64_t probes) {
    return readings == 0 || (probes >= PROBES_LEAST && readings != (READ_ROUNDED | READ_FUSED));
}

void norm_order_probe(struct kernel_stream *stream) {
    double values[LONGEST];
    uint64_t state = 1;
    unsigned readings = READ_ROUNDED | READ_FUSED;
    PyObject *torch = PyImport_ImportModule("torch");
    for (int64_t probe = 0; torch && probe < PROBES_MOST && !is_decided(readings, probe); probe++) {
        for (int64_t i = 0; i < LONGEST; i++)
            values[i] = next_value(&state);
        readings = explain(torch, values, SHORTEST + probe % (LONGEST - SHORTEST + 1), readings);
    }
    stream->vector_nbytes = readings == READ_ROUNDED || readings == READ_FUSED ? 32 : 0;
    stream->fused_tail = readings == READ_FUSED;
    PyErr_Clear();
    Py_XDECREF(torch);
}
