#include "ops/row_product.h"

#include <array>

#include "kernels/reorder.h"

namespace torch_blocked {
namespace {

using kernels::DirectSegment;

constexpr std::int64_t kChain = 256;

}  // namespace

void PackedColumns::pack(const Matrix& from, float* to) const {
  for (std::int64_t first = 0; first < columns; first += group()) {
    const std::int64_t wide = vectors(first) * sizes().width;
    const std::int64_t count = std::min(wide, columns - first);
    if (from.row_stride == 1) {
      if (count < wide) std::fill_n(to, lanes * wide, 0.f);
      kernels->transpose(
          {from.data + first * from.column_stride, from.column_stride, to, wide, count, lanes});
      to += lanes * wide;
      continue;
    }
    for (std::int64_t lane = 0; lane < lanes; ++lane, to += wide) {
      const float* row = from.data + lane * from.row_stride + first * from.column_stride;
      if (from.column_stride == 1) {
        std::copy_n(row, count, to);
      } else {
        for (std::int64_t i = 0; i < count; ++i) to[i] = row[i * from.column_stride];
      }
      std::fill(to + count, to + wide, 0.f);
    }
  }
}

std::int64_t lanes_of_part(const PackedColumns& columns) {
  return std::min(kChain, columns.sizes().lanes);
}

void multiply_part(const PackedColumns& columns, const RowProduct& product, std::int64_t lane,
                   std::int64_t lanes, std::int64_t ahead) {
  const std::int64_t width = columns.sizes().width, vectors = columns.vectors(product.first);
  const std::array<DirectSegment, 2> segments{{{0, lanes, lane}, {}}};
  columns.kernels->direct_row_tiles({.src = product.src,
                                     .src_step = product.src_stride,
                                     .segments = segments.data(),
                                     .count = 1,
                                     .weights = product.packed + product.first * columns.lanes,
                                     .bias = product.bias ? product.bias + product.first : nullptr,
                                     .residual = nullptr,
                                     .dst = product.dst,
                                     .pixels = product.rows,
                                     .vectors = vectors,
                                     .channels = columns.columns - product.first,
                                     .dst_step = product.dst_stride,
                                     .dst_offsets = {0, width, 2 * width},
                                     .parts = 0,
                                     .part_stride = 0,
                                     .first = lane == 0,
                                     .last = lane + lanes == columns.lanes,
                                     .ahead = ahead,
                                     .tile = 0,
                                     .stream = false,
                                     .activation = product.activation});
}

void multiply(const PackedColumns& columns, const RowProduct& product) {
  const std::int64_t part = lanes_of_part(columns);
  RowProduct next = product;
  for (std::int64_t lane = 0; lane < columns.lanes; lane += part, next.src += part) {
    const std::int64_t lanes = std::min(part, columns.lanes - lane);
    const std::int64_t ahead = lanes * columns.vectors(product.first) * columns.sizes().width;
    multiply_part(columns, next, lane, lanes, ahead);
  }
}

}  // namespace torch_blocked
