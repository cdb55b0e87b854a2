// Sums over N and the spatial dims, one per channel, the same bits for any number of threads. src
// is float32, or bfloat16 where the CPU has kernels for it; sums are of float32 and float64.
#pragma once

#include <vector>

#include "ops/blocked.h"

namespace torch_blocked {

// One value per channel of the physical tensor, lanes beyond C included: [blocks * block].
using PerLane = std::vector<double>;

// Consecutive channel blocks, of all images. Sums over a range have [count * block] values, which
// are the same bits in whatever range a block lies.
struct BlockRange {
  std::int64_t first, count;
};
inline BlockRange all_blocks(const Blocked& src) { return {0, src.blocks()}; }

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

// The sums that the gradients of a normalization need: of diff_dst, and of diff_dst * (src - mean).
struct GradientSums {
  PerLane sum, dot;
};
// mean: of all blocks, [blocks * block] of float32.
GradientSums gradient_sums(const Blocked& diff_dst, const Blocked& src, BlockRange range,
                           const float* mean);

}  // namespace torch_blocked
