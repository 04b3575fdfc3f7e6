#include "handle/transition.h"

int transition_refuse(int64_t rank, PyObject *unit, const char *from, const char *to, const char *remedy) {
    PyErr_Format(PyExc_RuntimeError, "rank %lld, unit %S: illegal transition from %s to %s%s", (long long)rank, unit,
                 from, to, remedy);
    return -1;
}
