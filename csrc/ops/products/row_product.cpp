// Multiplies rows by packed columns with the tiles of direct convolution.
#include "ops/products/row_product.h"

#include <array>

#include "kernels/rows/reorder.h"

namespace torch_blocked {
namespace {

using kernels::DirectSegment;

constexpr std::int64_t kChain = 256;

}  // namespace

std::int64_t batch_of(const at::Tensor& x) {
  return c10::multiply_integers(x.sizes().slice(0, static_cast<std::size_t>(x.dim()) - 2));
}

std::int64_t offset_of_matrix(const at::Tensor& x, std::int64_t index) {
  std::int64_t offset = 0;
  for (std::int64_t dim = x.dim() - 3; dim >= 0; --dim) {
    offset += index % x.size(dim) * x.stride(dim);
    index /= x.size(dim);
  }
  return offset;
}

Matrix matrix_of(const at::Tensor& x, std::int64_t index) {
  return {x.const_data_ptr<float>() + offset_of_matrix(x, index), x.size(-2), x.size(-1),
          x.stride(-2), x.stride(-1)};
}

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
                                     .residual = product.residual,
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
                                     .row = 0,
                                     .rows = 1,
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

void multiply_all(const PackedColumns& columns, RowProduct product, float* whole) {
  float* dst = product.dst;
  const std::int64_t stride = product.dst_stride;
  for (std::int64_t first = 0; first < columns.columns; first += columns.group()) {
    const std::int64_t wide = columns.vectors(first) * columns.sizes().width;
    const std::int64_t count = std::min(wide, columns.columns - first);
    const bool fits = !whole || count == wide;
    product.first = first;
    product.dst = fits ? dst + first : whole;
    product.dst_stride = fits ? stride : wide;
    multiply(columns, product);
    for (std::int64_t row = 0; row < product.rows && !fits; ++row) {
      std::copy_n(whole + row * wide, count, dst + row * stride + first);
    }
  }
}

}  // namespace torch_blocked
