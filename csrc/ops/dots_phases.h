// Any convolution by Dots: an ordinary one is one of them, a transposed one is one for each phase.
#pragma once

#include <vector>

#include "ops/dots.h"

namespace torch_blocked {

class PhasedDots {
 public:
  PhasedDots(const ConvolutionProblem& problem, DotNumbers numbers, std::uint8_t padding);

  // Tells what pack() makes from what it makes for others.
  std::string weights_format() const;
  // ATen's weight -> that of each phase, [OC, IC / groups, *kernel of the phase].
  std::vector<at::Tensor> split(const at::Tensor& weight) const;
  // The packed weights of all phases, one after the other.
  at::Tensor pack(const at::Tensor& weight) const;

  // The channels of `operands` are those of all output channels, phase after phase.
  void run(const Dots::Operands& operands) const;

  std::int64_t phases() const { return std::ssize(phases_); }
  // What rows of it run by; null where it has phases.
  const Dots* ordinary() const { return transposed_ ? nullptr : &phases_.front().dots; }

 private:
  struct Phase {
    Dots dots;
    std::array<PhaseAxis, 3> axes;
    bool has_taps;         // else its one tap is 0
    std::int64_t weights;  // the offset of its weights
  };
  void add_phase(const ConvolutionProblem& problem, const SpatialSizes& sizes, const Sizes3& rests,
                 DotNumbers numbers, std::uint8_t padding);

  bool transposed_;
  std::int64_t groups_, vectors_;  // of the convolution; of output channels
  std::string geometry_;
  std::vector<Phase> phases_;
};

}  // namespace torch_blocked
