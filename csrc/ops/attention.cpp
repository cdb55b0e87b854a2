#include "ops/attention.h"

#include <ATen/ops/empty.h>

#include <algorithm>
#include <array>

#include "format/sizes.h"
#include "kernels/attention.h"
#include "kernels/direct.h"
#include "kernels/kernels.h"
#include "runtime/memory_pool.h"
#include "runtime/threads.h"
#include "runtime/workspace.h"

namespace torch_blocked {
namespace {

using kernels::DirectSegment;
using kernels::DirectTiles;

// Inputs that are summed in registers before their sum joins the total, as of linear layers.
constexpr std::int64_t kChain = 256;
// Floats of scores that L1 holds beside a group of keys; many keys are in L2 with their scores.
constexpr std::int64_t kScores = 6144;

// [rows, lanes] of one head.
struct Matrix {
  const float* data;
  std::int64_t rows, lanes, row_stride, lane_stride;
};

Matrix matrix_of(const at::Tensor& x, std::int64_t b, std::int64_t h) {
  return {x.const_data_ptr<float>() + b * x.stride(0) + h * x.stride(1), x.size(2), x.size(3),
          x.stride(2), x.stride(3)};
}

Matrix transposed(const Matrix& m) {
  return {m.data, m.lanes, m.rows, m.lane_stride, m.row_stride};
}

// The right side of a product, [lanes, columns] cut into groups of columns that the tiles take at a
// time: [groups, lanes, columns of the group], zeros beyond the last column.
struct Right {
  const kernels::DirectSizes& sizes;
  std::int64_t lanes, columns;

  std::int64_t group() const { return sizes.vectors * sizes.width; }
  std::int64_t vectors(std::int64_t first) const {
    return std::min(sizes.vectors, ceil_div(columns - first, sizes.width));
  }
  std::int64_t width() const { return ceil_div(columns, sizes.width) * sizes.width; }
  std::int64_t floats() const { return lanes * width(); }

  void pack(const Matrix& from, float* to) const {
    for (std::int64_t first = 0; first < columns; first += group()) {
      const std::int64_t wide = vectors(first) * sizes.width;
      const std::int64_t count = std::min(wide, columns - first);
      for (std::int64_t lane = 0; lane < lanes; ++lane, to += wide) {
        const float* row = from.data + lane * from.row_stride + first * from.lane_stride;
        if (from.lane_stride == 1) {
          std::copy_n(row, count, to);
        } else {
          for (std::int64_t i = 0; i < count; ++i) to[i] = row[i * from.lane_stride];
        }
        std::fill(to + count, to + wide, 0.f);
      }
    }
  }
};

// dst [rows, columns] = left [rows, lanes] x packed. Whole vectors are written.
void multiply(const kernels::Kernels& kernels, const Right& right, const float* packed,
              const float* left, std::int64_t left_stride, std::int64_t rows, float* dst,
              std::int64_t dst_stride) {
  const std::int64_t width = right.sizes.width;
  for (std::int64_t first = 0; first < right.columns; first += right.group()) {
    DirectTiles tiles{.src = left,
                      .src_step = left_stride,
                      .segments = nullptr,
                      .count = 1,
                      .weights = packed + first * right.lanes,
                      .bias = nullptr,
                      .residual = nullptr,
                      .dst = dst + first,
                      .pixels = rows,
                      .vectors = right.vectors(first),
                      .channels = right.columns - first,
                      .dst_step = dst_stride,
                      .dst_offsets = {0, width, 2 * width},
                      .parts = 0,
                      .part_stride = 0,
                      .first = true,
                      .last = true,
                      .ahead = 0,
                      .tile = 0,
                      .stream = false,
                      .activation = {}};
    for (std::int64_t lane = 0; lane < right.lanes; lane += kChain) {
      const std::int64_t lanes = std::min(kChain, right.lanes - lane);
      const std::array<DirectSegment, 2> segments{{{lane, lanes, lane}, {}}};
      tiles.segments = segments.data();
      tiles.first = lane == 0;
      tiles.last = lane + lanes == right.lanes;
      tiles.ahead = lanes * tiles.vectors * width;
      kernels.direct_row_tiles(tiles);
    }
  }
}

// Some queries of one head at a time; the keys and values of all heads are packed before.
class Attention {
 public:
  Attention(at::Tensor query, at::Tensor key, at::Tensor value, double scale, at::Tensor bias)
      : kernels_(kernels::kernels()),
        query_(query.stride(3) == 1 ? std::move(query) : query.contiguous()),
        key_(std::move(key)),
        value_(std::move(value)),
        bias_(std::move(bias)),
        scale_(static_cast<float>(scale)),
        heads_(query_.size(1)),
        queries_(query_.size(2)),
        by_keys_{*kernels_.direct_sizes, key_.size(3), key_.size(2)},
        by_values_{*kernels_.direct_sizes, value_.size(2), value_.size(3)} {
    if (bias_.defined() && bias_.stride(3) != 1) bias_ = bias_.contiguous();
    const kernels::DirectSizes& sizes = *kernels_.direct_sizes;
    const std::int64_t tile = sizes.pixels[static_cast<std::size_t>(sizes.vectors - 1)];
    rows_ = std::clamp(kScores / by_keys_.width() / tile, std::int64_t{1}, std::int64_t{8}) * tile;
  }

