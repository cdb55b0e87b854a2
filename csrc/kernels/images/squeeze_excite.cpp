#include "kernels/images/squeeze_excite.h"

#include <algorithm>

#include "kernels/vector/finish.h"
#include "kernels/vector/short_lanes.h"

namespace torch_blocked::kernels::CPU_CAPABILITY {
namespace {

Vec opened(Gate gate, const Vec& x) {
  if (gate == Gate::kSigmoid) return times_sigmoid(Vec(1.f), x);
  const Vec clamped = at::vec::clamp(x + Vec(3.f), Vec(0.f), Vec(6.f));
  return clamped * Vec(1.f / 6);
}

// dst [pixels, block] = finish(src * gate), vector by vector.
template <typename Number, typename F>
inline void for_pixels(const GatedPixels& pixels, const F& finish) {
  const GatedPixels p = pixels;  // a copy, whose fields stay in registers
  const auto* src = static_cast<const Number*>(p.src);
  auto* dst = static_cast<Number*>(p.dst);
  for_lanes(p.block, [&](std::int64_t lane, std::int64_t count) {
    // The tail's gates are not read: they may be NaN, and 0 * NaN would not stay 0.
    const std::int64_t known = std::clamp<std::int64_t>(p.channels - lane, 0, count);
    const Vec gate = opened(p.gate, load(p.gates + lane, known));
    for (std::int64_t pixel = 0; pixel < p.pixels; ++pixel) {
      const std::int64_t at = pixel * p.block + lane;
      store(finish(load(src + at, count) * gate, dst + at, count), dst + at, count);
    }
  });
}

template <typename Number>
void gate_all(const GatedPixels& p) {
  with_finish<Number>(p.epilogue, p.residual, p.dst,
                      [&](const auto& finish) { for_pixels<Number>(p, finish); });
}

}  // namespace

void gate_pixels(const GatedPixels& p) { gate_all<float>(p); }
void gate_pixels_bfloats(const GatedPixels& p) { gate_all<std::uint16_t>(p); }

}  // namespace torch_blocked::kernels::CPU_CAPABILITY
