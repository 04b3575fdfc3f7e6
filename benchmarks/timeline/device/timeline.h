/* Simulated time of the device: a model computed along with the run, without any real clock.
 *
 *   host      launch a  launch b    launch c                 event.synchronize()
 *               |         |  '--------.  '------.                   |.......
 *   stream 1    [ a           ] -- record        |                          :
 *   stream 2                           '- wait [ c ............................]
 *
 * Invariant: the host has a time, each stream the end of its work, each event the time of its completion, all
 * in microseconds since the start. A launch begins at the latest of the host's time, the end of the stream's
 * previous work, and the completion of the events that the stream waits for. Its duration follows from bytes,
 * floating-point operations and the machine. A waiting host advances to the awaited time. Concurrent kernels
 * do not slow each other down here, but the collectives of one group run one after the other, like NCCL's.
 * Each span records its causes and its use of the device: benchmarks/timeline/contention.py replays the step with
 * contention.
 *
 * SIMULATED_GPU_TIMELINE=1 enables the model. SIMULATED_GPU_SHAPES=1 does too, and nothing is computed:
 * operators run on shapes only, the device's memory is untouched address space, and one process represents all
 * ranks. A model of any size on any number of ranks then takes seconds, without a GPU. */
#pragma once

#include "streams.h"

namespace simulated_gpu {

enum span_kind { COMPUTE, COPY, GATHER, SCATTER, OTHER_COLLECTIVE, HOST_WAITS };

/* Costs of a machine: us, or bytes and floating-point operations per us. The device's defaults are those of
 * an H100 SXM. */
struct machine_costs {
    /* bytes per us of the device's memory: 85 % of its peak */
    double memory = 3.35e6 * 0.85;
    /* matrix products: 60 % of the tensor cores' peak, in 16 bits and in TF32 */
    double flops_16 = 989e6 * 0.6, flops_32 = 495e6 * 0.6;
    double product = 6.75;    /* us of any product, added to its operations */
    double attention = 280e6; /* floating-point operations of flash attention */
    double least = 2;         /* us of the shortest kernel */
    double pcie = 50e3;       /* bytes per us between host and device */
    double op = 5, view = 1.5, launch = 2.5, collective = 8, event = 1.5,
           segment = 150; /* us of the host for one of each */
    double unit =
        /* us of the host for an FSDP's own work per unit and step: a third at each all-gather and
         * reduction */
        0;
    double gpus_per_node = 8;
};

/* Use of the device by a span that runs alone, as fractions. */
struct device_use {
    double memory = 0;          /* of the memory bandwidth */
    double multiprocessors = 0; /* of all multiprocessors */
};

/* A kernel, copy or collective, or a wait of the host. */
struct span {
    double begin, end;
    double asked;  /* host time of the launch */
    double ready;  /* time at which the stream's waits are over */
    double before; /* end of the stream's previous work */
    int64_t serial;
    /* serial of the awaited span, if it ended after the stream's previous work; -1 otherwise */
    int64_t cause;
    int64_t stream; /* torch's id; -1: the host */
    enum span_kind kind;
    std::string name;
    work_before after; /* spans of other streams that must end before */
    device_use use;
};

DEVICE_API bool is_timed();
DEVICE_API bool has_only_shapes();

/* ---- costs ---- */
DEVICE_API machine_costs &costs();
DEVICE_API double *cost_of_name(const std::string &name); /* nullptr if there is none */
DEVICE_API double us_of_bytes(double nbytes);             /* of the device's memory */
DEVICE_API device_use use_of(double us, double nbytes, double us_of_flops = 0);
/* A wire is a table of the us of an all-gather by its bytes in all, linear between the given sizes. A group
 * uses the table for its number of ranks, or else the table for 0. Collectives use the given fraction of the
 * multiprocessors. */
enum wire { WITHIN_NODE, BETWEEN_NODES, NUM_WIRES };
DEVICE_API void set_wire(enum wire which, std::vector<std::pair<double, double>> us_by_nbytes, int64_t ranks,
                         double multiprocessors);
DEVICE_API double us_on_wire(enum wire which, int64_t ranks, double nbytes);
DEVICE_API double multiprocessors_of(enum wire which);

/* ---- the run ---- */
DEVICE_API double host_time();
DEVICE_API void host_spends(double us);
DEVICE_API void device_spends(stream *on, const char *name, enum span_kind kind, double us, device_use use);
/* changes times only: no order on which a program may rely */
DEVICE_API void begins_after(stream *on, const event *until);
DEVICE_API std::vector<span> take_spans();

/* While an object lives, the host's operations cost nothing: its creator charges their total. */
class DEVICE_API unpaid {
  public:
    unpaid();
    ~unpaid();
    unpaid(const unpaid &) = delete;
    unpaid &operator=(const unpaid &) = delete;
};

/* Inside the code of an FSDP an operator costs the host a launch only: `unit` covers the other work. */
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
