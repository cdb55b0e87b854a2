// Any convolution by Dots: an ordinary one is one of them, a transposed one is one for each phase.
#pragma once

#include <vector>

#include "ops/products/dots.h"
#include "ops/products/transposed_phases.h"

namespace torch_blocked {

class PhasedDots {
 public:
  PhasedDots(const ConvolutionProblem& problem, DotNumbers numbers, std::uint8_t padding);

  // Tells what pack() makes from what it makes for others.
  std::string weights_format() const;
  // ATen's weight -> that of each phase, [OC, IC / groups, *kernel of the phase].
  std::vector<at::Tensor> split(const at::Tensor& weight) const { return phases_.weights(weight); }
  // The packed weights of all phases, one after the other.
  at::Tensor pack(const at::Tensor& weight) const;

  // The channels of `operands` are those of all output channels, phase after phase.
  void run(const Dots::Operands& operands) const;

  std::int64_t phases() const { return std::ssize(parts_); }
  // What rows of it run by; null where it has phases.
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
