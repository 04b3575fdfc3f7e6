/* Views of Python tensors, and tensors over memory, by the C functions that torch.Tensor publishes for
 * DLPack. */
#include "torch/tensor.h"

#include <stdlib.h>
#include <string.h>

#include "base/pages.h"
#include "torch/kernel_library.h"
#include "torch/ref.h"
#include "torch/torch_abi.h"

/* The parts of DLPack 1 that are used here. enum device_kind has the other devices. */
enum { DLPACK_MAJOR = 1, DL_CPU = 1, DL_CUDA_HOST = 3, DL_ROCM_HOST = 11 };
enum { DL_INT = 0, DL_UINT = 1, DL_FLOAT = 2, DL_BFLOAT = 4 };

struct dl_tensor {
    void *data;
    struct {
        int32_t type;
        int32_t index;
    } device;
    int32_t ndim;
    struct {
        uint8_t code;
        uint8_t bits;
        uint16_t lanes;
    } dtype;
    int64_t *shape;
    int64_t *strides;
    uint64_t byte_offset;
};

/* A tensor with a deleter for its memory. */
struct dl_managed {
    uint32_t major;
    uint32_t minor;
    void *context;
    void (*deleter)(struct dl_managed *self);
    uint64_t flags;
    struct dl_tensor tensor;
};

struct dl_exchange {
    uint32_t major;
    uint32_t minor;
    struct dl_exchange *previous; /* an older version of the table */
    void (*managed_tensor_allocator)(void);
    void (*managed_tensor_from_py_object)(void);
    int (*managed_tensor_to_py_object)(struct dl_managed *managed, void **tensor);
    int (*dltensor_from_py_object)(void *tensor, struct dl_tensor *view);
    int (*current_work_stream)(int32_t device_type, int32_t device_index, void **stream);
};

static struct {
    PyTypeObject *tensor_type; /* owned; never freed; NULL before tensor_init */
    int (*from_py_object)(void *tensor, struct dl_tensor *view);
    int (*to_py_object)(struct dl_managed *managed, void **tensor);
    bool is_rocm;
    struct kernel_stream cpu_stream;
} exchange;

/* Return the exchange table of version DLPACK_MAJOR from the chain of versions; NULL when there is none. */
static const struct dl_exchange *find_exchange(PyObject *tensor_type) {
    OWNED *capsule = PyObject_GetAttrString(tensor_type, "__dlpack_c_exchange_api__");
    const struct dl_exchange *table = capsule ? PyCapsule_GetPointer(capsule, "dlpack_exchange_api") : NULL;
    PyErr_Clear();
    while (table && table->major != DLPACK_MAJOR)
        table = table->previous;
    return table;
}

/* Split over torch's threads. torch's C++ parallel_for starts no thread for less than a grain either. */
static void cpu_parallel_for(int64_t begin, int64_t end, int64_t grain, kernel_body body, void *context) {
    if (end - begin <= grain || torch_abi.torch_parallel_for(begin, end, grain, body, context) != 0)
        body(begin, end, context);
}

int tensor_init(void) {
    if (exchange.tensor_type)
        return 0;
    OWNED *tensor_type = ref_find("torch", "Tensor");
    const struct dl_exchange *table = tensor_type ? find_exchange(tensor_type) : NULL;
    bool is_complete = table && table->dltensor_from_py_object && table->managed_tensor_to_py_object;
    if (!is_complete || !PyType_Check(tensor_type))
        return RAISED(PyExc_ImportError,
                      "fsdp_c needs the DLPack exchange API of torch.Tensor, which this torch "
                      "lacks: install an official build of torch");
    OWNED *hip = ref_find("torch.version", "hip");
    if (!hip)
        return -1;
    exchange.is_rocm = hip != Py_None; /* torch calls an AMD GPU "cuda" too; DLPack does not */
    exchange.from_py_object = table->dltensor_from_py_object;
    exchange.to_py_object = table->managed_tensor_to_py_object;
    exchange.cpu_stream.parallel_for = cpu_parallel_for;
    exchange.tensor_type = (PyTypeObject *)Py_NewRef(tensor_type);
    return 0;
}

