#include "kernels/concat.h"

#include "kernels/lanes.h"

namespace torch_blocked::kernels::CPU_CAPABILITY {
namespace {

// Pixels [begin, end) one element at a time: the ends, where a shifted vector would leave src.
void copy_pixels(const LaneCopy& p, std::int64_t begin, std::int64_t end) {
  for (std::int64_t pixel = begin; pixel < end; ++pixel) {
    for (std::int64_t i = 0; i < p.count; ++i) {
      p.dst[pixel * p.block + p.dst_lane + i] = p.src[pixel * p.block + p.src_lane + i];
    }
  }
}

}  // namespace

void copy_lanes(const LaneCopy& copy) {
  // A copy, whose fields stay in registers: through a reference, stores to memory might change
  // them.
  const LaneCopy p = copy;
  // Lane j of dst takes src[j + shift]. For lanes outside the mask that may be the pixel before or
  // the pixel after, which the first and the last pixel do not have.
  const std::int64_t shift = p.src_lane - p.dst_lane;
  if (p.pixels <= 2 || p.block % kWidth != 0) return copy_pixels(p, 0, p.pixels);
  copy_pixels(p, 0, 1);
  for_lanes(p.block, [&](std::int64_t lane, std::int64_t) {
    float in_range[kWidth];
    for (std::int64_t j = 0; j < kWidth; ++j) {
      in_range[j] = lane + j >= p.dst_lane && lane + j < p.dst_lane + p.count ? 1.f : 0.f;
    }
    const Vec mask = Vec::loadu(in_range) > Vec(0.f);
    for (std::int64_t pixel = 1; pixel < p.pixels - 1; ++pixel) {
      const std::int64_t offset = pixel * p.block + lane;
      const Vec kept = Vec::loadu(p.dst + offset);
      Vec::blendv(kept, Vec::loadu(p.src + offset + shift), mask).store(p.dst + offset);
    }
  });
  copy_pixels(p, p.pixels - 1, p.pixels);
}

}  // namespace torch_blocked::kernels::CPU_CAPABILITY
