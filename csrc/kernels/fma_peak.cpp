#include "kernels/fma_peak.h"

#include <algorithm>
#include <chrono>
#include <cstdint>

#include "kernels/kernels.h"

namespace torch_blocked {

double fma_peak_gflops() {
  using Clock = std::chrono::steady_clock;
  constexpr std::int64_t kRounds = 20000;  // half a millisecond
  constexpr int kRuns = 20;
  double best = 0;
  for (int run = 0; run < kRuns; ++run) {
    const Clock::time_point start = Clock::now();
    const std::int64_t flops = kernels::kernels().fma_rounds(kRounds);
    const std::chrono::duration<double, std::nano> time = Clock::now() - start;
    best = std::max(best, static_cast<double>(flops) / time.count());
  }
  return best;
}

}  // namespace torch_blocked
