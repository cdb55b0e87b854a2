#include "kernels/entries.h"
#include "kernels/lanes.h"

namespace torch_blocked::kernels::CPU_CAPABILITY {
namespace {

// The sum of f(pixel) over the pixels. Groups of 16 in 4 accumulators, which hide the latency of an
// addition; the groups with Kahan's correction, so that long sums are as exact as short ones.
template <typename F>
inline Vec sum_over(std::int64_t pixels, F&& f) {
  Vec total(0.f), excess(0.f);  // excess: what rounding added to total
  for (std::int64_t first = 0; first < pixels; first += 16) {
    Vec sums[4] = {Vec(0.f), Vec(0.f), Vec(0.f), Vec(0.f)};
    if (first + 16 <= pixels) {
      for (std::int64_t i = 0; i < 16; ++i) sums[i % 4] = sums[i % 4] + f(first + i);
    } else {
      for (std::int64_t pixel = first; pixel < pixels; ++pixel) sums[0] = sums[0] + f(pixel);
    }
    const Vec group = ((sums[0] + sums[1]) + (sums[2] + sums[3])) - excess;
    const Vec sum = total + group;
    excess = (sum - total) - group;
    total = sum;
  }
  return total;
}

}  // namespace

void sum_pixels(const float* src, std::int64_t block, std::int64_t pixels, float* sum) {
  for_lanes(block, [&](std::int64_t lane, std::int64_t count) {
    const Vec total = sum_over(
        pixels, [&](std::int64_t pixel) { return load(src + pixel * block + lane, count); });
    store(total, sum + lane, count);
  });
}

void moments(const float* src, std::int64_t block, std::int64_t pixels, float* sum,
             float* squares) {
  for_lanes(block, [&](std::int64_t lane, std::int64_t count) {
    const auto value = [&](std::int64_t pixel) { return load(src + pixel * block + lane, count); };
    const Vec total = sum_over(pixels, value);
    store(total, sum + lane, count);
    const Vec mean = total / Vec(static_cast<float>(pixels));
    const Vec around_mean = sum_over(pixels, [&](std::int64_t pixel) {
      const Vec deviation = value(pixel) - mean;
      return deviation * deviation;
    });
    store(around_mean, squares + lane, count);
  });
}

void gradient_sums(const float* diff_dst, const float* src, const float* mean, std::int64_t block,
                   std::int64_t pixels, float* sum, float* dot) {
  for_lanes(block, [&](std::int64_t lane, std::int64_t count) {
    const auto diff = [&](std::int64_t pixel) {
      return load(diff_dst + pixel * block + lane, count);
    };
    const Vec center = load(mean + lane, count);
    store(sum_over(pixels, diff), sum + lane, count);
    const Vec product = sum_over(pixels, [&](std::int64_t pixel) {
      return diff(pixel) * (load(src + pixel * block + lane, count) - center);
    });
    store(product, dot + lane, count);
  });
}

void normalisation_gradient(const float* diff_dst, const float* src, const float* mean,
                            const float* diff_scale, const float* src_scale, const float* shift,
                            float* diff_src, std::int64_t block, std::int64_t pixels,
                            std::int64_t periods, std::int64_t begin, std::int64_t end) {
  for (std::int64_t row = begin; row < end; ++row) {
    const std::int64_t period = row % periods * block, first = row * pixels * block;
    for_lanes(block, [&](std::int64_t lane, std::int64_t count) {
      const Vec a = load(diff_scale + period + lane, count);
      const Vec b = load(src_scale + period + lane, count);
      const Vec c = load(shift + period + lane, count);
      const Vec center = load(mean + period + lane, count);
      for (std::int64_t pixel = 0; pixel < pixels; ++pixel) {
        const std::int64_t offset = first + pixel * block + lane;
        const Vec deviation = load(src + offset, count) - center;
        const Vec diff = at::vec::fmadd(load(diff_dst + offset, count), a, c);
        store(at::vec::fmadd(deviation, b, diff), diff_src + offset, count);
      }
    });
  }
}

}  // namespace torch_blocked::kernels::CPU_CAPABILITY
