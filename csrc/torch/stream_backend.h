/* The interface between stream.c and the owner of streams and events: the CUDA driver or, for other devices,
 * torch's module of the device. */
#ifndef FSDP_TORCH_STREAM_BACKEND_H
#define FSDP_TORCH_STREAM_BACKEND_H

#include "torch/ref.h"
#include "torch/stream.h"

struct stream_mark {
    void *event;                    /* owned; the backend's event, NULL until recorded */
    enum stream_role role;          /* role whose stream the point is on */
    int64_t clock[STREAM_ROLES];    /* the stream's clock at this point */
    int num_references;             /* number of stream_events and kept waits of the point */
    struct stream_mark *next_spare; /* next mark of the list of spare ones */
};

/* Unless stated otherwise, functions return 0, or -1 with an exception. */
struct stream_backend {
    const char *id_attribute;             /* attribute of torch's streams with the backend's id */
    int (*init)(struct streams *streams); /* called once the side streams exist; may be NULL */
    int (*record)(const struct streams *streams, const struct stream_handle *stream, void **event);
    int (*wait)(const struct streams *streams, const struct stream_handle *stream, void *event);
    int (*synchronize)(const struct streams *streams, void *event);
    void (*destroy)(void *event);
    bool (*is_current)(const struct streams *streams, const struct stream_handle *stream); /* never raises */
    /* true while a CUDA graph captures the stream; never raises; NULL without support for graphs */
    bool (*is_capturing)(const struct streams *streams, const struct stream_handle *stream);
    /* 1 if a different device is current in this thread, else 0; or -1 */
    int (*is_other_device_current)(const struct streams *streams);
};

extern const struct stream_backend driver_backend;
extern const struct stream_backend module_backend;

bool driver_is_available(void); /* Return true if libcuda and its functions are found. Never raises. */

/* Read an integer attribute of torch's `stream` into *number. 0, or -1 with an exception. */
static inline int stream_number(PyObject *stream, const char *attribute, void **number) {
    OWNED *value = PyObject_GetAttrString(stream, attribute);
    if (value)
        *number = PyLong_AsVoidPtr(value);
    return PyErr_Occurred() ? -1 : 0;
}

#endif
