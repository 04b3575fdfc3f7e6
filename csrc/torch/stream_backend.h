/* Who keeps streams and events: the CUDA driver or, for any other device, torch's module of it. stream.c says
 * what is done with them. */
#ifndef FSDP_TORCH_STREAM_BACKEND_H
#define FSDP_TORCH_STREAM_BACKEND_H

#include "torch/ref.h"
#include "torch/stream.h"

/* Each returns 0, or -1 with an exception, where nothing else is said. */
struct stream_backend {
    const char *id_attribute;             /* the attribute of torch's streams that it knows them by */
    int (*init)(struct streams *streams); /* once its side streams are there; or NULL */
    int (*record)(const struct streams *streams, const struct stream_handle *stream, stream_event *event);
    int (*wait)(const struct streams *streams, const struct stream_handle *stream, stream_event event);
    int (*synchronize)(const struct streams *streams, stream_event event);
    void (*destroy)(stream_event event);
    bool (*is_current)(const struct streams *streams, const struct stream_handle *stream); /* never raises */
    /* Whether a CUDA graph is made of what is enqueued there. Never raises; NULL: none ever is. */
    bool (*is_capturing)(const struct streams *streams, const struct stream_handle *stream);
    /* another device is the thread's current one: 1; or 0 or -1 */
    int (*is_other_device_current)(const struct streams *streams);
};

extern const struct stream_backend driver_backend;
extern const struct stream_backend module_backend;

bool driver_is_available(void); /* libcuda has been found. Never raises */

/* A number that torch's `stream` has as an attribute. 0, or -1 with an exception. */
static inline int stream_number(PyObject *stream, const char *attribute, void **number) {
    OWNED *value = PyObject_GetAttrString(stream, attribute);
    if (value)
        *number = PyLong_AsVoidPtr(value);
    return PyErr_Occurred() ? -1 : 0;
}

#endif
