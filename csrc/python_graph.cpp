// torch_blocked._C.Compiled: a graph from the plain data of torch_blocked/capture.py.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>
#include <torch/csrc/jit/python/pybind_utils.h>
#include <torch/csrc/utils/pybind.h>

#include <algorithm>

#include "graph/compiled.h"
#include "graph/record.h"

namespace py = pybind11;

namespace torch_blocked {
namespace {

using graph::Argument;

// A constant, ["value", id], or a list of these.
Argument argument_of(const py::handle& object) {
  if (object.is_none()) return {c10::IValue()};
  if (py::isinstance<py::bool_>(object)) return {c10::IValue(object.cast<bool>())};
  if (py::isinstance<py::int_>(object)) return {c10::IValue(object.cast<std::int64_t>())};
  if (py::isinstance<py::float_>(object)) return {c10::IValue(object.cast<double>())};
  if (py::isinstance<py::str>(object)) return {c10::IValue(object.cast<std::string>())};
  if (THPDtype_Check(object.ptr())) {
    return {c10::IValue(static_cast<std::int64_t>(object.cast<at::ScalarType>()))};
  }
  if (THPDevice_Check(object.ptr())) return {c10::IValue(object.cast<at::Device>())};
  if (THPLayout_Check(object.ptr())) {
    return {c10::IValue(static_cast<std::int64_t>(object.cast<at::Layout>()))};
  }
  if (THPMemoryFormat_Check(object.ptr())) {
    return {c10::IValue(static_cast<std::int64_t>(object.cast<at::MemoryFormat>()))};
  }
  const auto list = object.cast<py::list>();
  if (list.size() == 2 && py::isinstance<py::str>(list[0])) {
    return {graph::ValueRef{list[1].cast<graph::Value>()}};
  }
  std::vector<Argument> items;
  for (const py::handle& item : list) items.push_back(argument_of(item));
  return {std::move(items)};
}

py::object object_of(const Argument& argument) {
  if (argument.is_constant()) return torch::jit::toPyObject(argument.constant());
  py::list list;
  if (argument.value() != graph::kNone) {
    list.append("value");
    list.append(argument.value());
    return list;
  }
  for (const Argument& item : std::get<std::vector<Argument>>(argument.held)) {
    list.append(object_of(item));
  }
  return list;
}

// As the fields of capture.Node.
py::list calls_of(const graph::Recorder& recorder) {
  py::list calls;
  for (const graph::Node& node : recorder.nodes()) {
    py::list arguments;
    for (const Argument& argument : node.arguments) arguments.append(object_of(argument));
    calls.append(py::make_tuple(node.name, node.overload, arguments, node.outputs));
  }
  return calls;
}

graph::Node node_of(const py::handle& object) {
  graph::Node node{.name = object.attr("name").cast<std::string>(),
                   .overload = object.attr("overload").cast<std::string>(),
                   .arguments = {},
                   .outputs = object.attr("outputs").cast<std::vector<graph::Value>>()};
  for (const py::handle& argument : object.attr("arguments")) {
    node.arguments.push_back(argument_of(argument));
  }
  return node;
}

graph::Graph graph_of(const py::object& capture) {
  graph::Graph graph;
  for (const py::handle& each : capture.attr("nodes")) {
    graph.nodes.push_back(node_of(each));
    for (const graph::Value value : graph.nodes.back().outputs) {
      graph.values = std::max(graph.values, value + 1);
    }
  }
  graph.inputs = capture.attr("inputs").cast<std::vector<graph::Value>>();
  for (const py::handle& output : capture.attr("outputs")) {
    graph.outputs.push_back(argument_of(output));
  }
  graph.constants = capture.attr("constants").cast<std::map<graph::Value, at::Tensor>>();
  for (const graph::Value value : graph.inputs) graph.values = std::max(graph.values, value + 1);
  for (const auto& [value, tensor] : graph.constants) {
    graph.values = std::max(graph.values, value + 1);
  }
  return graph;
}

// {problem: (implementation, microseconds)}
using Times = std::map<std::string, std::pair<std::string, double>>;

graph::Tuner::Known known_of(const Times& times) {
  const std::vector<std::string> names = convolution_implementations();
  graph::Tuner::Known known;
  for (const auto& [problem, time] : times) {
    const bool valid = std::ranges::find(names, time.first) != names.end();
    if (valid) known[problem] = graph::Tuner::Choice{time.first, time.second};
  }
  return known;
}

Times times_of(const graph::Tuner::Known& known) {
  Times times;
  for (const auto& [problem, choice] : known) {
    if (choice) times[problem] = {choice->implementation, choice->microseconds};
  }
  return times;
}

// (dims, dtype) of what a node returns for these values, or None; for tests.
using Result = std::pair<Dims, at::ScalarType>;
std::optional<std::vector<Result>> known_results(const py::object& node,
                                                 const std::map<graph::Value, at::Tensor>& values) {
  std::vector<graph::Meta> metas(values.empty() ? 0 : std::size_t(values.rbegin()->first) + 1);
  for (const auto& [value, tensor] : values) {
    metas[static_cast<std::size_t>(value)] = {tensor.sizes().vec(), tensor.scalar_type()};
  }
  const auto known = graph::known_results(node_of(node), metas);
  if (!known) return std::nullopt;
  std::vector<Result> results;
  for (const graph::Meta& meta : *known) results.emplace_back(meta.dims, meta.dtype);
  return results;
}

}  // namespace

void bind_graph(py::module_& m) {
  using graph::Compiled;
  m.def("known_results", known_results);
  py::class_<graph::Recorder>(m, "Recorder")
      .def(py::init<std::vector<at::Tensor>>())
      .def("__enter__", [](graph::Recorder& recorder) { recorder.start(); })
      .def("__exit__", [](graph::Recorder& recorder, const py::args&) { recorder.stop(); })
      .def("calls", calls_of)
      .def("constants", &graph::Recorder::constants)
      .def("value_of", &graph::Recorder::value_of)
      .def("refusal", &graph::Recorder::refusal);
  py::class_<graph::StepReport>(m, "StepReport")
      .def_readonly("op", &graph::StepReport::op)
      .def_readonly("output", &graph::StepReport::output)
      .def_readonly("implementation", &graph::StepReport::implementation)
      .def_readonly("why", &graph::StepReport::why)
      .def_readonly("microseconds", &graph::StepReport::microseconds);
  // Kernels run without the GIL; planning asks for shapes, which ops written in Python answer too.
  py::class_<Compiled>(m, "Compiled")
      .def(py::init([](const py::object& capture, const std::vector<at::Tensor>& example, bool tune,
                       std::string tuning_file, const Times& times) {
        graph::Tuner tuner(tune, std::move(tuning_file), known_of(times));
        return std::make_unique<Compiled>(graph_of(capture), example, std::move(tuner));
      }))
      .def("times", [](Compiled& compiled) { return times_of(compiled.times()); })
      .def("__call__", &Compiled::operator(), py::call_guard<py::gil_scoped_release>())
      .def("prepare", &Compiled::prepare, py::call_guard<py::gil_scoped_release>())
      .def("report", &Compiled::report, py::call_guard<py::gil_scoped_release>())
      .def("release", &Compiled::release, py::call_guard<py::gil_scoped_release>())
      .def("packed_bytes", &Compiled::packed_bytes)
      .def("arena_bytes", &Compiled::arena_bytes);
}

}  // namespace torch_blocked
