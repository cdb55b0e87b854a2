// Converts between numbers and bytes or bfloat16.
#include "kernels/rows/quantize.h"

#include <algorithm>

#include "kernels/vector/short_lanes.h"

namespace torch_blocked::kernels::CPU_CAPABILITY {

void quantize(const Quantizer& q, const float* src, std::uint8_t* dst, std::int64_t count) {
  const Vec inverse(q.inverse_scale), zero(q.zero), least(q.least), most(q.most);
  const auto bytes_of = [&](const Vec& x) {
    return at::vec::clamp((x * inverse).round() + zero, least, most);
  };
  std::int64_t i = 0;
  for (; i + kWidth <= count; i += kWidth) store_bytes(bytes_of(Vec::loadu(src + i)), dst + i);
  if (i < count) {
    std::uint8_t last[kWidth];
    store_bytes(bytes_of(Vec::loadu(src + i, count - i)), last);
    std::memcpy(dst + i, last, static_cast<std::size_t>(count - i));
  }
}

void dequantize(const Quantizer& q, const std::uint8_t* src, float* dst, std::int64_t count) {
  const Vec scale(q.scale), zero(q.zero);
  std::int64_t i = 0;
  for (; i + kWidth <= count; i += kWidth) ((load_bytes(src + i) - zero) * scale).store(dst + i);
  for (; i < count; ++i) dst[i] = (static_cast<float>(src[i]) - q.zero) * q.scale;
}

void narrow_floats(const float* src, std::uint16_t* dst, std::int64_t count) {
  for (std::int64_t i = 0; i < count; i += kWidth) {
    const std::int64_t lanes = std::min(kWidth, count - i);
    store(load(src + i, lanes), dst + i, lanes);
  }
}

void widen_bfloats(const std::uint16_t* src, float* dst, std::int64_t count) {
  for (std::int64_t i = 0; i < count; i += kWidth) {
    const std::int64_t lanes = std::min(kWidth, count - i);
    store(load(src + i, lanes), dst + i, lanes);
  }
}

void look_up(const std::uint8_t* table, const std::uint8_t* src, std::uint8_t* dst,
             std::int64_t count) {
  std::int64_t i = 0;
#if defined(CPU_CAPABILITY_AVX512)
  const BytesOfTable bytes(table);
  for (; i + 64 <= count; i += 64) bytes.look_up(src + i, dst + i);
#endif
  for (; i < count; ++i) dst[i] = table[src[i]];
}

}  // namespace torch_blocked::kernels::CPU_CAPABILITY
