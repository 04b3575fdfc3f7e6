/* Lookup of libtorch's symbols at import. torch loads its libraries RTLD_LOCAL, so they are opened by
 * name. */
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include "torch/torch_abi.h"

#include <dlfcn.h>
#include <stdio.h>
#include <string.h>

#include "torch/ref.h"

struct torch_abi torch_abi;

enum { OLDEST_MAJOR = 2, OLDEST_MINOR = 10 };

/* dlsym() returns an object pointer, whose bytes POSIX allows to be read as a function pointer. */
bool torch_abi_find(void *library, const char *name, void *field) {
    void *symbol = library ? dlsym(library, name) : NULL;
    if (symbol)
        memcpy(field, &symbol, sizeof symbol);
    return symbol != NULL;
}

/* New reference to torch.__version__, or NULL with an ImportError. */
static PyObject *torch_version(void) {
    OWNED *name = PyUnicode_FromString("torch");
    OWNED *torch = name ? PyImport_GetModule(name) : NULL;
    OWNED *version = torch ? PyObject_GetAttrString(torch, "__version__") : NULL;
    PyObject *text = version ? PyObject_Str(version) : NULL;
    if (!text && !PyErr_Occurred())
        PyErr_SetString(PyExc_ImportError,
                        "fsdp_c needs torch to be imported first: import torch, then fsdp_c");
    return text;
}

static int check_version(void) {
    OWNED *version = torch_version();
    OWNED *ascii = version ? PyUnicode_AsASCIIString(version) : NULL;
    const char *text = ascii ? PyBytes_AsString(ascii) : NULL;
    int major = 0, minor = 0;
    if (!text)
        return -1;
    if (sscanf(text, "%d.%d", &major, &minor) == 2 &&
        (major > OLDEST_MAJOR || (major == OLDEST_MAJOR && minor >= OLDEST_MINOR)))
        return 0;
    return RAISED(PyExc_ImportError, "fsdp_c needs torch >= %d.%d, but torch %s is installed", OLDEST_MAJOR,
                  OLDEST_MINOR, text);
}

/* Find all symbols. 0, or -1 with an ImportError that names the first missing one. */
static int find_all(struct torch_abi *abi, void *library, void *cuda_library) {
    const char *missing = NULL;
#define FIND_REQUIRED(result, name, arguments)                                                               \
    if (!torch_abi_find(library, #name, &abi->name) && !missing) {                                           \
        missing = #name;                                                                                     \
    }
#define FIND_OPTIONAL(result, name, arguments)                                                               \
    if (!torch_abi_find(library, #name, &abi->name)) {                                                       \
        torch_abi_find(cuda_library, #name, &abi->name);                                                     \
    }
    TORCH_ABI_REQUIRED(FIND_REQUIRED)
    TORCH_ABI_OPTIONAL(FIND_OPTIONAL)
    if (missing)
        return RAISED(PyExc_ImportError,
                      "fsdp_c cannot be used with this torch: its library lacks the symbol %s", missing);
    return 0;
}

/* Return the CUDA version of the runtime that torch's library is linked with; dlsym() searches it as well. */
static int find_cuda_major(void *cuda_library) {
    int (*get_version)(int *version) = NULL;
    int version = 0;
    bool is_known =
        torch_abi_find(cuda_library, "cudaRuntimeGetVersion", &get_version) && get_version(&version) == 0;
    return is_known ? version / 1000 : 0;
}

int torch_abi_init(void) {
    static bool initialised = false;
    struct torch_abi abi = {0};
    if (initialised)
        return 0;
    if (check_version() != 0)
        return -1;
    void *library = dlopen("libtorch_cpu.so", RTLD_NOW | RTLD_NOLOAD);
    void *cuda_library = dlopen("libtorch_cuda.so", RTLD_NOW | RTLD_NOLOAD);
    if (!library)
        return RAISED(PyExc_ImportError,
                      "fsdp_c cannot find a loaded libtorch_cpu.so: install an official build of torch");
    if (find_all(&abi, library, cuda_library) != 0)
        return -1;
    abi.cuda_major = find_cuda_major(cuda_library);
    torch_abi = abi;
    initialised = true;
    return 0;
}
