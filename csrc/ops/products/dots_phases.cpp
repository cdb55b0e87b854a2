#include "ops/products/dots_phases.h"

#include <ATen/ops/cat.h>

#include "kernels/kernels.h"

namespace torch_blocked {

PhasedDots::PhasedDots(const ConvolutionProblem& problem, DotNumbers numbers, std::uint8_t padding)
    : phases_(problem), vectors_(ceil_div(problem.dst_dims[1], kernels::kernels().width)) {
  std::int64_t weights = 0;
  for (const ConvolutionPhase& phase : phases_.phases()) {
    parts_.push_back({Dots(problem, phase.sizes, numbers, padding, phase.grid), weights});
    weights += parts_.back().dots.packed_bytes();
  }
}

std::string PhasedDots::weights_format() const {
  std::string name = phases_.name();
  for (const Part& part : parts_) name += part.dots.weights_format();
  return name;
}

at::Tensor PhasedDots::pack(const at::Tensor& weight) const {
  const std::vector<at::Tensor> weights = split(weight);
  std::vector<at::Tensor> packed;
  for (std::size_t i = 0; i < parts_.size(); ++i) {
    packed.push_back(parts_[i].dots.pack(weights[i]));
  }
  return packed.size() == 1 ? packed[0] : at::cat(packed);
}

void PhasedDots::run(const Dots::Operands& operands) const {
  Dots::Operands of_part = operands;
  for (const Part& part : parts_) {
    of_part.weights = static_cast<const char*>(operands.weights) + part.weights;
    part.dots.run(of_part);
    of_part.channels += vectors_;
  }
}

}  // namespace torch_blocked
