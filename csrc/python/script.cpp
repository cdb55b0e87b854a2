// torch_blocked._C.ScriptState: the attributes of a TorchScript module.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>
#include <torch/csrc/jit/api/module.h>

#include "graph/capture/script_state.h"

namespace py = pybind11;

namespace torch_blocked {

void bind_script(py::module_& m) {
  using graph::ScriptState;
  py::class_<ScriptState>(m, "ScriptState")
      .def(py::init([](const torch::jit::Module& module) {
        return std::make_unique<ScriptState>(module._ivalue());
      }))
      .def("changes", &ScriptState::changes)
      .def("restore", &ScriptState::restore);
}

}  // namespace torch_blocked
