// Sums over N and the spatial dims, one per channel, with the same bits for any number of threads.
// src is float32, or bfloat16 if the CPU has kernels for it. Sums are computed in float32 and
// float64.
#pragma once

#include <vector>

#include "ops/normalization/chunks.h"

namespace torch_blocked {

// One value per channel of the physical tensor, lanes beyond C included: [blocks * block].
using PerLane = std::vector<double>;

inline bool is_bfloat16(const Blocked& src) { return src.physical.scalar_type() == at::kBFloat16; }

// The float32 sum of every channel.
PerLane channel_sums(const Blocked& src);

// Mean and sum of squared deviations from it.
struct Moments {
  PerLane mean, squares;
};
Moments channel_moments(const Blocked& src, BlockRange range);

// The square root of the sum of squares of every channel of every image: [N, blocks, 1..., block].
at::Tensor image_norms(const Blocked& src);

// The same, made ready for dims. All threads go through its loops together, one call at a time.
class ImageNorms {
 public:
  ImageNorms(const Dims& dims, std::int64_t block);
  void operator()(const float* src, float* dst);

 private:
  Chunks chunks_;
  std::vector<float> sums_;  // [chunks, block]
};

// The sums that the gradients of a normalization need: of diff_dst, and of diff_dst * (src - mean).
struct GradientSums {
  PerLane sum, dot;
};
// mean covers all blocks: [blocks * block] of float32.
GradientSums gradient_sums(const Blocked& diff_dst, const Blocked& src, BlockRange range,
                           const float* mean);

}  // namespace torch_blocked
