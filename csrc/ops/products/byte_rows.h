// Src of short numbers copied for a thread, with padding around the image.
#pragma once

#include <cstdint>

namespace torch_blocked {

// Rows of `columns` pixels of `pixel_bytes`, of which the first `before` are padding, and those
// beyond the src too; a negative `before` leaves out the first of src.
struct ByteRows {
  std::int64_t columns, before, src_columns, pixel_bytes;
  std::uint8_t zero;  // the padding, each byte of it
  bool words;         // bytes of src become words

  std::int64_t row_bytes() const { return columns * pixel_bytes * (words ? 2 : 1); }
  // `from` is a row of src, or null outside of it.
  void fill(const std::uint8_t* from, std::uint8_t* to) const;
};

}  // namespace torch_blocked
