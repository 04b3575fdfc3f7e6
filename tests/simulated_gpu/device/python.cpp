/* The functions that torch.cuda calls in torch._C, and the device's own. install.py installs them. */
#include <pybind11/stl.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/Storage.h>
#include <torch/csrc/utils/pybind.h>

#include "driver.h"
#include "graph.h"
#include "nccl.h"
#include "tensors.h"
#include "timeline.h"

namespace py = pybind11;

namespace simulated_gpu {

/* traceback.format_stack. An import at each use would fail in a collection inside a named tuple's __new__, whose
   globals have no builtins. */
static PyObject *format_stack;

/* Return Python's stack as text, if this thread holds the GIL. */
static std::string python_place() {
    if (!Py_IsInitialized() || !PyGILState_Check()) {
        return "  (a thread without Python)";
    }
    const int frames = 14;
    py::object stack = py::handle(format_stack)(py::none(), frames);
    return py::str("").attr("join")(stack).cast<std::string>();
}

/* ---- streams ---- */

static py::tuple stream_tuple(const stream *which) {
    return py::make_tuple(which->id, which->device, (int)c10::kCUDA);
}

static void set_device_checked(int device) {
    TORCH_CHECK(device < device_count(), "CUDA error: invalid device ordinal");
    set_device(device);
}

/* Set the device and return the previous one; -1 changes nothing. */
static int exchange_device(int device) {
    if (device < 0) {
        return -1;
    }
    int before = current_device();
    if (device != before || !has_context()) {
        set_device_checked(device);
    }
    return before;
}

static void bind_streams(py::module_ &module) {
    module.def("getDeviceCount", &device_count);
    module.def("getDevice", &current_device);
    module.def("setDevice", &set_device_checked);
    module.def("exchangeDevice", &exchange_device);
    module.def("maybeExchangeDevice", &exchange_device);
    module.def("getCurrentStream", [](int device) { return stream_tuple(current_stream(device)); });
    module.def("getDefaultStream", [](int device) { return stream_tuple(stream_of_id(device, 0)); });
    module.def("getCurrentRawStream",
               [](int device) { return (uintptr_t)handle_of(current_stream(device)); });
    module.def(
        "setStream",
        [](int64_t stream_id, int device_index, int) {
            set_device(device_index);
            set_current_stream(stream_of_id(device_index, stream_id));
        },
        py::arg("stream_id"), py::arg("device_index"), py::arg("device_type"));
    module.def("synchronize", [] { host_wait_device(current_device()); });
    module.def("set_sync_debug_mode", [](int mode) { sync_debug_mode = mode; });
    module.def("get_sync_debug_mode", [] { return sync_debug_mode; });
    module.def("sleep", [](int64_t) { launch launch(current_stream(current_device()), "sleep"); });
    module.def("stream_handle",
               [](int64_t id, int device) { return (uintptr_t)handle_of(stream_of_id(device, id)); });
    module.def("stream_priority", [](int64_t id, int device) { return stream_of_id(device, id)->priority; });
    module.def("host_ms_between", [](uintptr_t from, uintptr_t to) {
        TORCH_CHECK(from && to, "Both events must be recorded before calculating elapsed time.");
        return host_ms_between((const event *)from, (const event *)to);
    });
}

/* ---- time ---- */

static double &cost(const std::string &name) {
    double *found = cost_of_name(name);
    TORCH_CHECK(found, "there is no such cost: ", name);
    return *found;
}

static void bind_timeline(py::module_ &module) {
    module.def("is_timed", &is_timed);
    module.def("has_only_shapes", &has_only_shapes);
    module.def("host_time", &host_time);
    module.def("host_spends", &host_spends);
    module.def("cost", [](const std::string &name) { return cost(name); });
    module.def("set_cost", [](const std::string &name, double value) { cost(name) = value; });
    module.def("set_wire", [](bool is_between_nodes, std::vector<std::pair<double, double>> us_by_nbytes,
                              int64_t ranks, double multiprocessors) {
        set_wire(is_between_nodes ? BETWEEN_NODES : WITHIN_NODE, std::move(us_by_nbytes), ranks,
                 multiprocessors);
    });
    module.def("take_spans", [] {
        py::list all;
        for (const span &each : take_spans()) {
            std::vector<int64_t> after;
            for (auto &[_, serial] : each.after) {
                after.push_back(serial);
            }
            all.append(py::make_tuple(each.begin, each.end, each.asked, each.ready, each.before, each.serial,
                                      each.cause, each.stream, (int)each.kind, each.name, after,
                                      each.use.memory, each.use.multiprocessors));
        }
        return all;
    });
}

/* ---- memory ---- */

static py::dict stat(int64_t current, int64_t peak) {
    using namespace py::literals;
    py::dict whole;
    for (const char *name : {"all", "small_pool", "large_pool"}) {
        whole[name] = py::dict("current"_a = current, "peak"_a = peak, "allocated"_a = 0, "freed"_a = 0);
    }
    return whole;
}

static py::dict stats_dict(int device) {
    memory_stats now = stats_of(device);
    py::dict all;
    all["allocated_bytes"] = stat(now.allocated, now.allocated_peak);
    all["requested_bytes"] = stat(now.requested, now.requested_peak);
    all["reserved_bytes"] = stat(now.reserved, now.reserved_peak);
    all["active_bytes"] = stat(now.active, now.active_peak);
    all["num_device_alloc"] = now.num_device_alloc;
    all["num_device_free"] = now.num_device_free;
    all["num_alloc_retries"] = now.num_alloc_retries;
    all["num_ooms"] = now.num_ooms;
    all["num_allocs"] = now.num_allocs;
    return all;
}

using id_pair = std::pair<uint64_t, uint64_t>;

/* Memory pool that keeps its memory, even after empty_cache(), until it is destroyed, like torch's. */
struct mem_pool {
    mem_pool(const py::object &, bool, bool, bool) : id(new_pool()) {
        keep_pool(id);
    }
    ~mem_pool() {
        no_pool_may_be_entered();
        release_pool(id);
    }
    mem_pool(const mem_pool &) = delete;
    pool_id id;
};

static PyObject *resize_on_cpu; /* owned, never released */

/* A C method, like torch's: the interpreter runs no code inside, so no signal is handled there. */
static PyObject *storage_resize(PyObject *self, PyObject *nbytes) {
    HANDLE_TH_ERRORS
    c10::StorageImpl *storage = THPStorage_Unpack(self).unsafeGetStorageImpl();
    if (storage->device_type() != c10::kCUDA) {
        return PyObject_CallFunctionObjArgs(resize_on_cpu, self, nbytes, nullptr);
    }
    size_t wanted = PyLong_AsSize_t(nbytes);
    if (PyErr_Occurred()) {
        return nullptr;
    }
    resize_storage(storage, wanted);
    return Py_NewRef(self);
    END_HANDLE_TH_ERRORS
}

static void replace_storage_resize(const py::object &type) {
    static PyMethodDef method = {"resize_", storage_resize, METH_O, nullptr};
    resize_on_cpu = py::object(type.attr("resize_")).release().ptr();
    PyObject *descriptor = PyDescr_NewMethod((PyTypeObject *)type.ptr(), &method);
    type.attr("resize_") = py::reinterpret_steal<py::object>(descriptor);
}

struct device_properties {
    std::string name = "Simulated GPU";
    int major = 9, minor = 0, multi_processor_count = 132, warp_size = 32;
    size_t total_memory = simulated_gpu::total_memory();
};

static void bind_memory(py::module_ &module) {
    module.def("memoryStats", &stats_dict);
    module.def("resetPeakMemoryStats", &reset_peaks);
    module.def("resetAccumulatedMemoryStats", [](int) {});
    module.def("log_memory", &log_memory);
    module.def("take_memory_log", [] {
        py::list all;
        for (const memory_change &each : take_memory_log()) {
            all.append(py::make_tuple(each.at, each.nbytes, each.stream, each.in_pool));
        }
        return all;
    });
    module.def("reserved_segments", [] {
        py::list all;
        for (const memory_segment &each : reserved_segments()) {
            all.append(py::make_tuple(each.at, each.nbytes, each.stream, each.in_pool));
        }
        return all;
    });
    module.def("emptyCache", [](const py::args &) { empty_cache(); });
    module.def("setMemoryFraction", &set_fraction);
    module.def("beginAllocateToPool",
               [](int device, id_pair id) { begin_pool(device, {id.first, id.second}); });
    module.def("endAllocateToPool", [](int device, id_pair id) { end_pool(device, {id.first, id.second}); });
    module.def("releasePool", [](int, id_pair) {}); /* empty_cache() frees its memory */
    module.def("replace_storage_resize", &replace_storage_resize);
    module.def("default_generator", [](int device) { return default_generator(device); });
    py::class_<mem_pool>(module, "MemPool")
        .def(py::init<const py::object &, bool, bool, bool>(), py::arg("allocator") = py::none(),
             py::arg("is_user_created") = true, py::arg("use_on_oom") = false, py::arg("no_split") = false)
        .def_property_readonly("id",
                               [](const mem_pool &pool) { return id_pair(pool.id.first, pool.id.second); })
        .def("use_count", [](const mem_pool &) { return 1; });
    py::class_<device_properties>(module, "DeviceProperties")
        .def(py::init<>())
        .def_readonly("name", &device_properties::name)
        .def_readonly("major", &device_properties::major)
        .def_readonly("minor", &device_properties::minor)
        .def_readonly("multi_processor_count", &device_properties::multi_processor_count)
        .def_readonly("warp_size", &device_properties::warp_size)
        .def_readonly("total_memory", &device_properties::total_memory);
}

/* ---- graphs ---- */

static void bind_graphs(py::module_ &module) {
    module.def("is_capturing", [] { return current_stream(current_device())->capture != 0; });
    module.def("new_pool", [] {
        pool_id made = new_pool();
        return id_pair(made.first, made.second);
    });
    py::class_<graph>(module, "CUDAGraph")
        .def(py::init([](bool) { return std::make_unique<graph>(); }), py::arg("keep_graph") = false)
        .def(
            "capture_begin",
            [](graph &self, std::optional<id_pair> pool, const std::string &) {
                pool_id given = pool ? pool_id{pool->first, pool->second} : pool_id{0, 0};
                self.begin(current_stream(current_device()), given);
            },
            py::arg("pool") = py::none(), py::arg("capture_error_mode") = "global")
        .def("capture_end", &graph::end)
        .def("instantiate", [](graph &) {})
        /* replays use the device's generator */
        .def("register_generator_state", [](graph &, const py::object &) {})
        .def("replay", [](graph &self) { self.replay(current_stream(current_device())); })
        .def("reset", &graph::reset)
        .def("pool", [](const graph &self) { return id_pair(self.pool().first, self.pool().second); });
}

} // namespace simulated_gpu

PYBIND11_MODULE(TORCH_EXTENSION_NAME, module) {
    using namespace simulated_gpu;
    bind_streams(module);
    bind_timeline(module);
    bind_memory(module);
    bind_graphs(module);
    module.def("bind_nccl", [](py::module_ into) { bind_nccl(into); });
    module.def("take_reports", &take_reports);
    module.def("launch_counts", &launch_counts);
    module.def("driver_calls", [] {
        using namespace py::literals;
        driver_calls now = calls_so_far();
        return py::dict("events_created"_a = now.events_created, "records"_a = now.records,
                        "stream_waits"_a = now.stream_waits, "host_waits"_a = now.host_waits);
    });
    module.def("log_order", &log_order);
    module.def("order_so_far", [] {
        std::vector<std::tuple<std::string, int, std::map<int, uint64_t>>> all;
        for (const ordered &each : order_so_far()) {
            all.push_back({each.what, each.agent, {each.after.begin(), each.after.end()}});
        }
        return all;
    });
    module.def("drop_wait", &drop_wait);
    module.def("waits_so_far", &waits_so_far);
    format_stack = py::object(py::module_::import("traceback").attr("format_stack")).release().ptr();
    set_place(&python_place);
}
