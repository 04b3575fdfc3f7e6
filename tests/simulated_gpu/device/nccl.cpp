/* ProcessGroupNCCL of the simulated device, and gloo for its tensors. A torch built for the CPU has neither.
 *
 * gloo moves the bytes at the call. Streams define the order, as in NCCL: with async_op a collective runs on
 * the group's own stream, which waits for the current stream, and wait() makes the then current stream wait
 * without blocking the host. Without async_op it runs on the current stream. A reduction adds the ranks'
 * parts in rank order, in the tensor's dtype. The gloo backend makes the host wait for the inputs of a
 * collective. */
#include "nccl.h"

#include <future>

#include <pybind11/chrono.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>
#include <torch/csrc/distributed/c10d/Work.hpp>
#include <torch/csrc/distributed/c10d/reducer_timer.hpp>
#include <torch/csrc/utils/pybind.h>

#include "graph.h"
#include "tensors.h"
#include "timeline.h"

namespace simulated_gpu {

using at::Tensor;
using c10d::Backend;
using c10d::OpType;
using c10d::ReduceOp;
using Tensors = std::vector<Tensor>;
using WorkPtr = c10::intrusive_ptr<c10d::Work>;

class device_work final : public c10d::Work {
  public:
    device_work(int rank, OpType type, int device_index, Tensors results)
        : Work(rank, type), device(device_index), outputs(std::move(results)) {
        std::vector<c10::Device> devices = {device_of_index(device)};
        future =
            c10::make_intrusive<c10::ivalue::Future>(c10::ListType::create(c10::TensorType::get()), devices);
    }
    bool isCompleted() override {
        return event_query(&done);
    }
    bool isSuccess() const override {
        return true;
    }
    bool wait(std::chrono::milliseconds) override {
        synchronize();
        return true;
    }
    void synchronize() override {
        stream_wait(current_stream(device), &done);
        if (blocks) {
            host_wait(&done);
        }
        kept.clear();
    }
    c10::intrusive_ptr<c10::ivalue::Future> getFuture() override {
        return future;
    }
    Tensors result() override {
        return outputs;
    }

    /* Mark the collective as enqueued on `on`, the current stream for callbacks of the future. */
    void finish(stream *on) {
        event_record(&done, on);
        c10::StreamGuard guard(torch_stream(on));
        future->markCompleted(c10::IValue(outputs));
    }

    int device;
    bool blocks = false; /* true for a barrier: the host waits */
    event done{};
    Tensors outputs;
    Tensors kept; /* tensors of the collective, until wait() */
    c10::intrusive_ptr<c10::ivalue::Future> future;
};

struct nccl_options : Backend::Options {
    explicit nccl_options(bool is_high = false)
        : Options("nccl", std::chrono::minutes(10)), is_high_priority_stream(is_high) {
    }
    bool is_high_priority_stream;
};

class device_backend final : public Backend {
  public:
    device_backend(c10::intrusive_ptr<Backend> inner, c10::intrusive_ptr<nccl_options> given,
                   const char *named)
        : Backend(inner->getRank(), inner->getSize()), gloo(std::move(inner)), options(std::move(given)),
          name(named), through_host(name == "gloo") {
    }
    /* Without gloo: one process stands for all ranks if operators run on shapes only. */
    device_backend(int rank, int size, c10::intrusive_ptr<nccl_options> given)
        : Backend(rank, size), options(std::move(given)), name("nccl"), through_host(false) {
    }

    const std::string getBackendName() const override {
        return name;
    }
    c10::intrusive_ptr<Options> getBackendOptions() override {
        return options;
    }
    bool supportsCoalescing() const override {
        return true;
    }
    void setSequenceNumberForGroup() override {
    }
    uint64_t getSequenceNumberForGroup() override {
        return sequence;
    }

