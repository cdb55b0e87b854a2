#include "kernels/images/grid_sampler.h"

#include "kernels/vector/lanes.h"

namespace torch_blocked::kernels::CPU_CAPABILITY {

void sample_pixels(const PixelTaps& t, const float* src, float* dst) {
  for (std::int64_t pixel = 0; pixel < t.pixels; ++pixel) {
    const std::int64_t first = pixel * t.taps;
    for_lanes(t.block, [&](std::int64_t lane, std::int64_t count) {
      Vec sum(0.f);
      for (std::int64_t tap = first; tap < first + t.taps; ++tap) {
        if (t.offsets[tap] < 0) continue;
        const Vec value = load(src + t.offsets[tap] + lane, count);
        sum = at::vec::fmadd(value, Vec(t.weights[tap]), sum);
      }
      store(sum, dst + pixel * t.block + lane, count);
    });
  }
}

void spread_pixels(const PixelTaps& t, const float* diff_dst, float* diff_src) {
  for (std::int64_t pixel = 0; pixel < t.pixels; ++pixel) {
    const std::int64_t first = pixel * t.taps;
    for_lanes(t.block, [&](std::int64_t lane, std::int64_t count) {
      const Vec diff = load(diff_dst + pixel * t.block + lane, count);
      for (std::int64_t tap = first; tap < first + t.taps; ++tap) {
        if (t.offsets[tap] < 0) continue;
        float* at = diff_src + t.offsets[tap] + lane;
        store(at::vec::fmadd(diff, Vec(t.weights[tap]), load(at, count)), at, count);
      }
    });
  }
}

void dot_pixels(const PixelTaps& t, const float* diff_dst, const float* src, float* dots) {
  for (std::int64_t pixel = 0; pixel < t.pixels; ++pixel) {
    const float* diff = diff_dst + pixel * t.block;
    for (std::int64_t tap = pixel * t.taps; tap < (pixel + 1) * t.taps; ++tap) {
      if (t.offsets[tap] < 0) continue;
      const float* value = src + t.offsets[tap];
      float products[32];  // the widest block
      for_lanes(t.block, [&](std::int64_t lane, std::int64_t count) {
        store(load(diff + lane, count) * load(value + lane, count), products + lane, count);
      });
      for (std::int64_t half = t.block / 2; half > 0; half /= 2) {
        for (std::int64_t lane = 0; lane < half; ++lane) products[lane] += products[lane + half];
      }
      dots[tap] += products[0];
    }
  }
}

}  // namespace torch_blocked::kernels::CPU_CAPABILITY
