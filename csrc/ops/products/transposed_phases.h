// Turns a convolution into ordinary ones: itself, or one for each phase if it is transposed.
#pragma once

#include <ATen/core/Tensor.h>

#include <array>
#include <string>
#include <vector>

#include "ops/convolution_problem.h"
#include "ops/products/phases.h"

namespace torch_blocked {

// Where outputs lie in dst: output o lies at first + o * step of its dims.
struct OutputGrid {
  std::array<std::int64_t, 3> dims, first, step;  // d, h, w
};

struct ConvolutionPhase {
  SpatialSizes sizes;
  OutputGrid grid;
  std::array<PhaseAxis, 3> axes;  // of a transposed one
  bool has_taps;                  // false: its one tap is 0 and sees only padding
};

class ConvolutionPhases {
 public:
  explicit ConvolutionPhases(const ConvolutionProblem& problem);

  const std::vector<ConvolutionPhase>& phases() const { return phases_; }
  bool transposed() const { return transposed_; }
  // Names everything that decides which taps a phase has; empty if it is not transposed.
  const std::string& name() const { return name_; }
  // ATen's weight -> the weight of each phase, [OC, IC / groups, *kernel of the phase].
  std::vector<at::Tensor> weights(const at::Tensor& weight) const;

 private:
  bool transposed_;
  std::int64_t groups_;
  std::string name_;
  std::vector<ConvolutionPhase> phases_;
};

}  // namespace torch_blocked
