// Resamples rows along w by 1, 2 or 4 taps a pixel, and adds weighted rows.
#include "kernels/images/resampling.h"

#include <algorithm>

#include "kernels/images/grid_sampler.h"
#include "kernels/vector/lanes.h"
#include "kernels/vector/unrolled.h"

namespace torch_blocked::kernels::CPU_CAPABILITY {
namespace {

template <int kRows>
void weigh(const WeighedRows& w) {
  Vec weights[kRows];
  for (std::size_t row = 0; row < kRows; ++row) weights[row] = Vec(w.weights[row]);
  for_lanes(w.length, [&](std::int64_t i, std::int64_t count) {
    Vec sum = load(w.rows[0] + i, count) * weights[0];
    unrolled<kRows - 1>([&]<int row>() {
      sum = at::vec::fmadd(load(w.rows[row + 1] + i, count), weights[row + 1], sum);
    });
    store(sum, w.dst + i, count);
  });
}

// A pixel has kLanes lanes, or t.block lanes if kLanes is 0.
template <int kLanes, int kTaps>
void resample(const PixelTaps& t, const float* src, float* dst) {
  const std::int64_t lanes = kLanes == 0 ? t.block : kLanes;
  for (std::int64_t pixel = 0; pixel < t.pixels; ++pixel, dst += lanes) {
    const std::int64_t* offsets = t.offsets + pixel * kTaps;
    if constexpr (kTaps == 1) {
      std::copy_n(src + *offsets, lanes, dst);
      continue;
    }
    const float* last = src + offsets[kTaps - 1];
    Vec weights[kTaps];
    unrolled<kTaps>([&]<int tap>() { weights[tap] = Vec(t.weights[pixel * kTaps + tap]); });
    for_lanes(lanes, [&](std::int64_t i, std::int64_t count) {
      Vec sum = load(last + i, count) * weights[kTaps - 1];
      unrolled<kTaps - 1>([&]<int tap>() {
        sum = at::vec::fmadd(load(src + offsets[tap] + i, count), weights[tap], sum);
      });
      store(sum, dst + i, count);
    });
  }
}

template <int kLanes>
void resample(const PixelTaps& t, const float* src, float* dst) {
  switch (t.taps) {
    case 1:
      return resample<kLanes, 1>(t, src, dst);
    case 2:
      return resample<kLanes, 2>(t, src, dst);
    default:
      return resample<kLanes, 4>(t, src, dst);
  }
}

}  // namespace

void resample_row(const PixelTaps& t, const float* src, float* dst) {
  t.block == kWidth ? resample<kWidth>(t, src, dst) : resample<0>(t, src, dst);
}

void weigh_rows(const WeighedRows& w) { w.count == 2 ? weigh<2>(w) : weigh<4>(w); }

}  // namespace torch_blocked::kernels::CPU_CAPABILITY
