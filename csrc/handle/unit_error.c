#include "handle/unit_error.h"
#include "torch/ref.h"

#include <stdarg.h>

int unit_error(PyObject *type, int64_t rank, PyObject *unit, const char *format, ...) {
    va_list arguments;
    va_start(arguments, format);
    OWNED *text = PyUnicode_FromFormatV(format, arguments);
    va_end(arguments);
    if (text)
        PyErr_Format(type, "rank %lld, unit %S: %U", (long long)rank, unit, text);
    return -1;
}
