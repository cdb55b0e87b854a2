#include "ops/dots_phases.h"

#include <ATen/ops/cat.h>
#include <ATen/ops/index_select.h>
#include <ATen/ops/tensor.h>
#include <ATen/ops/zeros.h>

#include "format/errors.h"
#include "kernels/kernels.h"

namespace torch_blocked {

PhasedDots::PhasedDots(const ConvolutionProblem& problem, DotNumbers numbers, std::uint8_t padding)
    : transposed_(problem.transposed),
      groups_(problem.groups),
      vectors_(ceil_div(problem.dst_dims[1], kernels::kernels().width)) {
  const SpatialSizes sizes = spatial_sizes(problem);
  if (!transposed_) {
    phases_.push_back({.dots = Dots(problem, sizes, numbers, padding),
                       .axes = {},
                       .has_taps = true,
                       .weights = 0});
    return;
  }
  geometry_ = text("/transposed", problem.stride, problem.padding, problem.dilation);
  const auto [planes, rows, columns] = sizes.stride;
  for (std::int64_t i = 0; i < planes * rows * columns; ++i) {
    add_phase(problem, sizes, {i / columns / rows, i / columns % rows, i % columns}, numbers,
              padding);
  }
}

void PhasedDots::add_phase(const ConvolutionProblem& problem, const SpatialSizes& whole,
                           const Sizes3& rests, DotNumbers numbers, std::uint8_t padding) {
  std::array<PhaseAxis, 3> axes;
  bool has_taps = true;
  for (std::size_t i = 0; i < 3; ++i) {
    const Window window{whole.kernel[i], whole.stride[i], whole.padding[i], whole.dilation[i]};
    const auto axis = phase_axis(window, whole.out[i], rests[i]);
    has_taps &= axis.has_value();
    axes[i] =
        axis.value_or(PhaseAxis{ceil_div(whole.out[i] - rests[i], whole.stride[i]), 1, 0, 1, 0, 1});
  }
  SpatialSizes sizes = whole;
  for (std::size_t i = 0; i < 3; ++i) {
    if (!has_taps) axes[i] = {axes[i].outputs, 1, 0, 1, 0, 1};
    sizes.out[i] = axes[i].outputs;
    sizes.kernel[i] = axes[i].kernel;
    sizes.stride[i] = 1;
    sizes.padding[i] = axes[i].padding;
    sizes.dilation[i] = axes[i].dilation;
  }
  const std::int64_t weights =
      phases_.empty() ? 0 : phases_.back().weights + phases_.back().dots.packed_bytes();
  Dots dots(problem, sizes, numbers, padding, {whole.out, rests, whole.stride});
  phases_.push_back({std::move(dots), axes, has_taps, weights});
}

std::string PhasedDots::weights_format() const {
  std::string name = geometry_;
  for (const Phase& phase : phases_) name += phase.dots.weights_format();
  return name;
}

std::vector<at::Tensor> PhasedDots::split(const at::Tensor& weight) const {
  if (!transposed_) return {weight};
  // [IC, OC / groups, *kernel] -> [OC, IC / groups, d, h, w]
  const Sizes3 kernel = as_3d(weight.sizes().slice(2), 1);
  const std::int64_t inputs = weight.size(0) / groups_, outputs = weight.size(1);
  const at::Tensor whole =
      weight.reshape({groups_, inputs, outputs, kernel[0], kernel[1], kernel[2]})
          .transpose(1, 2)
          .reshape({groups_ * outputs, inputs, kernel[0], kernel[1], kernel[2]});
  std::vector<at::Tensor> parts;
  for (const Phase& phase : phases_) {
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

at::Tensor PhasedDots::pack(const at::Tensor& weight) const {
  const std::vector<at::Tensor> parts = split(weight);
  std::vector<at::Tensor> packed;
  for (std::size_t i = 0; i < parts.size(); ++i) {
    packed.push_back(phases_[i].dots.pack(parts[i]));
  }
  return packed.size() == 1 ? packed[0] : at::cat(packed);
}

void PhasedDots::run(const Dots::Operands& operands) const {
  for (std::size_t i = 0; i < phases_.size(); ++i) {
    Dots::Operands of_phase = operands;
    of_phase.weights = static_cast<const char*>(operands.weights) + phases_[i].weights;
    of_phase.channels += static_cast<std::int64_t>(i) * vectors_;
    phases_[i].dots.run(of_phase);
  }
}

}  // namespace torch_blocked