    WorkPtr _allgather_base(Tensor &output, Tensor &input, const c10d::AllgatherOptions &opts) override {
        return collective(OpType::_ALLGATHER_BASE, {input}, {output}, opts.asyncOp,
                          [this](const Tensors &in, const Tensors &out) { gather_into(out[0], in[0]); });
    }
    WorkPtr allgather(std::vector<Tensors> &outputs, Tensors &inputs,
                      const c10d::AllgatherOptions &opts) override {
        return collective(
            OpType::ALLGATHER, inputs, outputs.at(0), opts.asyncOp,
            [this](const Tensors &in, const Tensors &out) { put_all(out, gathered(in.at(0))); });
    }
    WorkPtr allgather_into_tensor_coalesced(Tensors &outputs, Tensors &inputs,
                                            const c10d::AllgatherOptions &opts) override {
        return collective(OpType::COALESCED, inputs, outputs, opts.asyncOp,
                          [this](const Tensors &in, const Tensors &out) {
                              for (size_t i = 0; i < in.size(); i++) {
                                  gather_into(out[i], in[i]);
                              }
                          });
    }
    WorkPtr _reduce_scatter_base(Tensor &output, Tensor &input,
                                 const c10d::ReduceScatterOptions &opts) override {
        return collective(OpType::_REDUCE_SCATTER_BASE, {input}, {output}, opts.asyncOp,
                          [this, op = opts.reduceOp](const Tensors &in, const Tensors &out) {
                              scatter_sum(out[0], in[0], op);
                          });
    }
    WorkPtr reduce_scatter_tensor_coalesced(Tensors &outputs, Tensors &inputs,
                                            const c10d::ReduceScatterOptions &opts) override {
        return collective(OpType::COALESCED, inputs, outputs, opts.asyncOp,
                          [this, op = opts.reduceOp](const Tensors &in, const Tensors &out) {
                              for (size_t i = 0; i < in.size(); i++) {
                                  scatter_sum(out[i], in[i], op);
                              }
                          });
    }
    WorkPtr allreduce(Tensors &tensors, const c10d::AllreduceOptions &opts) override {
        return collective(OpType::ALLREDUCE, {}, tensors, opts.asyncOp,
                          [this, op = opts.reduceOp](const Tensors &, const Tensors &out) {
                              for (const Tensor &each : out) {
                                  put(each, reduced(gathered(each), op));
                              }
                          });
    }
    WorkPtr allreduce_coalesced(Tensors &tensors, const c10d::AllreduceCoalescedOptions &opts) override {
        c10d::AllreduceOptions plain;
        plain.reduceOp = opts.reduceOp;
        plain.asyncOp = opts.asyncOp;
        return allreduce(tensors, plain);
    }
    WorkPtr broadcast(Tensors &tensors, const c10d::BroadcastOptions &opts) override {
        return collective(OpType::BROADCAST, {}, tensors, opts.asyncOp,
                          [this, root = (size_t)opts.rootRank](const Tensors &, const Tensors &out) {
                              put(out.at(0), gathered(out[0]).at(root));
                          });
    }
    WorkPtr gather(std::vector<Tensors> &outputs, Tensors &inputs, const c10d::GatherOptions &opts) override {
        Tensors into = outputs.empty() ? Tensors() : outputs[0];
        return collective(
            OpType::GATHER, inputs, into, opts.asyncOp,
            [this](const Tensors &in, const Tensors &out) { put_all(out, gathered(in.at(0))); });
    }
    WorkPtr scatter(Tensors &outputs, std::vector<Tensors> &inputs,
                    const c10d::ScatterOptions &opts) override {
        return collective(OpType::SCATTER, inputs.empty() ? Tensors() : inputs[0], outputs, opts.asyncOp,
                          [this, root = (int)opts.rootRank](const Tensors &in, const Tensors &out) {
                              scatter_from(root, in, out.at(0));
                          });
    }
    WorkPtr alltoall_base(Tensor &output, Tensor &input, std::vector<int64_t> &to, std::vector<int64_t> &from,
                          const c10d::AllToAllOptions &opts) override {
        return collective(OpType::ALLTOALL_BASE, {input}, {output}, opts.asyncOp,
                          [this, to, from](const Tensors &in, const Tensors &out) mutable {
                              Tensor into = at::empty_like(out[0]), source = in[0].contiguous();
                              gloo->alltoall_base(into, source, to, from)->wait();
                              put(out[0], into);
                          });
    }
    WorkPtr send(Tensors &tensors, int peer, int tag) override {
        return collective(OpType::SEND, tensors, {}, true,
                          [this, peer, tag](const Tensors &in, const Tensors &) {
                              Tensors from = {bytes(in.at(0)).clone()};
                              sent.push_back({gloo->send(from, peer, tag), from});
                          });
    }
    WorkPtr recv(Tensors &tensors, int peer, int tag) override {
        return collective(OpType::RECV, {}, tensors, true,
                          [this, peer, tag](const Tensors &, const Tensors &out) {
                              Tensors into = {at::empty_like(bytes(out.at(0)))};
                              gloo->recv(into, peer, tag)->wait();
                              put(out[0], from_bytes(into[0], out[0]));
                          });
    }
    WorkPtr barrier(const c10d::BarrierOptions &) override {
        auto work = collective(OpType::BARRIER, {}, {}, true,
                               [this](const Tensors &, const Tensors &) { gloo->barrier()->wait(); });
        static_cast<device_work *>(work.get())->blocks = true;
        return work;
    }
    void startCoalescing() override {
    }
    /* Each collective was enqueued at its call, so the end of the last one is the end of all. */
    WorkPtr endCoalescing() override {
        return collective(OpType::COALESCED, {}, {}, true, [](const Tensors &, const Tensors &) {});
    }

