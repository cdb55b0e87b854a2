// The b channels of one pixel as SIMD vectors: at::vec at the width of the instruction set.
#pragma once

#include <ATen/cpu/vec/vec.h>

#include <cstdint>

namespace torch_blocked::kernels::CPU_CAPABILITY {

using Vec = at::vec::Vectorized<float>;
inline constexpr std::int64_t kWidth = Vec::size();

// Runs f(offset, count) over the lanes [0, block) in whole vectors, then the rest (block 4, or 8 on
// AVX-512) in one part.
template <typename F>
inline void for_lanes(std::int64_t block, F&& f) {
  std::int64_t lane = 0;
  for (; lane + kWidth <= block; lane += kWidth) f(lane, kWidth);
  if (lane < block) f(lane, block - lane);
}

inline Vec load(const float* src, std::int64_t count) {
  return count == kWidth ? Vec::loadu(src) : Vec::loadu(src, count);
}

inline void store(const Vec& value, float* dst, std::int64_t count) {
  count == kWidth ? value.store(dst) : value.store(dst, static_cast<int>(count));
}

}  // namespace torch_blocked::kernels::CPU_CAPABILITY