static enum dtype dtype_of(uint8_t code, uint8_t bits, uint16_t lanes) {
    if (lanes == 1 && code == DL_BFLOAT && bits == 16)
        return DTYPE_BFLOAT16;
    if (lanes == 1 && code == DL_FLOAT && (bits == 16 || bits == 32 || bits == 64))
        return bits == 32 ? DTYPE_FLOAT32 : bits == 64 ? DTYPE_FLOAT64 : DTYPE_FLOAT16;
    const int nbytes = bits * lanes / 8;
    return nbytes <= 16 ? (enum dtype)(DTYPE_OTHER + nbytes) : DTYPE_OTHER;
}

/* Device types by torch's numbers and names. Any other one is a backend outside of torch. */
static const struct {
    int32_t type;
    const char *name;
    enum device_kind kind;
} devices[] = {
    {0, "cpu", DEVICE_CPU}, {1, "cuda", DEVICE_CUDA}, {8, "maia", DEVICE_MAIA}, {12, "xpu", DEVICE_XPU}};
enum { NUM_DEVICES = sizeof devices / sizeof *devices };

static enum device_kind device_at(int index) {
    if (index == NUM_DEVICES)
        return DEVICE_PRIVATE;
    return devices[index].kind == DEVICE_CUDA && exchange.is_rocm ? DEVICE_ROCM : devices[index].kind;
}

enum device_kind tensor_device_of(int32_t torch_type) {
    int index = 0;
    while (index < NUM_DEVICES && devices[index].type != torch_type)
        index++;
    return device_at(index);
}

enum device_kind tensor_device_named(const char *type) {
    int index = 0;
    while (index < NUM_DEVICES && strcmp(devices[index].name, type) != 0)
        index++;
    return device_at(index);
}

/* Replace torch's message, which contains a C++ stack trace. */
static int raise_no_dense_memory(PyObject *tensor) {
    PyErr_Clear();
    OWNED *device = PyObject_GetAttrString(tensor, "device");
    OWNED *layout = device ? PyObject_GetAttrString(tensor, "layout") : NULL;
    if (layout)
        PyErr_Format(PyExc_RuntimeError,
                     "expected a dense tensor with memory, got a tensor of layout %S on device %S", layout,
                     device);
    return -1;
}

int tensor_view_of(PyObject *tensor, struct tensor_view *view) {
    struct dl_tensor dl;
    if (!PyObject_TypeCheck(tensor, exchange.tensor_type))
        return RAISED(PyExc_TypeError, "expected a torch.Tensor, got %R", (PyObject *)Py_TYPE(tensor));
    if (exchange.from_py_object(tensor, &dl) != 0)
        return raise_no_dense_memory(tensor);
    const int32_t type = dl.device.type;
    bool is_host = type == DL_CPU || type == DL_CUDA_HOST || type == DL_ROCM_HOST;
    *view = (struct tensor_view){
        .data = dl.data ? (char *)dl.data + dl.byte_offset : NULL,
        .dtype = dtype_of(dl.dtype.code, dl.dtype.bits, dl.dtype.lanes),
        .device = is_host ? DEVICE_CPU : (enum device_kind)dl.device.type,
        .device_index = dl.device.index,
        .ndim = dl.ndim,
        .sizes = dl.shape,
        .strides = dl.strides,
    };
    return 0;
}

/* ---- tensors over memory ---- */

/* A managed tensor together with its sizes and strides. */
struct tensor_memory {
    struct dl_managed managed;
    int64_t numbers[];
};

static void tensor_memory_delete(struct dl_managed *managed) {
    free(managed); /* first member of its struct tensor_memory */
}

static void set_dtype(struct dl_tensor *tensor, enum dtype dtype) {
    tensor->dtype.code = dtype == DTYPE_BFLOAT16    ? DL_BFLOAT
                         : dtype < DTYPE_COUNT      ? DL_FLOAT
                         : dtype == DTYPE_OTHER + 1 ? DL_UINT
                                                    : DL_INT;
    tensor->dtype.bits = (uint8_t)(8 * dtype_nbytes(dtype));
    tensor->dtype.lanes = 1;
}

