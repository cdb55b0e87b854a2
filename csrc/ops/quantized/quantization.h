// What a byte stands for: scale * (byte - zero).
#pragma once

#include <cstdint>

#include "kernels/rows/quantize.h"

namespace torch_blocked {

struct Quantization {
  double scale = 1;
  std::int64_t zero = 0, least = 0, most = 255;  // bytes

  bool operator==(const Quantization&) const = default;

  kernels::Quantizer quantizer() const {
    return {.scale = static_cast<float>(scale),
            .inverse_scale = static_cast<float>(1 / scale),
            .zero = static_cast<float>(zero),
            .least = static_cast<float>(least),
            .most = static_cast<float>(most)};
  }
};

}  // namespace torch_blocked