  private:
    /* Body of a collective. Inputs and outputs are CPU tensors on the device's memory. */
    using collective_body = std::function<void(const Tensors &inputs, const Tensors &outputs)>;

    enum : size_t { SMALL_COLLECTIVE = 1 << 16 /* bytes */ };

    c10::intrusive_ptr<Backend> gloo;
    c10::intrusive_ptr<nccl_options> options;
    std::string name;
    bool through_host;
    std::vector<std::pair<WorkPtr, Tensors>> sent; /* tensors that gloo may still read */
    uint64_t sequence = 0;
    stream *streams[MOST_DEVICES] = {};
    event wire_is_free{}; /* on the timeline: after the last collective */

    WorkPtr collective(OpType type, const Tensors &inputs, const Tensors &outputs, bool async_op,
                       collective_body body) {
        std::optional<unpaid> as_a_whole(std::in_place);
        check(inputs);
        check(outputs);
        const Tensors &some = outputs.empty() ? inputs : outputs;
        int device = some.empty() ? current_device() : some.back().device().index();
        stream *current = current_stream(device);
        auto work = c10::make_intrusive<device_work>(getRank(), type, device, outputs);
        stream *on = async_op || through_host ? stream_after(current) : current;
        if (on != current) {
            work->kept = inputs;
            work->kept.insert(work->kept.end(), outputs.begin(), outputs.end());
        }
        {
            launch launch(on, c10d::opTypeToString(type).c_str());
            for (const Tensor &each : inputs) {
                touch(launch, each, READ);
            }
            for (const Tensor &each : outputs) {
                touch(launch, each, WRITE);
            }
        }
        if (!has_only_shapes()) {
            run_body(on, std::move(body), inputs, outputs);
        } else {
            pretend(inputs, outputs);
        }
        sequence++;
        as_a_whole.reset();
        spend(type, on, inputs, outputs);
        as_a_whole.emplace();
        work->finish(on);
        return work;
    }

    void run_body(stream *on, collective_body body, const Tensors &inputs, const Tensors &outputs) {
        /* A graph keeps the group alive. Its replay runs the collective on a thread without Python's state,
         * which gloo would release under its own lock once it gets the GIL, while the replaying thread may
         * hold the GIL and wait for that lock. */
        auto run = [group = c10::intrusive_ptr<device_backend>::reclaim_copy(this), body = std::move(body),
                    in = as_cpu_all(inputs), out = as_cpu_all(outputs)] {
            at::AutoDispatchBelowADInplaceOrView below;
            body(in, out);
        };
        if (through_host) {
            host_wait_stream(on);
        }
        if (through_host || !on->capture) {
            run();
        } else {
            run_or_hold(on, [run] { std::async(std::launch::async, run).get(); });
        }
    }

    /* Without other ranks: fill small outputs, which the host may read, with this rank's input. */
    static void pretend(const Tensors &inputs, const Tensors &outputs) {
        for (size_t i = 0; i < outputs.size() && !inputs.empty(); i++) {
            const Tensor &input = inputs.size() == outputs.size() ? inputs[i] : inputs[0];
            int64_t part = input.numel(), whole = outputs[i].numel();
            if (part && whole && whole % part == 0 && outputs[i].nbytes() <= SMALL_COLLECTIVE) {
                as_cpu(outputs[i]).view({-1, part}).copy_(as_cpu(input).reshape({1, -1}));
            }
        }
    }

