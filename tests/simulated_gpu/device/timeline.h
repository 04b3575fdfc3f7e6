/* Time on the simulated device: a model that is computed beside the run. No clock is read.
 *
 *   host      launch a  launch b    launch c                 event.synchronize()
 *               |         |  '--------.  '------.                   |.......
 *   stream 1    [ a           ] -- record        |                          :
 *   stream 2                           '- wait [ c ............................]
 *
 * Invariant: the host has a time, each stream the time from which it is free, each event the time at which it
 * is over, all in microseconds since the start. What is launched begins at the latest of the host's time, the
 * end of what its stream did before, and what that was told to wait for; it takes what the bytes, the
 * floating-point operations and the machine say. A host that waits moves on to the time for which it waited.
 * Kernels beside each other do not slow each other down here, but the collectives of one group follow each
 * other, as NCCL's do. What each piece of work waited for, and what it needs of the device, is kept with it:
 * benchmarks/contention.py runs the step again, with what is shared.
 *
 * SIMULATED_GPU_TIMELINE=1 switches it on. SIMULATED_GPU_SHAPES=1 does too, and nothing is computed:
 * operators run on shapes alone, the device's memory is address space that nobody touches, and one process
 * stands for all ranks. So a model of any size on any number of ranks takes seconds, without a GPU. */
#pragma once

#include "streams.h"

namespace simulated_gpu {

enum span_kind { COMPUTE, COPY, GATHER, SCATTER, OTHER_COLLECTIVE, HOST_WAITS };

/* What a machine takes: us, or bytes and floating-point operations per us. The device's are those of an H100
 * SXM. */
struct machine_costs {
    /* bytes of the device's memory: 85 % of its peak */
    double memory = 3.35e6 * 0.85;
    /* of products of matrices: 60 % of the tensor cores' peak, in 16 bits and in TF32 */
    double flops_16 = 989e6 * 0.6, flops_32 = 495e6 * 0.6;
    double product = 6.75;    /* us of any product beside its operations */
    double attention = 280e6; /* floating-point operations of flash attention */
    double least = 2;         /* of any kernel */
    double pcie = 50e3;       /* bytes between host and device */
    double op = 5, view = 1.5, launch = 2.5, collective = 8, event = 1.5,
           segment = 150; /* of the host, for one of each */
    double unit =
        /* of the host, for an FSDP's own work on one unit in one step: a third at each gather and
         * reduction */
        0;
    double gpus_per_node = 8;
};

/* The part of the device that a piece of work takes while it runs alone. */
struct device_use {
    double memory = 0;          /* of the memory's bandwidth */
    double multiprocessors = 0; /* of those that compute */
};

/* One piece of work, or one wait of the host. */
struct span {
    double begin, end;
    double asked;  /* the host's time at the launch */
    double ready;  /* of its stream, with what that waited for */
    double before; /* the end of what the stream did before */
    int64_t serial;
    /* what the stream waited for, if that was later than all that the stream did itself; -1 */
    int64_t cause;
    int64_t stream; /* torch's id; -1: the host */
    enum span_kind kind;
    std::string name;
    work_before after; /* what was to be over before, but for what its stream did itself */
    device_use use;
};

DEVICE_API bool is_timed();
DEVICE_API bool has_only_shapes();

/* ---- what things cost ---- */
DEVICE_API machine_costs &costs();
DEVICE_API double *cost_of_name(const std::string &name); /* nullptr: there is none */
DEVICE_API double us_of_bytes(double nbytes);             /* of the device's memory */
DEVICE_API device_use use_of(double us, double nbytes, double us_of_flops = 0);
/* A wire, by the us that a gather takes of so many bytes in all: straight between the sizes that are given.
 * A group of as many ranks as a table was given for has that, others have the one for 0. Collectives take
 * their part of the multiprocessors. */
enum wire { WITHIN_NODE, BETWEEN_NODES, NUM_WIRES };
DEVICE_API void set_wire(enum wire which, std::vector<std::pair<double, double>> us_by_nbytes, int64_t ranks,
                         double multiprocessors);
DEVICE_API double us_on_wire(enum wire which, int64_t ranks, double nbytes);
DEVICE_API double multiprocessors_of(enum wire which);

/* ---- the run ---- */
DEVICE_API double host_time();
DEVICE_API void host_spends(double us);
DEVICE_API void device_spends(stream *on, const char *name, enum span_kind kind, double us, device_use use);
/* in time alone: no order that a program may rely on */
DEVICE_API void begins_after(stream *on, const event *until);
DEVICE_API std::vector<span> take_spans();

/* While it lives, what the host does is paid for as a whole by somebody else. */
class DEVICE_API unpaid {
  public:
    unpaid();
    ~unpaid();
    unpaid(const unpaid &) = delete;
    unpaid &operator=(const unpaid &) = delete;
};

/* Inside the code of an FSDP, whose own work `unit` pays for, an operator costs the host a launch alone. */
DEVICE_API void enter_fsdp();
DEVICE_API void leave_fsdp();
DEVICE_API bool in_fsdp();

/* For streams.cpp, memory.cpp and nccl.cpp; nothing unless it is timed. */
DEVICE_API void time_record(event *which, stream *on);
void time_wait(stream *which, const event *until);
event_time end_in_time(const stream *which);
void time_host_wait(const event_time &until, const char *what);
bool is_over_in_time(const event *which);
bool is_over_in_time(const stream *which);

} // namespace simulated_gpu
