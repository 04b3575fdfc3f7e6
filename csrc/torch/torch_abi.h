/* The part of libtorch's stable C ABI that this project uses. The prototypes are written by hand, because
 * torch's headers are C++; tests/native/abi_check.cpp compares them with those headers.
 *
 * Invariant: after torch_abi_init every required function is set. An optional one is NULL when torch is older
 * or has no CUDA, and is checked before use. Functions that return AOTITorchError return 0 on success and
 * never throw. */
#ifndef FSDP_TORCH_TORCH_ABI_H
#define FSDP_TORCH_TORCH_ABI_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

typedef int32_t AOTITorchError;
typedef uint64_t StableIValue;

typedef struct AtenTensorOpaque *AtenTensorHandle;
typedef struct StableListOpaque *StableListHandle;
typedef struct TorchLibraryOpaque *TorchLibraryHandle;

typedef void (*ParallelFunc)(int64_t begin, int64_t end, void *context);
typedef void (*boxed_kernel)(StableIValue *stack, uint64_t num_inputs, uint64_t num_outputs);

/* The version of the ABI that these prototypes are from, 2.10, in torch's encoding. */
#define TORCH_BUILD_VERSION (((uint64_t)2 << 56) | ((uint64_t)10 << 48))

/* clang-format off */
#define TORCH_ABI_REQUIRED(X)                                                                                              \
    X(int32_t, aoti_torch_device_type_meta, (void))                                                                        \
    X(int32_t, aoti_torch_dtype_float32, (void))                                                                           \
    X(int32_t, aoti_torch_dtype_float64, (void))                                                                           \
    X(int32_t, aoti_torch_dtype_bfloat16, (void))                                                                          \
    X(int32_t, aoti_torch_dtype_float16, (void))                                                                           \
    X(size_t, aoti_torch_dtype_element_size, (int32_t dtype))                                                              \
    X(bool, aoti_torch_grad_mode_is_enabled, (void))                                                                       \
    X(void, aoti_torch_grad_mode_set_enabled, (bool enabled))                                                              \
    X(void, aoti_torch_check, (bool condition, const char *function, const char *file, uint32_t line, const char *message)) \
    X(AOTITorchError, aoti_torch_delete_tensor_object, (AtenTensorHandle tensor))                                          \
    X(AOTITorchError, aoti_torch_get_data_ptr, (AtenTensorHandle tensor, void **data))                                     \
    X(AOTITorchError, aoti_torch_get_storage_offset, (AtenTensorHandle tensor, int64_t *offset))                           \
    X(AOTITorchError, aoti_torch_get_dim, (AtenTensorHandle tensor, int64_t *ndim))                                        \
    X(AOTITorchError, aoti_torch_get_numel, (AtenTensorHandle tensor, int64_t *numel))                                     \
    X(AOTITorchError, aoti_torch_get_sizes, (AtenTensorHandle tensor, int64_t **sizes))                                    \
    X(AOTITorchError, aoti_torch_get_strides, (AtenTensorHandle tensor, int64_t **strides))                                \
    X(AOTITorchError, aoti_torch_get_dtype, (AtenTensorHandle tensor, int32_t *dtype))                                     \
    X(AOTITorchError, aoti_torch_get_device_type, (AtenTensorHandle tensor, int32_t *device_type))                         \
    X(AOTITorchError, aoti_torch_get_device_index, (AtenTensorHandle tensor, int32_t *device_index))                       \
    X(AOTITorchError, aoti_torch_is_contiguous, (AtenTensorHandle tensor, bool *is_contiguous))                            \
    X(AOTITorchError, aoti_torch__reinterpret_tensor,                                                                      \
      (AtenTensorHandle tensor, int64_t ndim, const int64_t *sizes, const int64_t *strides, int64_t storage_offset,        \
       AtenTensorHandle *new_tensor))                                                                                      \
    X(AOTITorchError, aoti_torch_library_init_fragment,                                                                    \
      (const char *name, const char *file, uint32_t line, TorchLibraryHandle *library))                                    \
    X(AOTITorchError, aoti_torch_library_init_impl,                                                                        \
      (const char *name, const char *key, const char *file, uint32_t line, TorchLibraryHandle *library))                   \
    X(AOTITorchError, aoti_torch_library_def, (TorchLibraryHandle library, const char *schema))                            \
    X(AOTITorchError, torch_library_impl,                                                                                  \
      (TorchLibraryHandle library, const char *name, boxed_kernel kernel, uint64_t build_version))                         \
    X(AOTITorchError, torch_new_list_reserve_size, (size_t size, StableListHandle *list))                                  \
    X(AOTITorchError, torch_list_size, (StableListHandle list, size_t *size))                                              \
    X(AOTITorchError, torch_list_get_item, (StableListHandle list, size_t index, StableIValue *item))                      \
    X(AOTITorchError, torch_list_push_back, (StableListHandle list, StableIValue item))                                    \
    X(AOTITorchError, torch_delete_list, (StableListHandle list))                                                          \
    X(AOTITorchError, torch_parallel_for,                                                                                  \
      (int64_t begin, int64_t end, int64_t grain, ParallelFunc body, void *context))

#define TORCH_ABI_OPTIONAL(X)                                                                                              \
    X(const char *, torch_exception_get_what_without_backtrace, (void))                                                    \
    X(AOTITorchError, aoti_torch_get_current_cuda_stream, (int32_t device_index, void **stream))
/* clang-format on */

#define TORCH_ABI_FIELD(result, name, arguments) result(*name) arguments;
struct torch_abi {
    TORCH_ABI_REQUIRED(TORCH_ABI_FIELD)
    TORCH_ABI_OPTIONAL(TORCH_ABI_FIELD)
    int cuda_major; /* 13 for CUDA 13.0; 0 when torch has no CUDA, or its runtime library is not found */
};
#undef TORCH_ABI_FIELD

extern struct torch_abi torch_abi;

/* Fill `torch_abi` from the libtorch that Python has loaded. 0, or -1 with an ImportError. Idempotent. */
int torch_abi_init(void);
/* Store the address of a symbol in the function pointer at `field`. Return false if `library` is NULL or lacks
 * it. */
bool torch_abi_find(void *library, const char *name, void *field);

#endif
