#include "ops/products/byte_rows.h"

#include <algorithm>
#include <cstring>

#include "kernels/kernels.h"

namespace torch_blocked {

void ByteRows::fill(const std::uint8_t* from, std::uint8_t* to) const {
  auto* wide = reinterpret_cast<std::int16_t*>(to);
  const auto pad = [&](std::int64_t begin, std::int64_t end) {
    if (words) {
      std::fill(wide + begin * pixel_bytes, wide + end * pixel_bytes, std::int16_t{zero});
    } else {
      std::memset(to + begin * pixel_bytes, zero,
                  static_cast<std::size_t>((end - begin) * pixel_bytes));
    }
  };
  if (!from) return pad(0, columns);
  const std::int64_t first = std::clamp<std::int64_t>(before, 0, columns);
  const std::int64_t skipped = std::max<std::int64_t>(-before, 0);
  const std::int64_t inside = std::clamp<std::int64_t>(src_columns - skipped, 0, columns - first);
  from += skipped * pixel_bytes;
  pad(0, first);
  if (words) {
    kernels::kernels().widen_bytes(from, wide + first * pixel_bytes, inside * pixel_bytes);
  } else {
    std::memcpy(to + first * pixel_bytes, from, static_cast<std::size_t>(inside * pixel_bytes));
  }
  pad(first + inside, columns);
}

}  // namespace torch_blocked
