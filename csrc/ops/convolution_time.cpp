#include "ops/convolution_time.h"

#include <algorithm>

namespace torch_blocked {

double microseconds_of(double fmas) { return fmas / 6e4; }

double streamed_fmas(double products, double tiles) {
  constexpr double kTilesAtLeast = 7;
  return products * std::max(tiles, kTilesAtLeast);
}

double direct_microseconds(const ConvolutionProblem& p) {
  const double pairs = static_cast<double>(p.src_dims[1] / p.groups * p.dst_dims[1]);
  double taps = 1, pixels = static_cast<double>(p.dst_dims[0]);
  for (std::size_t i = 0; i < p.spatial(); ++i) {
    taps *= static_cast<double>(p.weight_dims[2 + i]);
    pixels *= static_cast<double>(p.dst_dims[2 + i]);
    if (p.transposed)
      pixels /= static_cast<double>(p.stride[i]);  // a pixel meets so many fewer taps
  }
  return microseconds_of(streamed_fmas(taps, pixels) * pairs);
}

double moving_microseconds(const Dims& dims, at::ScalarType dtype) {
  constexpr double kBytesPerMicrosecond = 8e3, kStart = 3;
  const auto bytes = static_cast<double>(c10::multiply_integers(dims)) *
                     static_cast<double>(c10::elementSize(dtype));
  return kStart + 2 * bytes / kBytesPerMicrosecond;
}

}  // namespace torch_blocked
