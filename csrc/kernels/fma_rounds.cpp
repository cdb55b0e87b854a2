#include "kernels/vector/lanes.h"

namespace torch_blocked::kernels::CPU_CAPABILITY {

// 12 chains hide a latency of 4 or 5 cycles at 2 FMAs a cycle, and fit in 16 registers.
std::int64_t fma_rounds(std::int64_t rounds) {
  constexpr int kChains = 12;
  Vec sum[kChains];
  for (Vec& each : sum) each = Vec(0.f);
  Vec factor(0.5f);
  for (std::int64_t round = 0; round < rounds; ++round) {
#pragma GCC unroll 16
    for (int i = 0; i < kChains; ++i) sum[i] = at::vec::fmadd(sum[i], factor, factor);
  }
  Vec total = sum[0];
  for (int i = 1; i < kChains; ++i) total = total + sum[i];
  // Nobody reads this, but the compiler does not know that, so it keeps the loop.
  [[maybe_unused]] volatile float result[kWidth];
  alignas(64) float lanes[kWidth];
  total.store(lanes);
  for (std::int64_t i = 0; i < kWidth; ++i) result[i] = lanes[i];
  return rounds * kChains * kWidth * 2;
}

}  // namespace torch_blocked::kernels::CPU_CAPABILITY
