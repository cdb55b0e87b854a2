// Splits transposed convolutions into phases. The outputs whose indices have the same remainder by
// the stride meet the same taps, so a phase is an ordinary convolution at stride 1.
#pragma once

#include <cstdint>
#include <numeric>
#include <optional>

#include "format/sizes.h"
#include "ops/window.h"

namespace torch_blocked {

// One dim of a phase. Output o of the phase is output rest + o * stride of the whole.
struct PhaseAxis {
  std::int64_t outputs;
  std::int64_t kernel, padding, dilation;  // of the ordinary convolution; padding may be negative
  std::int64_t tap_first, tap_step;        // its tap k is tap tap_first + k * tap_step of the whole
};

// The phase `rest` along one dim, of which `whole` makes `outputs`. Its taps are those k for which
// the stride divides rest + padding - k * dilation, in reverse order. Nothing if there are none.
inline std::optional<PhaseAxis> phase_axis(const Window& whole, std::int64_t outputs,
                                           std::int64_t rest) {
  std::int64_t last = whole.kernel - 1;
  while (last >= 0 && (rest + whole.padding - last * whole.dilation) % whole.stride != 0) --last;
  if (last < 0) return std::nullopt;
  const std::int64_t common = std::gcd(whole.stride, whole.dilation);
  const std::int64_t step = whole.stride / common;
  return PhaseAxis{.outputs = ceil_div(outputs - rest, whole.stride),
                   .kernel = last / step + 1,
                   .padding = (last * whole.dilation - rest - whole.padding) / whole.stride,
                   .dilation = whole.dilation / common,
                   .tap_first = last,
                   .tap_step = -step};
}

}  // namespace torch_blocked
