// Plans the enlarging and shrinking of images in blocked formats and channels-last.
#pragma once

#include <array>
#include <cstdint>
#include <functional>
#include <optional>

#include "ops/blocked.h"

namespace torch_blocked {

enum class Interpolation : std::uint8_t { kNearest, kNearestExact, kLinear, kCubic };

struct ResamplingProblem {
  Interpolation interpolation;
  Dims src_dims, dst_dims;                      // of 1 to 3 spatial dims
  Format format;                                // of src and dst: channels-last or blocked
  bool align_corners;                           // of kLinear and kCubic
  std::array<std::optional<double>, 3> scales;  // of the dims; none: it follows from the sizes
  at::ScalarType dtype = at::kFloat;            // bfloat16, too; kNearest and kNearestExact: any
};

constexpr bool is_nearest(Interpolation each) {
  return each == Interpolation::kNearest || each == Interpolation::kNearestExact;
}

// A problem made ready to run: a loop of rows, which several threads may go through together.
std::function<void(const void* src, void* dst)> plan_resampling(const ResamplingProblem& problem);

}  // namespace torch_blocked
