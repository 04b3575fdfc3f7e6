#include "torch/kernel_library.h"

#include "kernels/pack.h"
#include "torch/ref.h"
#include "torch/tensor.h"

static PyObject *kernel_functions; /* owned; never freed; the module fsdp_c.operator_kernels */
static _Thread_local char error_text[512];

void operator_kernels_bind(PyObject *module) {
    ref_set(&kernel_functions, Py_NewRef(module));
}

/* ---- calls ---- */

/* Call the function `name` with `arguments`, which are stolen or NULL with an exception, then release the GIL
 * by `lock`. */
static enum status call_function(PyGILState_STATE lock, const char *name, PyObject *arguments) {
    PyObject *function = arguments ? PyObject_GetAttrString(kernel_functions, name) : NULL;
    int result = ref_done(function ? PyObject_CallObject(function, arguments) : NULL);
    Py_XDECREF(function);
    Py_XDECREF(arguments);
    if (result < 0 && lock == PyGILState_UNLOCKED)
        ref_take_exception(error_text, sizeof error_text);
    PyGILState_Release(lock);
    return result < 0 ? STATUS_DEVICE : STATUS_OK;
}

/* ---- tensors over the memory of kernel arguments ---- */

static PyObject *tensor_on_stream(const struct tensor_view *view, const struct kernel_stream *stream) {
    struct tensor_view device_view = *view;
    device_view.device = stream->device;
    device_view.device_index = stream->device_index;
    return tensor_from_view(&device_view);
}

static PyObject *flat_tensor(const void *data, enum dtype dtype, int64_t numel,
                             const struct kernel_stream *stream) {
    return tensor_on_stream(
        &(struct tensor_view){.data = (void *)data, .dtype = dtype, .ndim = 1, .sizes = &numel}, stream);
}

/* ---- gradients into a flat tensor ---- */

/* Return (output, views of it per source, sources, has gaps to zero, divisor). New reference, or NULL. */
static PyObject *pack_arguments(const struct pack *pack) {
    OWNED *targets = PyList_New(0);
    OWNED *sources = PyList_New(0);
    int64_t covered = 0;
    for (int64_t i = 0; targets && sources && i < pack->num_sources; i++) {
        const struct pack_source *source = &pack->sources[i];
        if (!source->view.data || source->numel == 0)
            continue;
        struct tensor_view target = source->view;
        target.data = pack->output + source->offset * dtype_nbytes(pack->output_dtype);
        target.dtype = pack->output_dtype;
        target.strides = source->output_strides;
        if (ref_append(targets, tensor_on_stream(&target, pack->stream)) < 0 ||
            ref_append(sources, tensor_on_stream(&source->view, pack->stream)) < 0)
            return NULL;
        covered += source->numel;
    }
    OWNED *output = targets && sources
                        ? flat_tensor(pack->output, pack->output_dtype, pack->output_numel, pack->stream)
                        : NULL;
    return output ? Py_BuildValue("(OOOOd)", output, targets, sources,
                                  covered < pack->output_numel ? Py_True : Py_False, pack->divisor)
                  : NULL;
}

static enum status run_pack(const struct pack *pack) {
    enum status status = pack_check(pack);
    if (status != STATUS_OK)
        return status;
    PyGILState_STATE lock = PyGILState_Ensure();
    return call_function(lock, pack->add ? "pack_add" : "pack", pack_arguments(pack));
}

static enum status pack(void *output, enum dtype output_dtype, int64_t output_numel,
                        const struct pack_source *sources, int64_t num_sources, double divisor,
                        const struct kernel_stream *stream) {
    return run_pack(
        &(struct pack){output, output_dtype, output_numel, sources, num_sources, divisor, false, stream});
}

static enum status pack_add(void *output, enum dtype output_dtype, const struct pack_source *sources,
                            int64_t num_sources, const struct kernel_stream *stream) {
    int64_t output_numel = num_sources > 0 ? source_end(&sources[num_sources - 1]) : 0;
    return run_pack(
        &(struct pack){output, output_dtype, output_numel, sources, num_sources, 1.0, true, stream});
}

/* ---- contiguous elements ---- */

static enum status run_flat(const char *name, void *output, enum dtype output_dtype, const void *input,
                            enum dtype input_dtype, int64_t numel, double divisor,
                            const struct kernel_stream *stream) {
    enum status status = elementwise_check(output, output_dtype, input, input_dtype, numel);
    if (status != STATUS_OK)
        return status;
    PyGILState_STATE lock = PyGILState_Ensure();
    PyObject *to = flat_tensor(output, output_dtype, numel, stream);
    PyObject *from = to ? flat_tensor(input, input_dtype, numel, stream) : NULL;
    PyObject *arguments = from ? Py_BuildValue("(OOd)", to, from, divisor) : NULL;
    Py_XDECREF(to);
    Py_XDECREF(from);
    return call_function(lock, name, arguments);
}

static enum status cast_divide(void *output, enum dtype output_dtype, const void *input,
                               enum dtype input_dtype, int64_t numel, double divisor,
                               const struct kernel_stream *stream) {
    return run_flat("cast_divide", output, output_dtype, input, input_dtype, numel, divisor, stream);
}

static enum status accumulate(void *accumulator, enum dtype accumulator_dtype, const void *input,
                              enum dtype input_dtype, int64_t numel, double divisor,
                              const struct kernel_stream *stream) {
    return run_flat("accumulate", accumulator, accumulator_dtype, input, input_dtype, numel, divisor, stream);
}

static const char *device_error(void) {
    return error_text;
}

const struct kernel_table operator_kernels = {
    .version = KERNEL_TABLE_VERSION,
    .pack = pack,
    .pack_add = pack_add,
    .cast_divide = cast_divide,
    .accumulate = accumulate,
    .device_error = device_error,
};