static void set_sizes(struct tensor_memory *memory, const struct tensor_view *view) {
    struct dl_tensor *tensor = &memory->managed.tensor;
    int64_t step = 1;
    tensor->shape = memory->numbers;
    tensor->strides = memory->numbers + view->ndim;
    for (int32_t d = view->ndim - 1; d >= 0; d--) {
        tensor->shape[d] = view->sizes[d];
        tensor->strides[d] = view->strides ? view->strides[d] : step;
        step *= view->sizes[d] > 0 ? view->sizes[d] : 1;
    }
}

PyObject *tensor_from_view(const struct tensor_view *view) {
    void *tensor = NULL;
    struct tensor_memory *memory = malloc(sizeof *memory + 2 * (size_t)view->ndim * sizeof(int64_t));
    if (!memory)
        return PyErr_NoMemory();
    memory->managed = (struct dl_managed){.major = DLPACK_MAJOR, .deleter = tensor_memory_delete};
    memory->managed.tensor = (struct dl_tensor){.data = view->data, .ndim = view->ndim};
    memory->managed.tensor.device.type = view->device == DEVICE_CPU ? DL_CPU : (int32_t)view->device;
    memory->managed.tensor.device.index = view->device == DEVICE_CPU ? 0 : view->device_index;
    set_dtype(&memory->managed.tensor, view->dtype);
    set_sizes(memory, view);
    if (exchange.to_py_object(&memory->managed, &tensor) == 0)
        return tensor;
    free(memory);
    return NULL;
}

/* ---- properties of a view ---- */

int64_t tensor_view_numel(const struct tensor_view *view) {
    int64_t numel = 1;
    for (int32_t d = 0; d < view->ndim; d++)
        numel *= view->sizes[d];
    return numel;
}

bool tensor_view_is_contiguous(const struct tensor_view *view) {
    int64_t expected = 1;
    for (int32_t d = view->ndim - 1; view->strides && d >= 0; d--) {
        if (view->sizes[d] == 0)
            return true;
        if (view->sizes[d] != 1 && view->strides[d] != expected)
            return tensor_view_numel(view) == 0;
        expected *= view->sizes[d];
    }
    return true;
}

void tensor_prefer_large_pages(const struct tensor_view *view) {
    if (view->device == DEVICE_CPU)
        pages_prefer_large(view->data, (size_t)(tensor_view_numel(view) * dtype_nbytes(view->dtype)));
}

const struct kernel_stream *tensor_kernel_stream(const struct tensor_view *view) {
    static _Thread_local struct kernel_stream stream;
    if (view->device == DEVICE_CPU)
        return &exchange.cpu_stream;
    if (view->device == DEVICE_CUDA && torch_abi.aoti_torch_get_current_cuda_stream)
        torch_abi.aoti_torch_get_current_cuda_stream(view->device_index, &stream.cuda_stream);
    stream.device = view->device;
    stream.device_index = view->device_index;
    return &stream;
}

int tensor_check(enum status status, const char *operation) {
    switch (status) {
    case STATUS_OK:
        return 0;
    case STATUS_NO_MEMORY:
        PyErr_NoMemory();
        return -1;
    case STATUS_DEVICE: {
        const char *reason = NULL;
        if (!PyErr_Occurred()) /* set by torch's operators */
            PyErr_Format(PyExc_RuntimeError, "%s: CUDA refused the launch: %s", operation,
                         kernels_of(DEVICE_CUDA, 0, &reason)->device_error());
        return -1;
    }
    case STATUS_UNSUPPORTED:
        return RAISED(PyExc_NotImplementedError, "%s: no kernel for this dtype or device", operation);
    case STATUS_INVALID:
    default:
        return RAISED(PyExc_RuntimeError, "%s: an argument is out of its domain", operation);
    }
}
