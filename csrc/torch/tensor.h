/* Views of the memory of Python tensors, by torch's DLPack exchange table.
 *
 * Invariant: a view does not own its tensor. The view is valid while the tensor lives and its storage is not
 * resized. */
#ifndef FSDP_TORCH_TENSOR_H
#define FSDP_TORCH_TENSOR_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include "kernels/kernels.h"

/* Find the exchange table of torch.Tensor, once; torch has it since 2.10. 0, or -1 with ImportError. */
int tensor_init(void);

/* View a dense tensor. 0, or -1 with an exception that names the type, or layout and device. */
int tensor_view_of(PyObject *tensor, struct tensor_view *view);

/* Return a new tensor over the memory of `view`, which must outlive the tensor. NULL with an exception. */
PyObject *tensor_from_view(const struct tensor_view *view);

int64_t tensor_view_numel(const struct tensor_view *view);
bool tensor_view_is_contiguous(const struct tensor_view *view);

enum device_kind tensor_device_of(int32_t torch_type);  /* Return the device of torch's type number. */
enum device_kind tensor_device_named(const char *type); /* Return the device of torch.device.type. */

/* Call pages_prefer_large() for a view in CPU memory whose element size is known. */
void tensor_prefer_large_pages(const struct tensor_view *view);

/* Return the stream for kernels on the view's device: torch's CPU threads, or the device's current stream. */
const struct kernel_stream *tensor_kernel_stream(const struct tensor_view *view);

/* Turn a kernel's status into a Python exception: 0 for STATUS_OK, else -1. `operation` begins the
 * message. */
int tensor_check(enum status status, const char *operation);

#endif
