// Python bindings of graphs. torch_blocked._C.Compiled is made from the plain data of
// torch_blocked/captured.py.
#include <pybind11/functional.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/utils/pybind.h>

#include <set>

#include "format/errors.h"
#include "graph/capture/loadable.h"
#include "graph/capture/record.h"
#include "graph/capture/sizes_only.h"
#include "graph/capture/well_formed.h"
#include "graph/compiled.h"
#include "graph/planning/stretches.h"
#include "runtime/interrupts.h"
#include "runtime/isa.h"

namespace py = pybind11;

namespace torch_blocked {
namespace {

using graph::Argument;

// Lists may nest this deep. Schemas have only lists in lists.
constexpr int kDeepest = 8;

// A constant, ["value", id], or a list of these.
Argument argument_of(const py::handle& object, int depth = 0) {
  if (object.is_none()) return {c10::IValue()};
  if (py::isinstance<py::bool_>(object)) return {c10::IValue(object.cast<bool>())};
  if (py::isinstance<py::int_>(object)) return {c10::IValue(object.cast<std::int64_t>())};
  if (py::isinstance<py::float_>(object)) return {c10::IValue(object.cast<double>())};
  if (PyComplex_Check(object.ptr())) {
    const Py_complex number = PyComplex_AsCComplex(object.ptr());
    return {c10::IValue(c10::complex<double>(number.real, number.imag))};
  }
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
  if (depth == kDeepest || !PySequence_Check(object.ptr())) {
    fail_value("optimize", text("constants, values and lists of them, ", kDeepest, " deep at most"),
               std::string(py::str(py::type::of(object).attr("__name__"))),
               "optimize the model again");
  }
  const auto list = object.cast<py::list>();
  if (list.size() == 2 && py::isinstance<py::str>(list[0])) {
    const auto value = list[1].cast<graph::Value>();
    if (value < 0)
      fail_value("optimize", "values from 0 on", text(value), "optimize the model again");
    return {graph::ValueRef{value}};
  }
  std::vector<Argument> items;
  for (const py::handle& item : list) items.push_back(argument_of(item, depth + 1));
  return {std::move(items)};
}

// The Python object of a constant that the recorder has noted.
py::object object_of(const c10::IValue& constant) {
  if (constant.isBool()) return py::bool_(constant.toBool());
  if (constant.isInt()) return py::int_(constant.toInt());
  if (constant.isDouble()) return py::float_(constant.toDouble());
  if (constant.isComplexDouble()) {
    const c10::complex<double> number = constant.toComplexDouble();
    return py::reinterpret_steal<py::object>(PyComplex_FromDoubles(number.real(), number.imag()));
  }
  if (constant.isString()) return py::str(constant.toStringRef());
  if (constant.isDevice()) return py::cast(constant.toDevice());
  return py::none();
}

py::object object_of(const Argument& argument) {
  if (argument.is_constant()) return object_of(argument.constant());
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

// The recorded calls, each as the fields of captured.Node.
py::list calls_of(const graph::Recorder& recorder) {
  py::list calls;
  for (const graph::Node& node : recorder.nodes()) {
    py::list arguments;
    for (const Argument& argument : node.arguments) arguments.append(object_of(argument));
    calls.append(py::make_tuple(node.name, node.overload, arguments, node.outputs,
                                node.origin.module, node.origin.line));
  }
  return calls;
}

graph::Node node_of(const py::handle& object) {
  graph::Node node{.name = object.attr("name").cast<std::string>(),
                   .overload = object.attr("overload").cast<std::string>(),
                   .arguments = {},
                   .outputs = object.attr("outputs").cast<std::vector<graph::Value>>(),
                   .origin = {.module = object.attr("module").cast<std::string>(),
                              .line = object.attr("line").cast<std::string>()}};
  for (const py::handle& argument : object.attr("arguments")) {
    node.arguments.push_back(argument_of(argument));
  }
  return node;
}

graph::Graph graph_of(const py::object& capture) {
  graph::Graph graph;
  graph.fixed_sizes = capture.attr("fixed_sizes").cast<bool>();
  for (const auto& [dims, dtype] :
       capture.attr("input_metas").cast<std::vector<std::pair<Dims, at::ScalarType>>>()) {
    graph.input_metas.push_back({dims, dtype});
  }
  using NamedMeta = std::pair<Dims, at::ScalarType>;
  for (const auto& metas : capture.attr("also").cast<std::vector<std::vector<NamedMeta>>>()) {
    graph.also.emplace_back();
    for (const auto& [dims, dtype] : metas) graph.also.back().push_back({dims, dtype});
  }
  for (const auto& [value, meta] :
       capture.attr("metas").cast<std::map<graph::Value, NamedMeta>>()) {
    graph.metas[value] = {meta.first, meta.second};
  }
  using Asked = std::tuple<graph::Value, std::int64_t, Dims>;
  for (const auto& [value, what, answer] : capture.attr("questions").cast<std::vector<Asked>>()) {
    graph.questions.push_back({value, what, answer});
  }
  for (const py::handle& each : capture.attr("nodes")) graph.nodes.push_back(node_of(each));
  graph.inputs = capture.attr("inputs").cast<std::vector<graph::Value>>();
  for (const py::handle& output : capture.attr("outputs")) {
    graph.outputs.push_back(argument_of(output));
  }
  graph.constants = capture.attr("constants").cast<std::map<graph::Value, at::Tensor>>();
  check_and_count(graph);
  return graph;
}

// {problem: (implementation, microseconds)}
using Times = std::map<std::string, std::pair<std::string, double>>;

graph::Tuner::Known known_of(const Times& times) {
  graph::Tuner::Known known;
  for (const auto& [problem, time] : times) {
    known[problem] = graph::Tuner::Choice{time.first, time.second};
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

// For tests: (dims, dtype) of a node's results for these values, or None.
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

// Changes the class of a Python tensor to `to`, if it is exactly `from` and no subclass.
void change_class(const at::Tensor& tensor, const py::object& from, const py::object& to) {
  const auto object = py::reinterpret_steal<py::object>(THPVariable_Wrap(tensor));
  if (py::type::handle_of(object).is(from)) object.attr("__class__") = to;
}

// `watched` is the class of tensors that notices when Python asks for their sizes. `own` are the
// classes of blocked tensors. where() returns the path of the module that runs, and the user's
// line.
std::unique_ptr<graph::Recorder> make_recorder(const std::vector<at::Tensor>& inputs,
                                               const std::vector<at::Tensor>& state,
                                               const py::object& watched, const py::tuple& own,
                                               const py::function& where) {
  const py::object plain = py::module_::import("torch").attr("Tensor");
  for (const at::Tensor& input : inputs) change_class(input, plain, watched);
  const auto on_result = [plain, watched](const at::Tensor& tensor) {
    const py::gil_scoped_acquire gil;
    change_class(tensor, plain, watched);
  };
  const auto origin = [where] {
    const py::gil_scoped_acquire gil;
    const auto [module, line] = where().cast<std::pair<std::string, std::string>>();
    return graph::Origin{module, line};
  };
  const auto is_own = [own](const at::Tensor& tensor) {
    const py::gil_scoped_acquire gil;
    return py::isinstance(py::reinterpret_steal<py::object>(THPVariable_Wrap(tensor)), own);
  };
  return std::make_unique<graph::Recorder>(inputs, state, on_result, origin, is_own);
}

void stop(graph::Recorder& recorder, const py::object& watched) {
  recorder.stop();
  const py::object plain = py::module_::import("torch").attr("Tensor");
  for (const at::Tensor& tensor : recorder.alive()) change_class(tensor, watched, plain);
  recorder.raise_again();
}

// Whether an error of Python is no failure: KeyboardInterrupt, SystemExit and others that `except
// Exception` does not catch.
bool is_python_interrupt(const std::exception& error) {
  const py::gil_scoped_acquire gil;
  if (const auto* of_pybind = dynamic_cast<const py::error_already_set*>(&error)) {
    return !of_pybind->matches(PyExc_Exception);
  }
  const auto* of_torch = dynamic_cast<const python_error*>(&error);
  return of_torch && of_torch->type &&
         !PyErr_GivenExceptionMatches(of_torch->type, PyExc_Exception);
}

// Runs Python's handlers of pending signals. Only Python's main thread may do so; in others it does
// nothing.
void check_python_signals() {
  const py::gil_scoped_acquire gil;
  if (PyErr_CheckSignals() != 0) throw py::error_already_set();
}

// The tensors among the arguments of a call; other arguments are skipped. `blocked` and `view` are
// BlockedTensor and DenseView, whose memory is read in place. `watched` is the class of ordinary
// tensors during a capture.
std::vector<graph::Given> inputs_of(const py::list& arguments,
                                    const std::optional<at::ScalarType>& dtype,
                                    const py::object& blocked, const py::object& view,
                                    const py::object& watched) {
  std::vector<graph::Given> inputs;
  for (const py::handle& argument : arguments) {
    if (!THPVariable_Check(argument.ptr())) continue;
    const auto plain = [&](const py::handle& object) -> const at::Tensor& {
      if (!THPVariable_CheckExact(object.ptr()) && !py::type::handle_of(object).is(watched)) {
        fail_type("optimize", "dense or blocked CPU tensors as inputs",
                  std::string(py::str(py::type::of(object).attr("__name__"))),
                  "convert it to a torch.Tensor, or call the model itself");
      }
      return THPVariable_Unpack(object.ptr());
    };
    if (py::isinstance(argument, blocked)) {
      const py::object physical = argument.attr("_read")();
      const auto channels = argument.attr("_channels").cast<std::int64_t>();
      inputs.push_back(graph::given_blocked(plain(physical), channels, dtype));
    } else if (py::isinstance(argument, view)) {
      inputs.push_back(graph::given(plain(argument.attr("_plain")()), dtype));
    } else {
      inputs.push_back(graph::given(plain(argument), dtype));
    }
  }
  return inputs;
}

// Each value as (slot, format, dims, dtype).
py::list held_of(const std::vector<graph::StepExplanation::Held>& all) {
  py::list list;
  for (const auto& [slot, format, dims, dtype] : all) {
    list.append(py::make_tuple(slot, format, dims, dtype));
  }
  return list;
}

// A context manager: `with SizesOnly():`.
struct SizesOnly {
  std::unique_ptr<graph::SizesOnly> held = nullptr;
};

struct Inputs {
  std::vector<graph::Given> given;
  std::string key;
};

// From optimize()'s argument: False, True or "full".
graph::Timing timing_of(const py::object& tune) {
  if (py::isinstance<py::str>(tune)) return graph::Timing::kAll;
  return tune.cast<bool>() ? graph::Timing::kOpen : graph::Timing::kNothing;
}

graph::Computes computes_of(const std::string& word) {
  static const std::map<std::string, graph::Computes> kWords{
      {"captured", graph::Computes::kAsCaptured},
      {"fastest", graph::Computes::kFastest},
      {"timed", graph::Computes::kTimed},
      {"narrow", graph::Computes::kNarrow}};
  return kWords.at(word);
}

// For tests.
std::set<std::size_t> faster_in_float32(
    const std::vector<std::tuple<double, double, double>>& stretches) {
  std::vector<graph::Stretch> all;
  for (const auto& [narrow, wide, change] : stretches) all.push_back({narrow, wide, change});
  return graph::faster_in_float32(all);
}

}  // namespace

void bind_graph(py::module_& m) {
  using graph::Compiled;
  set_interrupts({check_python_signals, is_python_interrupt});
  m.def("known_results", known_results);
  m.def("multiplies_bfloats", multiplies_bfloats);
  m.def("gains_by_bfloats", gains_by_bfloats);
  m.def("faster_in_float32", faster_in_float32);
  m.def("is_loadable", &graph::is_loadable, "whether any file may name the op");
  m.def(
      "check_loadable",
      [](const py::object& capture, const std::set<std::string>& more) {
        graph::check_loadable(graph_of(capture), more);
      },
      "raises ValueError unless a file may hold the capture; `more`: ops that it may name");
  py::class_<graph::Recorder>(m, "Recorder")
      .def(py::init(&make_recorder))
      .def("start", &graph::Recorder::start)
      .def("stop", &stop)
      .def("restore", &graph::Recorder::restore)
      .def("calls", calls_of)
      .def("constants", &graph::Recorder::constants)
      .def("value_of", &graph::Recorder::value_of)
      .def("ask", &graph::Recorder::ask)
      .def("is_constant", &graph::Recorder::is_constant)
      .def("expose", &graph::Recorder::expose)
      .def("metas",
           [](const graph::Recorder& recorder) {
             std::map<graph::Value, std::pair<Dims, at::ScalarType>> metas;
             for (const auto& [value, meta] : recorder.metas()) {
               metas[value] = {meta.dims, meta.dtype};
             }
             return metas;
           })
      .def("questions",
           [](const graph::Recorder& recorder) {
             py::list questions;
             for (const auto& [value, what, answer] : recorder.questions()) {
               questions.append(py::make_tuple(value, what, answer));
             }
             return questions;
           })
      .def("wrote_state", &graph::Recorder::wrote_state)
      .def("seconds_in_ops",
           [](const graph::Recorder& recorder) { return recorder.seconds_in_ops().count(); })
      .def("refusal", &graph::Recorder::refusal)
      .def("has_fixed_sizes", &graph::Recorder::has_fixed_sizes)
      .def_static("is_running", [] { return graph::Recorder::current() != nullptr; });
  py::class_<SizesOnly>(m, "SizesOnly")
      .def(py::init<>())
      .def("__enter__", [](SizesOnly& self) { self.held = std::make_unique<graph::SizesOnly>(); })
      .def("__exit__", [](SizesOnly& self, const py::args&) { self.held.reset(); });
  py::class_<graph::Weights, std::shared_ptr<graph::Weights>>(m, "Weights")
      .def(py::init([] { return std::make_shared<graph::Weights>(); }))
      .def("check_unchanged", &graph::Weights::check_unchanged)
      .def("packed_bytes", &graph::Weights::packed_bytes);
  py::class_<Inputs>(m, "Inputs")
      .def(py::init([](const py::list& arguments, std::optional<at::ScalarType> dtype,
                       const py::object& blocked, const py::object& view,
                       const py::object& watched) {
        Inputs inputs{inputs_of(arguments, dtype, blocked, view, watched), {}};
        inputs.key = key_of(inputs.given);
        return inputs;
      }))
      .def_property_readonly("key", [](const Inputs& inputs) { return py::bytes(inputs.key); })
      .def_property_readonly("metas", [](const Inputs& inputs) {
        std::vector<std::pair<Dims, at::ScalarType>> metas;
        for (const auto& [dims, dtype] : metas_of(inputs.given)) metas.emplace_back(dims, dtype);
        return metas;
      });
  py::class_<graph::StepReport>(m, "StepReport")
      .def_readonly("op", &graph::StepReport::op)
      .def_readonly("input", &graph::StepReport::input)
      .def_readonly("output", &graph::StepReport::output)
      .def_readonly("implementation", &graph::StepReport::implementation)
      .def_readonly("why", &graph::StepReport::why)
      .def_property_readonly("module",
                             [](const graph::StepReport& step) { return step.origin.module; })
      .def_property_readonly("line", [](const graph::StepReport& step) { return step.origin.line; })
      .def_readonly("microseconds", &graph::StepReport::microseconds)
      .def_readonly("flops", &graph::StepReport::flops)
      .def_readonly("bytes", &graph::StepReport::bytes)
      .def_readonly("pieces", &graph::StepReport::pieces)
      .def_readonly("meets", &graph::StepReport::meets);
  py::class_<graph::StepExplanation>(m, "StepExplanation")
      .def_readonly("kind", &graph::StepExplanation::kind)
      .def_readonly("is_node", &graph::StepExplanation::is_node)
      .def_readonly("is_fixed", &graph::StepExplanation::is_fixed)
      .def_property_readonly("reads",
                             [](const graph::StepExplanation& step) { return held_of(step.reads); })
      .def_property_readonly(
          "writes", [](const graph::StepExplanation& step) { return held_of(step.writes); })
      .def_property_readonly(
          "rivals",
          [](const graph::StepExplanation& step) {
            py::list rivals;
            for (const auto& [name, format, microseconds, refusal] : step.rivals) {
              rivals.append(py::make_tuple(name, format, microseconds, refusal));
            }
            return rivals;
          })
      .def_readonly("formats", &graph::StepExplanation::formats);
  // Kernels and planning run without the GIL. For shapes, planning may call ops written in Python,
  // which take the GIL again.
  const auto without_gil = [](auto method) {
    return [method](Compiled& compiled, const Inputs& inputs) {
      const py::gil_scoped_release no_gil;
      return (compiled.*method)(inputs.given);
    };
  };
  py::class_<Compiled>(m, "Compiled")
      .def(py::init([](const py::object& capture, const py::object& tune, std::string tuning_file,
                       const Times& times, std::shared_ptr<graph::Weights> weights,
                       std::function<void(const std::string&)> told, const std::string& computes,
                       std::vector<std::string> keep) {
        graph::Tuner tuner(timing_of(tune), std::move(tuning_file), known_of(times),
                           std::move(told));
        return std::make_unique<Compiled>(graph_of(capture), std::move(tuner), std::move(weights),
                                          computes_of(computes), std::move(keep));
      }))
      .def("check_sizes", &Compiled::check_sizes, py::call_guard<py::gil_scoped_release>())
      .def("check_unknown", &Compiled::check_unknown, py::call_guard<py::gil_scoped_release>())
      .def(
          "times", [](Compiled& compiled) { return times_of(compiled.times()); },
          py::call_guard<py::gil_scoped_release>())
      .def("__call__", without_gil(&Compiled::operator()))
      .def("by_ops", without_gil(&Compiled::by_ops))
      .def("covers", without_gil(&Compiled::covers))
      .def("add_covered", without_gil(&Compiled::add_covered))
      .def("prepare", without_gil(&Compiled::prepare))
      .def("report", without_gil(&Compiled::report))
      .def("types", without_gil(&Compiled::types))
      .def("results",
           [](Compiled& compiled, const Inputs& inputs) {
             std::vector<Compiled::Result> all;
             {
               const py::gil_scoped_release no_gil;
               all = compiled.results(inputs.given);
             }
             py::list results;
             for (const auto& [step, value, reads, tensor] : all) {
               results.append(py::make_tuple(step, value, reads, tensor));
             }
             return results;
           })
      .def("outline", without_gil(&Compiled::outline))
      .def("explain", without_gil(&Compiled::explain))
      .def("arena_bytes", without_gil(&Compiled::arena_bytes))
      .def("first_difference",
           [](Compiled& compiled, const Inputs& inputs, double tolerance) {
             const py::gil_scoped_release no_gil;
             return compiled.first_difference(inputs.given, tolerance);
           })
      .def("by_estimates", without_gil(&Compiled::by_estimates))
      .def("forget_plans", &Compiled::forget_plans, py::call_guard<py::gil_scoped_release>())
      .def("compute_as_captured", &Compiled::compute_as_captured,
           py::call_guard<py::gil_scoped_release>())
      .def("release", &Compiled::release, py::call_guard<py::gil_scoped_release>());
}

}  // namespace torch_blocked
