#include "kernels/images/squeeze_excite.h"

#include <algorithm>

#include "kernels/vector/finish.h"

namespace torch_blocked::kernels::CPU_CAPABILITY {
namespace {

Vec opened(Gate gate, const Vec& x) {
  if (gate == Gate::kSigmoid) return times_sigmoid(Vec(1.f), x);
  const Vec clamped = at::vec::clamp(x + Vec(3.f), Vec(0.f), Vec(6.f));
  return clamped * Vec(1.f / 6);
}

// dst [pixels, block] = finish(src * gate), vector by vector.
template <typename F>
inline void for_pixels(const GatedPixels& pixels, const F& finish) {
  const GatedPixels p = pixels;  // a copy, whose fields stay in registers
  for_lanes(p.block, [&](std::int64_t lane, std::int64_t count) {
    // The tail's gates are not read: they may be NaN, and 0 * NaN would not stay 0.
    const std::int64_t known = std::clamp<std::int64_t>(p.channels - lane, 0, count);
    const Vec gate = opened(p.gate, load(p.gates + lane, known));
    for (std::int64_t pixel = 0; pixel < p.pixels; ++pixel) {
      const std::int64_t at = pixel * p.block + lane;
      store(finish(load(p.src + at, count) * gate, p.dst + at, count), p.dst + at, count);
    }
  });
}

}  // namespace

void gate_pixels(const GatedPixels& p) {
  with_finish(p.epilogue, p.residual, p.dst, [&](const auto& finish) { for_pixels(p, finish); });
}

}  // namespace torch_blocked::kernels::CPU_CAPABILITY
