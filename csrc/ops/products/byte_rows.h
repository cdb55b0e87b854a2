// Copies rows of 8-bit or 16-bit src for a thread, with padding around the image.
#pragma once

#include <cstdint>

namespace torch_blocked {

// Rows of `columns` pixels of `pixel_bytes`. The first `before` pixels and those beyond src are
// padding. A negative `before` leaves out the first pixels of src.
struct ByteRows {
  std::int64_t columns, before, src_columns, pixel_bytes;
  std::uint8_t zero;  // each byte of the padding
  bool words;         // bytes of src become words of 16 bits

  std::int64_t row_bytes() const { return columns * pixel_bytes * (words ? 2 : 1); }
  // Makes a row. `from` is a row of src, or null for a row outside of it.
  void fill(const std::uint8_t* from, std::uint8_t* to) const;
};

}  // namespace torch_blocked
