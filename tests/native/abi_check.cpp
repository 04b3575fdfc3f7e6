// Compares every prototype of csrc/torch/torch_abi.h with torch's headers. The file is only compiled: a
// different prototype fails a static_assert that names the function.
#define USE_CUDA
#include <type_traits>

#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/c/shim.h>

#include "torch/torch_abi.h"

extern "C" const char *torch_exception_get_what_without_backtrace(); // declared by torch 2.13 and later

#define CHECK(result, name, arguments)                                                                       \
    static_assert(std::is_same_v<decltype(torch_abi::name), decltype(&::name)>,                              \
                  "torch_abi.h disagrees with torch about " #name);
TORCH_ABI_REQUIRED(CHECK)
TORCH_ABI_OPTIONAL(CHECK)

static_assert(std::is_same_v<StableIValue, uint64_t>);
static_assert(TORCH_BUILD_VERSION == TORCH_VERSION_2_10_0, "the version of the ABI is encoded differently");
