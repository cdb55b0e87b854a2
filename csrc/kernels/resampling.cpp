#include "kernels/resampling.h"

#include <algorithm>

#include "kernels/grid_sampler.h"
#include "kernels/lanes.h"
#include "kernels/unrolled.h"

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

// A pixel is kLanes, or t.block if that is 0.
template <int kLanes>
void resample(const PixelTaps& t, const float* src, float* dst) {
  const std::int64_t lanes = kLanes == 0 ? t.block : kLanes;
  for (std::int64_t pixel = 0; pixel < t.pixels; ++pixel, dst += lanes) {
    const std::int64_t* offsets = t.offsets + pixel * t.taps;
    if (t.taps == 1) {
      std::copy_n(src + *offsets, lanes, dst);
      continue;
    }
    const float *a = src + offsets[0], *b = src + offsets[1], *weights = t.weights + pixel * 2;
    const Vec first(weights[0]), second(weights[1]);
    for_lanes(lanes, [&](std::int64_t i, std::int64_t count) {
      store(at::vec::fmadd(load(a + i, count), first, load(b + i, count) * second), dst + i, count);
    });
  }
}

}  // namespace

void resample_row(const PixelTaps& t, const float* src, float* dst) {
  t.block == kWidth ? resample<kWidth>(t, src, dst) : resample<0>(t, src, dst);
}

void weigh_rows(const WeighedRows& w) { w.count == 2 ? weigh<2>(w) : weigh<4>(w); }

}  // namespace torch_blocked::kernels::CPU_CAPABILITY
