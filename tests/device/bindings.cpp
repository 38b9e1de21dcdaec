// The device's Python interface.
#include "driver.h"
#include "process_group.h"
#include "streams.h"

#include <torch/csrc/utils/pybind.h>

namespace py = pybind11;

PYBIND11_MODULE(MODULE_NAME, m)
{
    m.def("now_ns", &device::now);
    m.def("clock_offset_ns", &device::clock_offset);
    m.def("spin_ns", &device::spin, py::call_guard<py::gil_scoped_release>()); // Waits if the queue is full.
    m.def("never", &device::never, py::call_guard<py::gil_scoped_release>());
    m.def("release", &device::release);
    m.def("call", [](int64_t stream, py::object function) {
        // Calls the function on the stream's thread with the stream's device time. It takes no device time.
        auto held = std::make_shared<py::handle>(function.release());
        py::gil_scoped_release released; // The call waits if the queue is full.
        device::stream(stream).enqueue([held](device::Stream &of) {
            const device::Ns line = of.line;
            py::gil_scoped_acquire acquired;
            const auto called = py::reinterpret_steal<py::object>(*held);
            called(line);
        }, 0);
    });
    py::class_<device::Stream::Graph, std::shared_ptr<device::Stream::Graph>>(m, "Graph")
        .def(
            "replay", [](const device::Stream::Graph &graph) { graph.replay(device::current_stream()); },
            py::call_guard<py::gil_scoped_release>()); // Waits if the queue is full.
    m.def("begin_capture", [] { device::current_stream().begin_capture(); });
    m.def("is_capturing", [] { return device::current_stream().capturing(); });
    m.def("end_capture", [] { return device::current_stream().end_capture(); });
    m.def("set_kernel_ns", [](device::Ns takes) { device::kernel_ns = takes; });
    m.def("set_computing", [](bool computes) { device::computing = computes; });
    m.def("current_stream", [](int) { return int64_t(device::current_stream().id); });
    m.def("new_stream", [] { return int64_t(device::new_stream().id); });
    m.def("set_driver_costs", [](int64_t record, int64_t query, int64_t elapsed) {
        device::record_ns = record;
        device::query_ns = query;
        device::elapsed_ns = elapsed;
    });
    m.def("set_outliers", [](int64_t every, double factor) {
        device::outlier_factor = factor;
        device::outlier_every = every;
    });
    m.def("set_slowness", [](double factor) { device::slowness = factor; });
    m.def("set_collective", [](device::Ns latency_ns, double bytes_per_second) {
        device::latency_ns = latency_ns;
        device::bytes_per_second = bytes_per_second;
    });
    m.def(
        "create_process_group", &device::create_process_group, py::call_guard<py::gil_scoped_release>(),
        py::arg("store"), py::arg("rank"), py::arg("size"), py::arg("timeout_s"));
    m.def("shut_down", &device::shut_down, py::call_guard<py::gil_scoped_release>());
    m.def("counters", [] {
        py::dict all;
        device::Counters &c = device::counters;
        all["stream_synchronizations"] = c.stream_synchronizations.load();
        all["event_synchronizations"] = c.event_synchronizations.load();
        all["device_synchronizations"] = c.device_synchronizations.load();
        all["copy_synchronizations"] = c.copy_synchronizations.load();
        all["item_synchronizations"] = c.item_synchronizations.load();
        all["operator_synchronizations"] = c.operator_synchronizations.load();
        all["full_queues"] = c.full_queues.load();
        all["event_queries"] = c.event_queries.load();
        all["events"] = c.events.load();
        all["streams"] = c.streams.load();
        all["kernels"] = c.kernels.load();
        all["collectives"] = c.collectives.load();
        return all;
    });
}
