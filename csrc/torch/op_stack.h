/* The stack of a boxed op kernel: reading inputs, writing outputs, raising errors.
 *
 * Invariant: an op kernel owns its inputs. Each input is read once into an OP_OWNED variable, which is
 * released when the function returns or an error unwinds it: files that include this header are compiled with
 * -fexceptions. Outputs are written last, from slot 0 on, as new owners. Ops run without the GIL and must not
 * touch a PyObject. */
#ifndef FSDP_TORCH_OP_STACK_H
#define FSDP_TORCH_OP_STACK_H

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "torch/tensor.h"
#include "torch/torch_abi.h"

/* Raise RuntimeError from the op. Legal only inside an op: torch's dispatcher catches the C++ exception
 * there. */
__attribute__((format(printf, 3, 4))) _Noreturn static inline void op_fail(const char *function, int line,
                                                                           const char *format, ...) {
    char message[512];
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(message, sizeof message, format, arguments);
    va_end(arguments);
    torch_abi.aoti_torch_check(false, function, "fsdp_c", (uint32_t)line, message);
    abort(); /* not reached */
}

#define OP_CHECK(condition, ...)                                                                             \
    do {                                                                                                     \
        if (!(condition)) {                                                                                  \
            op_fail(__func__, __LINE__, __VA_ARGS__);                                                        \
        }                                                                                                    \
    } while (0)

/* Raise torch's error message if `call` fails. */
#define OP_CALL(call)                                                                                        \
    do {                                                                                                     \
        if ((call) != 0) {                                                                                   \
            op_fail(__func__, __LINE__, "%s", op_error_text(#call));                                         \
        }                                                                                                    \
    } while (0)

static inline const char *op_error_text(const char *otherwise) {
    const char *text = NULL;
    if (torch_abi.torch_exception_get_what_without_backtrace)
        text = torch_abi.torch_exception_get_what_without_backtrace();
    return text && *text ? text : otherwise;
}

static inline void op_drop_tensor(AtenTensorHandle *tensor) {
    if (*tensor) {
        torch_abi.aoti_torch_delete_tensor_object(*tensor);
        *tensor = NULL;
    }
}
/* An owned local tensor, or NULL, perhaps owned only to be released. */
#define OP_OWNED __attribute__((cleanup(op_drop_tensor), unused)) AtenTensorHandle

static inline AtenTensorHandle op_tensor(StableIValue slot) {
    return (AtenTensorHandle)(uintptr_t)slot;
}

/* Move an owned tensor into a stack slot. */
static inline StableIValue op_move(AtenTensorHandle *tensor) {
    StableIValue slot = (StableIValue)(uintptr_t)*tensor;
    *tensor = NULL;
    return slot;
}

static inline int64_t op_int(StableIValue slot) {
    return (int64_t)slot;
}

/* A list argument. A Tensor[] owns its tensors from the start, read or not. */
struct op_list {
    StableListHandle list; /* owned */
    StableIValue *items;   /* owned array */
    size_t count;
    bool of_tensors;
};

static inline struct op_list op_list_of(StableIValue slot, bool of_tensors) {
    return (struct op_list){.list = (StableListHandle)(uintptr_t)slot, .of_tensors = of_tensors};
}

static inline void op_drop_list(struct op_list *list) {
    size_t size = 0;
    StableIValue item = 0;
    free(list->items);
    if (list->list && list->of_tensors)
        torch_abi.torch_list_size(list->list, &size);
    for (size_t i = 0; i < size; i++) {
        if (torch_abi.torch_list_get_item(list->list, i, &item) == 0) {
            AtenTensorHandle tensor = op_tensor(item);
            op_drop_tensor(&tensor);
        }
    }
    if (list->list)
        torch_abi.torch_delete_list(list->list);
    memset(list, 0, sizeof *list);
}
#define OP_OWNED_LIST __attribute__((cleanup(op_drop_list))) struct op_list

static inline void op_free(void *pointer) {
    free(*(void **)pointer);
}
#define OP_OWNED_MEMORY __attribute__((cleanup(op_free)))

static inline void *op_alloc(size_t count, size_t size) {
    void *memory = calloc(count ? count : 1, size);
    OP_CHECK(memory, "out of memory");
    return memory;
}

/* Read the items of several lists, after the caller owns all of them. */
#define OP_READ_LISTS(...) op_read_lists((struct op_list *const[]){__VA_ARGS__, NULL})
static inline void op_read_lists(struct op_list *const *lists) {
    for (struct op_list *list; (list = *lists); lists++) {
        OP_CALL(torch_abi.torch_list_size(list->list, &list->count));
        list->items = op_alloc(list->count, sizeof *list->items);
        for (size_t i = 0; i < list->count; i++)
            OP_CALL(torch_abi.torch_list_get_item(list->list, i, &list->items[i]));
    }
}

/* Move an owned tensor to the end of a list under construction. */
static inline void op_push(StableListHandle list, AtenTensorHandle *tensor) {
    OP_CALL(torch_abi.torch_list_push_back(list, op_move(tensor)));
}

/* The properties of a tensor that kernels and shape checks use. Sizes and strides are borrowed from the
 * tensor. */
struct op_operand {
    struct tensor_view view;
    int64_t numel;
    int32_t dtype_code; /* torch's number of the dtype */
    int32_t device_index;
    bool is_contiguous;
};

static inline enum dtype op_dtype(int32_t code) {
    if (code == torch_abi.aoti_torch_dtype_float32())
        return DTYPE_FLOAT32;
    if (code == torch_abi.aoti_torch_dtype_bfloat16())
        return DTYPE_BFLOAT16;
    if (code == torch_abi.aoti_torch_dtype_float16())
        return DTYPE_FLOAT16;
    return code == torch_abi.aoti_torch_dtype_float64() ? DTYPE_FLOAT64 : DTYPE_OTHER;
}

static inline bool op_is_meta(AtenTensorHandle tensor) {
    int32_t device_type = 0;
    OP_CALL(torch_abi.aoti_torch_get_device_type(tensor, &device_type));
    return device_type == torch_abi.aoti_torch_device_type_meta();
}

static inline void op_read_operand(struct op_operand *operand, AtenTensorHandle tensor) {
    int64_t ndim = 0, *sizes = NULL, *strides = NULL;
    int32_t device_type = 0;
    memset(operand, 0, sizeof *operand);
    OP_CALL(torch_abi.aoti_torch_get_dim(tensor, &ndim));
    OP_CALL(torch_abi.aoti_torch_get_dtype(tensor, &operand->dtype_code));
    OP_CALL(torch_abi.aoti_torch_get_device_type(tensor, &device_type));
    OP_CALL(torch_abi.aoti_torch_get_device_index(tensor, &operand->device_index));
    OP_CALL(torch_abi.aoti_torch_is_contiguous(tensor, &operand->is_contiguous));
    OP_CALL(torch_abi.aoti_torch_get_sizes(tensor, &sizes));
    OP_CALL(torch_abi.aoti_torch_get_strides(tensor, &strides));
    OP_CALL(torch_abi.aoti_torch_get_numel(tensor, &operand->numel));
    operand->view = (struct tensor_view){
        .dtype = op_dtype(operand->dtype_code),
        .device = tensor_device_of(device_type),
        .device_index = operand->device_index,
        .ndim = (int32_t)ndim,
        .sizes = sizes,
        .strides = strides,
    };
    if (device_type != torch_abi.aoti_torch_device_type_meta())
        OP_CALL(torch_abi.aoti_torch_get_data_ptr(tensor, &operand->view.data));
}

#endif
