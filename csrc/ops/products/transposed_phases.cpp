// Splits a transposed convolution into the ordinary convolutions of its phases, and its weight
// likewise.
#include "ops/products/transposed_phases.h"

#include <ATen/ops/index_select.h>
#include <ATen/ops/tensor.h>
#include <ATen/ops/zeros.h>

#include "format/errors.h"
#include "format/sizes.h"

namespace torch_blocked {
namespace {

using Sizes3 = std::array<std::int64_t, 3>;

ConvolutionPhase phase_of(const SpatialSizes& whole, const Sizes3& rests) {
  ConvolutionPhase phase{
      .sizes = whole, .grid = {whole.out, rests, whole.stride}, .axes = {}, .has_taps = true};
  std::array<std::optional<PhaseAxis>, 3> axes;
  for (std::size_t i = 0; i < 3; ++i) {
    const Window window{whole.kernel[i], whole.stride[i], whole.padding[i], whole.dilation[i]};
    axes[i] = phase_axis(window, whole.out[i], rests[i]);
    phase.has_taps &= axes[i].has_value();
  }
  for (std::size_t i = 0; i < 3; ++i) {
    // The one tap must see only padding, because 0 times a NaN of src is not 0.
    const std::int64_t outputs = ceil_div(whole.out[i] - rests[i], whole.stride[i]);
    const PhaseAxis bare{outputs, 1, outputs, 1, 0, 1};
    const PhaseAxis& axis = phase.axes[i] = phase.has_taps ? *axes[i] : bare;
    phase.sizes.out[i] = axis.outputs;
    phase.sizes.kernel[i] = axis.kernel;
    phase.sizes.stride[i] = 1;
    phase.sizes.padding[i] = axis.padding;
    phase.sizes.dilation[i] = axis.dilation;
  }
  return phase;
}

}  // namespace

ConvolutionPhases::ConvolutionPhases(const ConvolutionProblem& problem)
    : transposed_(problem.transposed), groups_(problem.groups) {
  const SpatialSizes sizes = spatial_sizes(problem);
  if (!transposed_) {
    const OutputGrid all{sizes.out, {0, 0, 0}, {1, 1, 1}};
    phases_.push_back({.sizes = sizes, .grid = all, .axes = {}, .has_taps = true});
    return;
  }
  name_ = text("/transposed", problem.stride, problem.padding, problem.dilation);
  const auto [planes, rows, columns] = sizes.stride;
  for (std::int64_t i = 0; i < planes * rows * columns; ++i) {
    phases_.push_back(phase_of(sizes, {i / columns / rows, i / columns % rows, i % columns}));
  }
}

std::vector<at::Tensor> ConvolutionPhases::weights(const at::Tensor& weight) const {
  if (!transposed_) return {weight};
  // [IC, OC / groups, *kernel] -> [OC, IC / groups, d, h, w]
  const Sizes3 kernel = as_3d(weight.sizes().slice(2), 1);
  const std::int64_t inputs = weight.size(0) / groups_, outputs = weight.size(1);
  const at::Tensor whole =
      weight.reshape({groups_, inputs, outputs, kernel[0], kernel[1], kernel[2]})
          .transpose(1, 2)
          .reshape({groups_ * outputs, inputs, kernel[0], kernel[1], kernel[2]});
  std::vector<at::Tensor> parts;
  for (const ConvolutionPhase& phase : phases_) {
    if (!phase.has_taps) {
      parts.push_back(at::zeros({whole.size(0), inputs, 1, 1, 1}, weight.options()));
      continue;
    }
    at::Tensor part = whole;
    for (std::size_t i = 0; i < 3; ++i) {
      std::vector<std::int64_t> taps;
      for (std::int64_t k = 0; k < phase.axes[i].kernel; ++k) {
        taps.push_back(phase.axes[i].tap_first + k * phase.axes[i].tap_step);
      }
      part = part.index_select(static_cast<std::int64_t>(2 + i), at::tensor(taps));
    }
    parts.push_back(part);
  }
  return parts;
}

}  // namespace torch_blocked