    /* Charge the time of a collective. An all-reduce costs a reduce-scatter and an all-gather. */
    void spend(OpType type, stream *on, const Tensors &inputs, const Tensors &outputs) {
        if (!is_timed()) {
            return;
        }
        bool gathers = type == OpType::_ALLGATHER_BASE || type == OpType::ALLGATHER;
        bool scatters = type == OpType::_REDUCE_SCATTER_BASE || type == OpType::REDUCE_SCATTER;
        double in = 0, out = 0, ways = type == OpType::ALLREDUCE ? 2 : 1;
        for (const Tensor &each : inputs) {
            in += nbytes_of(each);
        }
        for (const Tensor &each : outputs) {
            out += nbytes_of(each);
        }
        host_spends((in_fsdp() ? costs().launch : costs().collective) +
                    (gathers || scatters ? costs().unit / 3 : 0));
        begins_after(on, &wire_is_free);
        /* A ring step writes the received bytes and reads them to send them on; a reduction also reads its
         * own. */
        double most = std::max(in, out), moved = (gathers ? 2 : ways == 2 ? 5 : 3) * most;
        double us = getSize() == 1 ? costs().least : ways * us_on_wire(own_wire(), getSize(), most);
        device_spends(on, c10d::opTypeToString(type).c_str(),
                      gathers    ? GATHER
                      : scatters ? SCATTER
                                 : OTHER_COLLECTIVE,
                      us, {use_of(us, moved).memory, multiprocessors_of(own_wire())});
        unpaid bookkeeping;
        time_record(&wire_is_free, on); /* not event_record(), which counts as a call of the driver */
        wire_is_free.recorded = true;
    }

    /* Return the wire of the group: WITHIN_NODE if all its ranks are on one node. */
    enum wire own_wire() const {
        const std::vector<uint64_t> &ranks = options->global_ranks_in_group;
        uint64_t per_node = (uint64_t)costs().gpus_per_node;
        if (ranks.empty()) {
            return (uint64_t)getSize() <= per_node ? WITHIN_NODE : BETWEEN_NODES;
        }
        bool is_one_node = std::all_of(ranks.begin(), ranks.end(),
                                       [&](uint64_t rank) { return rank / per_node == ranks[0] / per_node; });
        return is_one_node ? WITHIN_NODE : BETWEEN_NODES;
    }

    /* Return the group's own stream after it waits for the current stream. */
    stream *stream_after(stream *current) {
        stream *&own = streams[current->device];
        if (!own) {
            own = stream_from_pool(current->device, options->is_high_priority_stream ? -1 : 0);
        }
        event before{};
        event_record(&before, current);
        stream_wait(own, &before);
        return own;
    }

    void check(const Tensors &tensors) const {
        for (const Tensor &each : tensors) {
            TORCH_CHECK(each.is_cuda() && each.is_non_overlapping_and_dense(), name,
                        " takes dense tensors of the GPU alone here");
        }
    }

    static Tensors as_cpu_all(const Tensors &tensors) {
        Tensors all;
        for (const Tensor &each : tensors) {
            all.push_back(as_cpu(each));
        }
        return all;
    }

    static Tensor bytes(const Tensor &tensor) {
        return tensor.contiguous().view({-1}).view(at::kByte);
    }
    static Tensor from_bytes(const Tensor &raw, const Tensor &like) {
        return raw.view(like.scalar_type()).view(like.sizes());
    }
    static void put(const Tensor &into, const Tensor &value) {
        into.copy_(value.view(into.sizes()));
    }
    static void put_all(const Tensors &into, const Tensors &values) {
        for (size_t i = 0; i < into.size(); i++) {
            put(into[i], values[i]);
        }
    }

    /* Send the root's tensors to the ranks, in rank order. */
    void scatter_from(int root, const Tensors &parts, const Tensor &into) {
        Tensors received = {bytes(into).clone()};
        std::vector<Tensors> from(root == getRank() ? 1 : 0);
        for (size_t i = 0; root == getRank() && i < parts.size(); i++) {
            from[0].push_back(bytes(parts[i]));
        }
        c10d::ScatterOptions plain;
        plain.rootRank = root;
        gloo->scatter(received, from, plain)->wait();
        put(into, from_bytes(received[0], into));
    }

