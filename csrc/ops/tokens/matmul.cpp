// Multiplies batches of matrices by the tiles of direct convolution.
#include "ops/tokens/matmul.h"

#include <ATen/ops/empty_like.h>

#include <algorithm>

#include "kernels/rows/reorder.h"
#include "ops/products/row_product.h"
#include "runtime/memory/memory_pool.h"
#include "runtime/memory/workspace.h"
#include "torch_blocked/threads.h"

namespace torch_blocked {
namespace {

// The most rows of a unit: a group of columns fits in L1 or L2 beside their src and dst.
constexpr std::int64_t kMostMatmulRows = 224;

// Whether all matrices of a batch are the same memory.
bool is_one(const at::Tensor& x) {
  bool one = true;
  for (std::int64_t dim = 0; dim < x.dim() - 2; ++dim) {
    one = one && (x.size(dim) == 1 || x.stride(dim) == 0);
  }
  return one;
}

// Expands the matrices to the batch of dst.
at::Tensor for_batch(const at::Tensor& x, const at::Tensor& dst) {
  at::DimVector dims(dst.sizes());
  dims.end()[-2] = x.size(-2);
  dims.end()[-1] = x.size(-1);
  return x.expand(dims);
}

// The same matrix if its columns are dense, otherwise a copy in `to`.
Matrix with_dense_rows(const Matrix& from, float* to) {
  if (from.column_stride == 1 || from.columns == 1) return from;
  if (from.row_stride == 1) {
    kernels::kernels().transpose(
        {from.data, from.column_stride, to, from.columns, from.columns, from.rows});
  } else {
    for (std::int64_t row = 0; row < from.rows; ++row) {
      for (std::int64_t i = 0; i < from.columns; ++i) {
        to[row * from.columns + i] = from.data[row * from.row_stride + i * from.column_stride];
      }
    }
  }
  return {to, from.rows, from.columns, from.columns, 1};
}

// Packs all right sides first, then multiplies some rows of one matrix at a time.
class Products {
 public:
  Products(const at::Tensor& left, const at::Tensor& right, const at::Tensor& dst)
      : left_(for_batch(left, dst)),
        right_(for_batch(right, dst)),
        dst_(dst),
        batch_(batch_of(dst)),
        packed_count_(is_one(right_) ? 1 : batch_),
        columns_{&kernels::kernels(), right.size(-2), right.size(-1)} {
    const std::int64_t tile = columns_.tile(), most = kMostMatmulRows / tile * tile;
    const std::int64_t floats = columns_.sizes().band_bytes / std::int64_t{sizeof(float)};
    rows_ = std::clamp(floats / columns_.lanes / tile * tile, tile, most);
  }

  void operator()() const {
    const at::Tensor packed = empty_pooled({packed_count_ * columns_.floats()}, at::kFloat);
    auto* to = packed.mutable_data_ptr<float>();
    on_all_threads([&] {
      pack_all(to);
      run_all(to);
    });
  }

 private:
  void pack_all(float* to) const {
    parallel_units(packed_count_, columns_.floats(), [&](std::int64_t begin, std::int64_t end) {
      for (std::int64_t i = begin; i < end; ++i) {
        columns_.pack(matrix_of(right_, i), to + i * columns_.floats());
      }
    });
  }

  void run_all(const float* packed) const {
    const std::int64_t chunks = ceil_div(left_.size(-2), rows_);
    // A product takes about an eighth of the time of a pointwise operation on an element.
    parallel_units(batch_ * chunks, std::min(rows_, left_.size(-2)) * columns_.floats() / 8,
                   [&](std::int64_t begin, std::int64_t end) {
                     for (std::int64_t i = begin; i < end; ++i) {
                       run_unit(i / chunks, i % chunks * rows_, packed);
                     }
                   });
  }

  void run_unit(std::int64_t index, std::int64_t first, const float* packed) const {
    const Matrix all = matrix_of(left_, index);
    float* whole = workspace(rows_ * (columns_.group() + all.columns));
    const Matrix left =
        with_dense_rows({all.data + first * all.row_stride, std::min(rows_, all.rows - first),
                         all.columns, all.row_stride, all.column_stride},
                        whole + rows_ * columns_.group());
    const std::int64_t right = packed_count_ == 1 ? 0 : index;
    float* dst = dst_.mutable_data_ptr<float>() + offset_of_matrix(dst_, index);
    multiply_all(columns_,
                 {.src = left.data,
                  .src_stride = left.row_stride,
                  .rows = left.rows,
                  .packed = packed + right * columns_.floats(),
                  .first = 0,
                  .bias = nullptr,
                  .dst = dst + first * dst_.stride(-2),
                  .dst_stride = dst_.stride(-2)},
                 whole);
  }

  at::Tensor left_, right_, dst_;
  std::int64_t batch_, packed_count_;
  PackedColumns columns_;
  std::int64_t rows_;  // of a unit
};

}  // namespace

void matmul(const at::Tensor& left, const at::Tensor& right, const at::Tensor& dst) {
  if (dst.scalar_type() != at::kFloat) {
    const at::Tensor numbers = at::empty_like(dst, dst.options().dtype(at::kFloat));
    matmul(left, right, numbers);
    dst.copy_(numbers);
    return;
  }
  const at::Tensor a = left.to(at::kFloat), b = right.to(at::kFloat);
  if (dst.stride(-1) == 1 || dst.size(-1) == 1) {
    Products(a, b, dst)();
  } else {
    Products(b.transpose(-1, -2), a.transpose(-1, -2), dst.transpose(-1, -2))();
  }
}

}  // namespace torch_blocked
