#include "runtime/bandwidth.h"

#include <algorithm>
#include <chrono>
#include <cstring>
#include <vector>

#include "torch_blocked/threads.h"

namespace torch_blocked {

double memory_bandwidth_gbs() {
  constexpr std::int64_t kPiece = std::int64_t{1} << 18, kPieces = 512;
  constexpr int kRounds = 5;
  std::vector<char> src(kPiece * kPieces, 1), dst(kPiece * kPieces);
  double fastest = 0;
  for (int round = 0; round < kRounds; ++round) {
    const auto start = std::chrono::steady_clock::now();
    parallel_units(kPieces, kPiece, [&](std::int64_t begin, std::int64_t end) {
      std::memcpy(dst.data() + begin * kPiece, src.data() + begin * kPiece,
                  static_cast<std::size_t>((end - begin) * kPiece));
    });
    const std::chrono::duration<double> time = std::chrono::steady_clock::now() - start;
    fastest = std::max(fastest, 2e-9 * static_cast<double>(kPiece * kPieces) / time.count());
  }
  return fastest;
}

}  // namespace torch_blocked
