// The arithmetic of a kernel's windows along one spatial dim, for convolution, transposed
// convolution and pooling.
#pragma once

#include <c10/util/ArrayRef.h>

#include <algorithm>
#include <array>
#include <cstdint>

namespace torch_blocked {

// Sizes per spatial dim as d, h, w; dims that a problem lacks get `missing`.
inline std::array<std::int64_t, 3> as_3d(c10::IntArrayRef values, std::int64_t missing) {
  std::array<std::int64_t, 3> result{missing, missing, missing};
  std::copy(values.begin(), values.end(),
            result.end() - static_cast<std::ptrdiff_t>(values.size()));
  return result;
}

struct Window {
  std::int64_t kernel, stride, padding, dilation;

  // The pixels that one window spans, and that `count` windows span, one stride apart.
  std::int64_t reach() const { return dilation * (kernel - 1) + 1; }
  std::int64_t reach(std::int64_t count) const { return (count - 1) * stride + reach(); }
  // The windows that fit in `size` pixels and the padding at both ends; 0 if there is no room for
  // one. Source, also of transposed(): the formulas of torch.nn.Conv2d and ConvTranspose2d.
  std::int64_t count(std::int64_t size) const {
    const std::int64_t room = size + 2 * padding - reach();
    return room < 0 ? 0 : room / stride + 1;
  }
  // The same, plus a last window that the far end cuts off if it begins within the pixels or the
  // padding before them. Source: at::native::pooling_output_shape.
  std::int64_t count_cut(std::int64_t size) const {
    const std::int64_t room = size + 2 * padding - reach() + stride - 1;
    const std::int64_t most = room < 0 ? 0 : room / stride + 1;
    return (most - 1) * stride >= size + padding ? most - 1 : most;
  }
  // The pixels that a transposed convolution makes of `size`; less than 1 if nothing is left.
  std::int64_t transposed(std::int64_t size, std::int64_t output_padding) const {
    return reach(size) - 2 * padding + output_padding;
  }
  // How many pixels `count` windows reach beyond the padding in front and `size` pixels; negative
  // if they end before.
  std::int64_t padding_end(std::int64_t size, std::int64_t count) const {
    return reach(count) - size - padding;
  }
};

}  // namespace torch_blocked
