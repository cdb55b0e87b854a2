#include "ops/convolution_time.h"

#include <algorithm>

#include "runtime/isa.h"

namespace torch_blocked {

double microseconds_of(double fmas) { return fmas / 6e4; }

double streamed_fmas(double products, double tiles) {
  const double least = isa() == Isa::kAvx2 ? 12 : 10;
  return products * std::max(tiles, least);
}

bool is_dilated(const ConvolutionProblem& p) {
  return std::ranges::any_of(p.dilation, [](std::int64_t d) { return d > 1; });
}

double part_inside(const ConvolutionProblem& p) {
  if (p.transposed) return 1;
  double part = 1;
  for (std::size_t i = 0; i < p.spatial(); ++i) {
    const std::int64_t size = p.src_dims[2 + i], out = p.dst_dims[2 + i],
                       taps = p.weight_dims[2 + i];
    std::int64_t inside = 0;
    for (std::int64_t tap = 0; tap < taps; ++tap) {
      const std::int64_t first = tap * p.dilation[i] - p.padding[i];
      const std::int64_t begin = ceil_div(std::max<std::int64_t>(-first, 0), p.stride[i]);
      const std::int64_t end = ceil_div(std::max<std::int64_t>(size - first, 0), p.stride[i]);
      inside += std::max<std::int64_t>(std::min(end, out) - begin, 0);
    }
    part *=
        static_cast<double>(inside) / static_cast<double>(std::max<std::int64_t>(out * taps, 1));
  }
  return part;
}

double direct_microseconds(const ConvolutionProblem& p) {
  const double pairs = static_cast<double>(p.src_dims[1] / p.groups * p.dst_dims[1]);
  double taps = 1, pixels = static_cast<double>(p.dst_dims[0]);
  for (std::size_t i = 0; i < p.spatial(); ++i) {
    taps *= static_cast<double>(p.weight_dims[2 + i]);
    pixels *= static_cast<double>(p.dst_dims[2 + i]);
    if (p.transposed)
      pixels /= static_cast<double>(p.stride[i]);  // a pixel meets fewer taps by this factor
  }
  if (is_dilated(p)) taps *= part_inside(p);
  return microseconds_of(streamed_fmas(taps, pixels) * pairs);
}

double moving_microseconds(const Dims& dims, at::ScalarType dtype) {
  constexpr double kBytesPerMicrosecond = 8e3, kStart = 3;
  const auto bytes = static_cast<double>(c10::multiply_integers(dims)) *
                     static_cast<double>(c10::elementSize(dtype));
  return kStart + 2 * bytes / kBytesPerMicrosecond;
}

}  // namespace torch_blocked
