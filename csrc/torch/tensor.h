/* Tensors as the C layers see them: Python objects whose memory is viewed through torch's DLPack exchange
 * table. Nothing here keeps a tensor alive: a view is borrowed while its tensor lives and its storage is not
 * resized. */
#ifndef FSDP_TORCH_TENSOR_H
#define FSDP_TORCH_TENSOR_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include "kernels/kernels.h"

/* Find the exchange table of torch.Tensor, which torch has from 2.10 on, once. 0, or -1 with ImportError. */
int tensor_init(void);

/* View `tensor` (a dense torch.Tensor or Parameter). 0, or -1 with an exception naming what it is instead. */
int tensor_view_of(PyObject *tensor, struct tensor_view *view);

/* The reverse: a new tensor over the memory of `view`, which must outlive it. NULL with an exception. */
PyObject *tensor_from_view(const struct tensor_view *view);

int64_t tensor_view_numel(const struct tensor_view *view);
bool tensor_view_is_contiguous(const struct tensor_view *view);

/* The device of torch's number for its type, as in a tensor_view. */
enum device_kind tensor_device_of(int32_t torch_type);
enum device_kind tensor_device_named(const char *type); /* as torch.device has it */

/* See pages_prefer_large; nothing to do off the CPU, nor for a dtype that kernels do not know. */
void tensor_prefer_large_pages(const struct tensor_view *view);

/* The stream on which kernels for this device run now: CPU threads by torch_parallel_for, or the device's
 * current stream. */
const struct kernel_stream *tensor_kernel_stream(const struct tensor_view *view);

/* Turn a kernel's status into a Python exception: 0 for STATUS_OK, else -1. `what` names the operation. */
int tensor_check(enum status status, const char *what);

#endif
