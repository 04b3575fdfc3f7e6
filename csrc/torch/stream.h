/* Streams and events behind one interface: real on a GPU, nothing on the CPU.
 *
 * A root has one stream per role. Work is enqueued between stream_enter and stream_leave; an event marks a
 * point of a stream, and another stream waits for it. */
#ifndef FSDP_TORCH_STREAM_H
#define FSDP_TORCH_STREAM_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stdbool.h>
#include <stdint.h>

enum stream_role {
    /* the stream that is current outside of stream_enter and stream_leave: of the script, or of a hook */
    STREAM_COMPUTE,
    STREAM_PRE_UNSHARD, /* what a gather reads: the shard brought to the device, or cast */
    STREAM_UNSHARD,
    STREAM_POST_BACKWARD,
    STREAM_ALL_REDUCE, /* the second half of a hybrid reduction */
    STREAM_ROLES,
};

typedef void *stream_event; /* NULL: nothing to wait for */

enum { MAX_FORMER = 4 };

struct stream_handle {
    PyObject *object; /* owned; torch's, NULL on the CPU */
    void *raw;        /* what the backend knows it by */
};

struct streams {
    const struct stream_backend *backend; /* NULL on the CPU */
    struct stream_handle roles[STREAM_ROLES];
    PyObject *module;     /* owned; torch.cuda, or that of the device's type */
    PyObject *set_stream; /* owned; of the module */
    PyObject *device;     /* owned; torch.device, NULL on the CPU */
    int32_t device_index;
    bool entered;  /* a side stream is current */
    void *context; /* the driver's, of the device */
    /* owned; index of the current device that stream_enter left for this one, or NULL */
    PyObject *previous_device;
    stream_event compute_event; /* owned; where the compute stream was another one */
    /* What was the compute stream before, the last ones, since the last backward ended. */
    struct stream_handle former[MAX_FORMER];
    int num_former;
    bool is_external; /* the compute stream is none of torch's: the script may destroy it between steps */
    bool is_idle;     /* such a one was given nothing since `compute_event` was recorded there */
    bool former_may_be_gone; /* such a one was the compute stream before, since the last backward ended */
};

/* `device` is a torch.device. 0, or -1 with an exception and `streams` zeroed. */
int streams_init(struct streams *streams, PyObject *device);
void streams_fini(struct streams *streams);

static inline bool streams_are_real(const struct streams *streams) {
    return streams->backend != NULL;
}

/* Each does nothing on the CPU, and with a NULL event. 0 or -1. */

/* The compute stream is the one that is current now, and comes after what the one before it was given. Every
 * other verb begins with it. */
int stream_follow(struct streams *streams);
/* What was the compute stream before waits for what is now: memory that was taken there has been used and
 * given back here. */
int stream_join_former(struct streams *streams);
/* What was the compute stream before is forgotten; the host waits in the place of one that the script may
 * have destroyed. */
int stream_end_backward(struct streams *streams);
/* The root's forward, or a backward, is over: an external compute stream is asked nothing from now on.
 * Nothing where an exception is set; never sets one. */
void stream_record_external_end(struct streams *streams);
/* Work is enqueued there from now on; from there, another role's stream may be entered. */
int stream_enter(struct streams *streams, enum stream_role role);
/* The compute stream is current until stream_leave, or torch's default stream where the script may destroy
 * that one: autograd's nodes remember which it was when they were made. */
int stream_enter_persistent(struct streams *streams);
int stream_leave(struct streams *streams); /* back to the compute stream; an exception that is set stays */
/* reuses *event when not NULL */
int stream_record(struct streams *streams, enum stream_role role, stream_event *event);
int stream_wait(struct streams *streams, enum stream_role role, stream_event event);
int stream_synchronize(struct streams *streams, stream_event event); /* the host waits */
void stream_event_destroy(struct streams *streams, stream_event *event);

#endif
