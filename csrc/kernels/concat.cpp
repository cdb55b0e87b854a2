#include "kernels/entries.h"
#include "kernels/lanes.h"

namespace torch_blocked::kernels::CPU_CAPABILITY {
namespace {

// Pixels [begin, end) one element at a time: the ends, where a shifted vector would leave src.
void copy_pixels(const float* src, float* dst, std::int64_t block, std::int64_t src_lane,
                 std::int64_t dst_lane, std::int64_t count, std::int64_t begin, std::int64_t end) {
  for (std::int64_t pixel = begin; pixel < end; ++pixel) {
    for (std::int64_t i = 0; i < count; ++i) {
      dst[pixel * block + dst_lane + i] = src[pixel * block + src_lane + i];
    }
  }
}

}  // namespace

void copy_lanes(const float* src, float* dst, std::int64_t block, std::int64_t pixels,
                std::int64_t src_lane, std::int64_t dst_lane, std::int64_t count) {
  // Lane j of dst takes src[j + shift], which for the lanes outside the mask may lie in the next or
  // the last pixel: legal for all but the first and the last pixel.
  const std::int64_t shift = src_lane - dst_lane;
  if (pixels <= 2 || block % kWidth != 0) {
    copy_pixels(src, dst, block, src_lane, dst_lane, count, 0, pixels);
    return;
  }
  copy_pixels(src, dst, block, src_lane, dst_lane, count, 0, 1);
  for_lanes(block, [&](std::int64_t lane, std::int64_t) {
    float in_range[kWidth];
    for (std::int64_t j = 0; j < kWidth; ++j) {
      in_range[j] = lane + j >= dst_lane && lane + j < dst_lane + count ? 1.f : 0.f;
    }
    const Vec mask = Vec::loadu(in_range) > Vec(0.f);
    for (std::int64_t pixel = 1; pixel < pixels - 1; ++pixel) {
      const std::int64_t offset = pixel * block + lane;
      const Vec kept = Vec::loadu(dst + offset);
      Vec::blendv(kept, Vec::loadu(src + offset + shift), mask).store(dst + offset);
    }
  });
  copy_pixels(src, dst, block, src_lane, dst_lane, count, pixels - 1, pixels);
}

}  // namespace torch_blocked::kernels::CPU_CAPABILITY
