// Multiplies rows by a matrix that is packed for the tiles of direct convolution: a row counts as a
// pixel, a column as an output channel. Linear layers and attention run on this.
#pragma once

#include <ATen/core/Tensor.h>

#include <algorithm>
#include <cstdint>

#include "format/sizes.h"
#include "kernels/direct/direct.h"
#include "kernels/kernels.h"

namespace torch_blocked {

// [rows, columns] in memory of any strides.
struct Matrix {
  const float* data;
  std::int64_t rows, columns, row_stride, column_stride;

  Matrix transposed() const { return {data, columns, rows, column_stride, row_stride}; }
};

// A batch of matrices [..., rows, columns]: how many there are, where the one at `index` begins,
// and that matrix.
std::int64_t batch_of(const at::Tensor& x);
std::int64_t offset_of_matrix(const at::Tensor& x, std::int64_t index);
Matrix matrix_of(const at::Tensor& x, std::int64_t index);

// The right side of a product, [lanes, columns], cut into the groups of columns that a tile takes
// at a time: [groups, lanes, columns of the group]. The last group has only as many vectors as it
// needs, with zeros beyond its last column.
struct PackedColumns {
  const kernels::Kernels* kernels;
  std::int64_t lanes, columns;

  const kernels::DirectSizes& sizes() const { return *kernels->direct_sizes; }
  std::int64_t group() const { return sizes().vectors * sizes().width; }
  std::int64_t groups() const { return ceil_div(columns, group()); }
  // The vectors of the group that begins with column `first`.
  std::int64_t vectors(std::int64_t first) const {
    return std::min(sizes().vectors, ceil_div(columns - first, sizes().width));
  }
  // Columns rounded up to whole vectors.
  std::int64_t width() const { return ceil_div(columns, sizes().width) * sizes().width; }
  std::int64_t floats() const { return lanes * width(); }
  // Rows of a tile.
  std::int64_t tile() const {
    return sizes().pixels[static_cast<std::size_t>(sizes().vectors - 1)];
  }

  void pack(const Matrix& from, float* to) const;
};

// dst = activation(src x the columns of one group + bias + residual), in whole vectors.
struct RowProduct {
  const float* src;  // [rows, lanes], rows src_stride floats apart
  std::int64_t src_stride, rows;
  const float* packed;  // all groups
  std::int64_t first;   // column of the group
  const float* bias;    // [columns], or null
  float* dst;           // of the group's first column; rows are dst_stride floats apart
  std::int64_t dst_stride;
  kernels::Activation activation = {};
  const float* residual = nullptr;  // laid out as dst, which it may be; added before `activation`
};

// How many lanes are summed in registers before their sum joins the total in dst. With parts,
// rounding grows only with the root of the number of lanes, and a part's weights stay in cache for
// all rows.
std::int64_t lanes_of_part(const PackedColumns& columns);

// Adds the part of the sums over lanes [lane, lane + lanes); src begins with that lane. The first
// part overwrites dst. `ahead`: floats from its weights to those that are needed next.
void multiply_part(const PackedColumns& columns, const RowProduct& product, std::int64_t lane,
                   std::int64_t lanes, std::int64_t ahead);
// All parts.
void multiply(const PackedColumns& columns, const RowProduct& product);
// All parts of all groups from column 0 on. With `whole`, nothing beyond the last column is
// written; it is memory for the rows of one group.
void multiply_all(const PackedColumns& columns, RowProduct product, float* whole = nullptr);

}  // namespace torch_blocked
