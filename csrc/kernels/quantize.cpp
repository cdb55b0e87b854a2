// Between numbers and bytes.
#include "kernels/quantize.h"

#include "kernels/short_lanes.h"

namespace torch_blocked::kernels::CPU_CAPABILITY {

void quantize(const Quantizer& q, const float* src, std::uint8_t* dst, std::int64_t count) {
  const Vec inverse(q.inverse_scale), zero(q.zero), least(q.least), most(q.most);
  const auto bytes_of = [&](const Vec& x) {
    return at::vec::minimum(at::vec::maximum((x * inverse).round() + zero, least), most);
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

}  // namespace torch_blocked::kernels::CPU_CAPABILITY
