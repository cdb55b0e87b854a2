// 1x1 convolution of planes. Lanes are pixels, so no lane is empty, however few channels there are.
// Some pixels of all src channels stay in L1 while all dst channels are made from them.
#include "kernels/direct/planes.h"

#include <algorithm>
#include <array>
#include <utility>

#include "kernels/vector/finish.h"
#include "kernels/vector/unrolled.h"

namespace torch_blocked::kernels::CPU_CAPABILITY {
namespace {

// The sums of a register tile: 4 channels by kVectors vectors of pixels. The 16 or 32 registers
// also hold the vectors of one src channel and a weight.
constexpr int kChannels = 4, kVectors = sizeof(Vec) == 64 ? 4 : 2;

// Makes kRows channels from `oc` on for `lanes` pixels from `at` on. The last vector may be partly
// filled.
template <int kRows, typename Finish>
void mix_tile(const MixedPlanes& p, const Finish& finish, std::int64_t oc, std::int64_t at,
              std::int64_t lanes) {
  const auto in = [&](int j) { return std::clamp<std::int64_t>(lanes - j * kWidth, 0, kWidth); };
  Vec sums[kRows][kVectors];
  unrolled<kRows>([&]<int i>() {
    const Vec start(p.bias ? p.bias[oc + i] : 0.f);
    unrolled<kVectors>([&]<int j>() { sums[i][j] = start; });
  });
  const float *src = p.src + at, *weights = p.weights + oc * p.ic;
  for (std::int64_t ic = 0; ic < p.ic; ++ic, src += p.pixels) {
    Vec x[kVectors];
    unrolled<kVectors>([&]<int j>() { x[j] = load(src + j * kWidth, in(j)); });
    unrolled<kRows>([&]<int i>() {
      const Vec w(weights[i * p.ic + ic]);
      unrolled<kVectors>([&]<int j>() { sums[i][j] = at::vec::fmadd(w, x[j], sums[i][j]); });
    });
  }
  unrolled<kRows>([&]<int i>() {
    float* dst = p.dst + (oc + i) * p.pixels + at;
    unrolled<kVectors>([&]<int j>() {
      if (in(j) > 0) store(finish(sums[i][j], dst + j * kWidth, in(j)), dst + j * kWidth, in(j));
    });
  });
}

template <typename Finish, int... i>
constexpr auto tiles_of(std::integer_sequence<int, i...>) {
  return std::array{mix_tile<i + 1, Finish>...};
}

template <typename Finish>
void mix(const MixedPlanes& p, const Finish& finish, std::int64_t begin, std::int64_t end) {
  static constexpr auto kTiles = tiles_of<Finish>(std::make_integer_sequence<int, kChannels>());
  for (std::int64_t at = begin; at < end; at += kVectors * kWidth) {
    const std::int64_t lanes = std::min(kVectors * kWidth, end - at);
    for (std::int64_t oc = 0; oc < p.oc; oc += kChannels) {
      const std::int64_t rows = std::min<std::int64_t>(kChannels, p.oc - oc);
      kTiles[static_cast<std::size_t>(rows - 1)](p, finish, oc, at, lanes);
    }
  }
}

}  // namespace

void mix_planes(const MixedPlanes& p, std::int64_t begin, std::int64_t end) {
  with_finish(p.epilogue, p.residual, p.dst,
              [&](const auto& finish) { mix(p, finish, begin, end); });
}

}  // namespace torch_blocked::kernels::CPU_CAPABILITY
