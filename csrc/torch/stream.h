/* Streams and events of a device, without effect on the CPU.
 *
 * A root has one stream per role. Work is enqueued between stream_enter and stream_leave. An event marks a
 * point of one stream, and another stream waits for it.
 *
 * Invariant: the compute stream is the one that was current at the last stream_follow, and its work comes
 * after the work of every former compute stream. */
#ifndef FSDP_TORCH_STREAM_H
#define FSDP_TORCH_STREAM_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stdbool.h>
#include <stdint.h>

enum stream_role {
    STREAM_COMPUTE,       /* current stream of the script or hook, outside of stream_enter and stream_leave */
    STREAM_PRE_UNSHARD,   /* copy of the shard to the device, or its cast, before the all-gather */
    STREAM_UNSHARD,       /* all-gathers */
    STREAM_POST_BACKWARD, /* reduce-scatters */
    STREAM_ALL_REDUCE,    /* all-reduces of hybrid sharding */
    STREAM_ROLES,
};

/* A recorded point of a stream; NULL for a point that needs no wait. */
typedef struct stream_mark *stream_event;

enum { MAX_FORMER = 4 };

struct stream_handle {
    PyObject *object; /* owned; torch's stream, NULL on the CPU */
    void *raw;        /* the backend's id: cudaStream_t or stream_id */
};

struct streams {
    const struct stream_backend *backend; /* NULL on the CPU */
    struct stream_handle roles[STREAM_ROLES];
    PyObject *module;     /* owned; torch.cuda, or torch's module of the device type */
    PyObject *set_stream; /* owned; function of the module */
    PyObject *device;     /* owned; torch.device, NULL on the CPU */
    int32_t device_index;
    /* clocks[role][other]: last point of `other` that the work of `role` comes after, see [Note: implied waits] in
     * stream.c. Points of a stream are numbered as they are recorded. */
    int64_t clocks[STREAM_ROLES][STREAM_ROLES];
    /* kept_waits[role][other]: point of `other` that `role` waits for before its next work, or NULL */
    stream_event kept_waits[STREAM_ROLES][STREAM_ROLES];
    struct stream_mark *spare_marks; /* owned; list of marks to record again */
    bool entered;                    /* true between stream_enter and stream_leave */
    enum stream_role entered_role;   /* role whose stream is current while `entered` */
    void *context;                   /* the driver's context of the device */
    PyObject *previous_device;  /* owned; current device before stream_enter if a different one, or NULL */
    stream_event compute_event; /* owned; last recorded event of a compute stream */
    /* latest of the `num_former` former compute streams since the last backward ended */
    struct stream_handle former[MAX_FORMER];
    int num_former;   /* may exceed MAX_FORMER */
    bool is_external; /* true if the compute stream is not torch's: the script may destroy it between steps */
    bool is_idle;     /* true if an external compute stream has had no work since compute_event */
    bool former_may_be_gone; /* true if a former compute stream was external and idle */
};

/* `device` is a torch.device. 0, or -1 with an exception and `streams` zeroed. */
int streams_init(struct streams *streams, PyObject *device);
void streams_fini(struct streams *streams);

static inline bool streams_are_real(const struct streams *streams) {
    return streams->backend != NULL;
}

/* The functions below return 0 or -1, and have no effect on the CPU or with a NULL event. */

/* Make the current stream the compute stream, and let it wait for the former one. All functions that enter,
 * record or wait begin with this. */
int stream_follow(struct streams *streams);
/* Make the former compute streams wait for the present one, which used and freed memory that was allocated on
 * them. */
int stream_join_former(struct streams *streams);
/* Drop the former compute streams. The host waits for the present one if a former stream may have been
 * destroyed and could not join. */
int stream_end_backward(struct streams *streams);
/* Record an event on an external compute stream at the end of a root's forward or of a backward: the script
 * may destroy the stream afterwards. No effect with a set exception; never sets one. */
void stream_record_external_end(struct streams *streams);
/* Make the stream of a role current. Another role may be entered from there. */
int stream_enter(struct streams *streams, enum stream_role role);
/* Make the compute stream current or, in place of an external one, torch's default stream: autograd nodes
 * that are created meanwhile keep their stream, and the script may destroy an external one. */
int stream_enter_persistent(struct streams *streams);
int stream_leave(struct streams *streams); /* Make the compute stream current; keeps a set exception. */
/* Record an event on the stream of a role; *event is reused unless NULL. */
int stream_record(struct streams *streams, enum stream_role role, stream_event *event);
int stream_wait(struct streams *streams, enum stream_role role, stream_event event);
int stream_synchronize(struct streams *streams, stream_event event); /* Make the host wait. */
/* Make *shared the same point as `event`, in place of its former one. A later record of either does not move the
 * other. */
void stream_event_share(struct streams *streams, stream_event event, stream_event *shared);
void stream_event_destroy(struct streams *streams, stream_event *event);

#endif