    Tensors gathered(const Tensor &input) {
        Tensors from = {bytes(input)};
        std::vector<Tensors> into(1);
        for (int i = 0; i < getSize(); i++) {
            into[0].push_back(at::empty_like(from[0]));
        }
        if (from[0].numel()) {
            gloo->allgather(into, from)->wait();
        }
        for (Tensor &each : into[0]) {
            each = from_bytes(each, input);
        }
        return into[0];
    }
    void gather_into(const Tensor &output, const Tensor &input) {
        Tensors parts;
        for (const Tensor &each : gathered(input)) {
            parts.push_back(each.reshape({-1}));
        }
        put(output, at::cat(parts));
    }
    void scatter_sum(const Tensor &output, const Tensor &input, const ReduceOp &op) {
        Tensors own;
        for (const Tensor &each : gathered(input)) {
            own.push_back(each.reshape({getSize(), -1})[getRank()]);
        }
        put(output, reduced(own, op));
    }
    Tensor reduced(const Tensors &parts, const ReduceOp &op) const {
        Tensor whole = parts.at(0).clone();
        for (size_t i = 1; i < parts.size(); i++) {
            whole = combined(whole, parts[i], op);
        }
        return op == ReduceOp::AVG ? whole.div_(getSize()) : whole;
    }
    static Tensor combined(const Tensor &whole, const Tensor &part, const ReduceOp &op) {
        switch (op) {
        case ReduceOp::SUM:
        case ReduceOp::AVG:
            return at::add(whole, part);
        case ReduceOp::MIN:
            return at::minimum(whole, part);
        case ReduceOp::MAX:
            return at::maximum(whole, part);
        default:
            TORCH_CHECK(false, "this reduction is not simulated");
        }
    }
};

/* Timer for DDP, which measures host time. */
class reducer_timer final : public c10d::Timer {
  public:
    explicit reducer_timer(c10::Device) {
    }
    std::optional<int64_t> measureDifference(Event start, Event end) override {
        std::optional<int64_t> from = getTimestamp(start), to = getTimestamp(end);
        return from && to ? std::optional<int64_t>(*to - *from) : std::nullopt;
    }
};

[[maybe_unused]] static const bool registered = [] {
    c10d::TimerRegistry()->Register(c10::kCUDA, [](c10::Device device) -> std::unique_ptr<c10d::Timer> {
        return std::make_unique<reducer_timer>(device);
    });
    return true;
}();

void bind_nccl(pybind11::module_ &module) {
    namespace py = pybind11;
    py::module_ c10d = py::module_::import("torch._C._distributed_c10d");
    py::object backend = c10d.attr("Backend"), gloo = c10d.attr("ProcessGroupGloo");
    auto over_gloo = [gloo](const py::object &store, int rank, int size,
                            c10::intrusive_ptr<nccl_options> options) {
        if (!options) {
            options = c10::make_intrusive<nccl_options>();
        }
        if (has_only_shapes()) {
            return c10::make_intrusive<device_backend>(rank, size, options);
        }
        py::object inner = gloo(store, rank, size, py::cast(options->timeout));
        return c10::make_intrusive<device_backend>(inner.cast<c10::intrusive_ptr<Backend>>(), options,
                                                   "nccl");
    };
    py::class_<nccl_options, c10::intrusive_ptr<nccl_options>>(module, "NCCLOptions", backend.attr("Options"))
        .def(py::init<bool>(), py::arg("is_high_priority_stream") = false)
        .def_readwrite("is_high_priority_stream", &nccl_options::is_high_priority_stream);
    py::class_<device_backend, c10::intrusive_ptr<device_backend>>(module, "ProcessGroupNCCL", backend)
        .def(py::init(over_gloo), py::arg("store"), py::arg("rank"), py::arg("size"), py::arg("options"))
        .def_static("of_gloo",
                    [](const c10::intrusive_ptr<Backend> &inner) {
                        return c10::make_intrusive<device_backend>(inner, c10::make_intrusive<nccl_options>(),
                                                                   "gloo");
                    })
        .def_static("over",
                    [](const c10::intrusive_ptr<Backend> &inner) {
                        return c10::make_intrusive<device_backend>(inner, c10::make_intrusive<nccl_options>(),
                                                                   "nccl");
                    })
        .def("_group_start", [](device_backend &) {})
        .def("_group_end", [](device_backend &) {})
        .def("_start_coalescing", &device_backend::startCoalescing)
        .def("_end_coalescing", &device_backend::endCoalescing)
        .def("_is_initialized", [](device_backend &) { return true; })
        .def("perform_nocolor_split", [](device_backend &, const py::object &) {});
}

} // namespace simulated_gpu
