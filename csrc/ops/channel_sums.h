// Sums over N and the spatial dims, one per channel, the same bits for any number of threads.
#pragma once

#include <vector>

#include "ops/blocked.h"

namespace torch_blocked {

// One value per channel of the physical tensor, lanes beyond C included: [blocks * block].
using PerLane = std::vector<double>;

// The float32 sum of every channel.
PerLane channel_sums(const Blocked& src);

// Mean and sum of squared deviations from it.
struct Moments {
  PerLane mean, squares;
};
Moments channel_moments(const Blocked& src);

// The sums that the gradients of a normalisation need: of diff_dst, and of diff_dst * (src - mean).
struct GradientSums {
  PerLane sum, dot;
};
// mean: [blocks * block] of float32.
GradientSums gradient_sums(const Blocked& diff_dst, const Blocked& src, const float* mean);

}  // namespace torch_blocked
