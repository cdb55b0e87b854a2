// Python bindings for memory with descriptors: reorders, and which formats an implementation wants.
// torch_blocked/memory.py and torch_blocked/wanted_formats.py wrap them for users.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/utils/pybind.h>

#include "format/errors.h"
#include "ops/moving/memory_reorder.h"
#include "ops/wanted_formats.h"

namespace torch_blocked {

namespace py = pybind11;

void bind_memory(py::module_& m) {
  using namespace py::literals;
  m.def(
      "reorder",
      [](const Descriptor& src, const at::Tensor& src_bytes, const Descriptor& dst,
         const at::Tensor& dst_bytes) { reorder_memory({src, src_bytes}, {dst, dst_bytes}); },
      "src"_a, "src_bytes"_a, "dst"_a, "dst_bytes"_a, py::call_guard<py::gil_scoped_release>());
  py::class_<WantedFormats>(m, "WantedFormats")
      .def_readonly("implementation", &WantedFormats::implementation)
      .def_readonly("src", &WantedFormats::src)
      .def_readonly("weights", &WantedFormats::weights)
      .def_readonly("dst", &WantedFormats::dst);
  m.def(
      "convolution_wants",
      [](const Dims& src_dims, const at::Tensor& weight, const std::optional<at::Tensor>& bias,
         const Dims& stride, const Dims& padding, const Dims& dilation, bool transposed,
         const Dims& output_padding, std::int64_t groups,
         const std::optional<std::string>& implementation) {
        if (src_dims.size() < 3 || src_dims.size() > 5)
          fail_value("wanted_formats", "an input [N, C, *spatial] of 3 to 5 dims", text(src_dims),
                     "add a batch of 1");
        const auto problem = convolution_problem(
            src_dims, Format::blocked(Format::kBlocks[1]), weight, bias.value_or(at::Tensor()),
            stride, padding, dilation, transposed, output_padding, groups);
        return wanted_formats(problem, implementation);
      },
      "src_dims"_a, "weight"_a, "bias"_a, "stride"_a, "padding"_a, "dilation"_a, "transposed"_a,
      "output_padding"_a, "groups"_a, "implementation"_a);
  m.def(
      "linear_wants",
      [](std::int64_t rows, std::int64_t inputs, std::int64_t outputs, bool has_bias,
         const std::optional<std::string>& implementation) {
        return wanted_formats(LinearProblem{rows, inputs, outputs, has_bias, {}}, implementation);
      },
      "rows"_a, "inputs"_a, "outputs"_a, "has_bias"_a, "implementation"_a);
}

}  // namespace torch_blocked
