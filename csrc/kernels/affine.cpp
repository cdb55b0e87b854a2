#include "kernels/entries.h"
#include "kernels/lanes.h"

namespace torch_blocked::kernels::CPU_CAPABILITY {

void affine(const float* src, const float* scale, const float* shift, float* dst,
            std::int64_t block, std::int64_t pixels, std::int64_t periods, std::int64_t begin,
            std::int64_t end) {
  for (std::int64_t row = begin; row < end; ++row) {
    const std::int64_t period = row % periods;
    const float* src_row = src + row * pixels * block;  // [pixels, block]
    float* dst_row = dst + row * pixels * block;
    for_lanes(block, [&](std::int64_t lane, std::int64_t count) {
      const Vec a = load(scale + period * block + lane, count);
      const Vec b = load(shift + period * block + lane, count);
      for (std::int64_t pixel = 0; pixel < pixels; ++pixel) {
        const std::int64_t offset = pixel * block + lane;
        store(at::vec::fmadd(load(src_row + offset, count), a, b), dst_row + offset, count);
      }
    });
  }
}

}  // namespace torch_blocked::kernels::CPU_CAPABILITY