  at::Tensor operator()() const {
    const std::int64_t all = query_.size(0) * heads_;
    const at::Tensor packed = empty_pooled({all * head_floats()}, at::kFloat);
    float* to = packed.mutable_data_ptr<float>();
    parallel_units(all, head_floats(), [&](std::int64_t begin, std::int64_t end) {
      for (std::int64_t i = begin; i < end; ++i) pack_head(i, to + i * head_floats());
    });
    const at::Tensor result =
        at::empty({query_.size(0), queries_, heads_, by_values_.columns}, at::kFloat);
    const std::int64_t chunks = ceil_div(queries_, rows_);
    parallel_units(
        all * chunks, rows_ * by_keys_.floats() / 8, [&](std::int64_t begin, std::int64_t end) {
          for (std::int64_t i = begin; i < end; ++i) {
            const std::int64_t head = i / chunks, first = i % chunks * rows_;
            run_unit(head, first, to + head * head_floats(), result.mutable_data_ptr<float>());
          }
        });
    return result.transpose(1, 2);
  }

 private:
  std::int64_t head_floats() const { return by_keys_.floats() + by_values_.floats(); }

  void pack_head(std::int64_t head, float* to) const {
    by_keys_.pack(transposed(matrix_of(key_, head / heads_, head % heads_)), to);
    by_values_.pack(matrix_of(value_, head / heads_, head % heads_), to + by_keys_.floats());
  }

  void run_unit(std::int64_t head, std::int64_t first, const float* packed, float* result) const {
    const std::int64_t b = head / heads_, h = head % heads_;
    const std::int64_t rows = std::min(rows_, queries_ - first);
    const std::int64_t scores_stride = by_keys_.width(), values_stride = by_values_.width();
    float* scores = workspace(rows_ * (scores_stride + values_stride + 1));
    float *values = scores + rows_ * scores_stride, *factors = values + rows_ * values_stride;
    const Matrix query = matrix_of(query_, b, h);
    multiply(kernels_, by_keys_, packed, query.data + first * query.row_stride, query.row_stride,
             rows, scores, scores_stride);
    const Matrix bias = bias_.defined() ? matrix_of(bias_, b, h) : Matrix{};
    kernels_.powers_of_rows({.scores = scores,
                             .rows = rows,
                             .count = by_keys_.columns,
                             .stride = scores_stride,
                             .scale = scale_,
                             .bias = bias.data ? bias.data + first * bias.row_stride : nullptr,
                             .bias_stride = bias.row_stride,
                             .factors = factors});
    multiply(kernels_, by_values_, packed + by_keys_.floats(), scores, scores_stride, rows, values,
             values_stride);
    const std::int64_t stride = heads_ * by_values_.columns;
    kernels_.scale_rows({.src = values,
                         .rows = rows,
                         .count = by_values_.columns,
                         .src_stride = values_stride,
                         .factors = factors,
                         .dst = result + (b * queries_ + first) * stride + h * by_values_.columns,
                         .dst_stride = stride});
  }

  const kernels::Kernels& kernels_;
  at::Tensor query_, key_, value_, bias_;
  float scale_;
  std::int64_t heads_, queries_;
  Right by_keys_, by_values_;
  std::int64_t rows_;  // of a unit
};

}  // namespace

at::Tensor attention(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
                     double scale, const at::Tensor& bias) {
  if (query.dim() == 3) {
    return attention(query.unsqueeze(1), key.unsqueeze(1), value.unsqueeze(1), scale,
                     bias.defined() && bias.dim() == 3 ? bias.unsqueeze(1) : bias)
        .squeeze(1);
  }
  const at::Tensor biases =
      bias.defined() ? bias.expand({query.size(0), query.size(1), query.size(2), key.size(2)})
                     : bias;
  return Attention(query, key, value, scale, biases)();
}

}  // namespace torch_blocked
