// Runs any convolution by Dots: an ordinary one by one Dots, a transposed one by one for each
// phase.
#pragma once

#include <vector>

#include "ops/products/dots.h"
#include "ops/products/transposed_phases.h"

namespace torch_blocked {

class PhasedDots {
 public:
  PhasedDots(const ConvolutionProblem& problem, DotNumbers numbers, std::uint8_t padding);

  // Names the format that pack() makes.
  std::string weights_format() const;
  // ATen's weight -> the weight of each phase, [OC, IC / groups, *kernel of the phase].
  std::vector<at::Tensor> split(const at::Tensor& weight) const { return phases_.weights(weight); }
  // The packed weights of all phases, one after the other.
  at::Tensor pack(const at::Tensor& weight) const;

  // `operands.channels` has all output channels of the first phase, then of the next.
  void run(const Dots::Operands& operands) const;

  std::int64_t phases() const { return std::ssize(parts_); }
  // What runs a few rows at a time; null for a transposed convolution.
  const Dots* ordinary() const { return phases_.transposed() ? nullptr : &parts_.front().dots; }

 private:
  struct Part {
    Dots dots;
    std::int64_t weights;  // the offset of its weights
  };

  ConvolutionPhases phases_;
  std::int64_t vectors_;  // of output channels
  std::vector<Part> parts_;
};

}  // namespace torch_blocked
