#include "kernels/rows/normalization.h"
#include "kernels/vector/lanes.h"
#include "kernels/vector/short_lanes.h"

namespace torch_blocked::kernels::CPU_CAPABILITY {
namespace {

// Number: float, or the bits of bfloat16.
template <typename Number>
void affine_of(const Affine& rows, std::int64_t begin, std::int64_t end) {
  // A copy, whose fields stay in registers. GCC would assume that stores change those of a
  // reference.
  const Affine p = rows;
  for (std::int64_t row = begin; row < end; ++row) {
    const std::int64_t period = row % p.periods;
    const auto* src_row = static_cast<const Number*>(p.src) + row * p.pixels * p.block;
    auto* dst_row = static_cast<Number*>(p.dst) + row * p.pixels * p.block;  // [pixels, block]
    if (p.block == 1) {
      const Vec a(p.scale[period]), b(p.shift[period]);
      for_lanes(p.pixels, [&](std::int64_t pixel, std::int64_t count) {
        store(at::vec::fmadd(load(src_row + pixel, count), a, b), dst_row + pixel, count);
      });
      continue;
    }
    for_lanes(p.block, [&](std::int64_t lane, std::int64_t count) {
      const Vec a = load(p.scale + period * p.block + lane, count);
      const Vec b = load(p.shift + period * p.block + lane, count);
      for (std::int64_t pixel = 0; pixel < p.pixels; ++pixel) {
        const std::int64_t offset = pixel * p.block + lane;
        store(at::vec::fmadd(load(src_row + offset, count), a, b), dst_row + offset, count);
      }
    });
  }
}

}  // namespace

void affine(const Affine& rows, std::int64_t begin, std::int64_t end) {
  affine_of<float>(rows, begin, end);
}

void affine_bfloats(const Affine& rows, std::int64_t begin, std::int64_t end) {
  affine_of<std::uint16_t>(rows, begin, end);
}

}  // namespace torch_blocked::kernels::CPU_CAPABILITY
