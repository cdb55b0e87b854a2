// Attention by two products with the tiles of direct convolution and a softmax between them, for
// some queries of one head at a time.
#include "ops/tokens/attention.h"

#include <algorithm>
#include <array>

#include "kernels/matrix/attention.h"
#include "ops/products/row_product.h"
#include "runtime/memory/memory_pool.h"
#include "runtime/memory/workspace.h"
#include "torch_blocked/threads.h"

namespace torch_blocked {
namespace {

// The floats of scores that L1 holds beside a group of keys. If there are many keys, keys and
// scores are in L2; then at least kLeastTiles tiles of queries share one read of the keys.
constexpr std::int64_t kScores = 6144, kLeastTiles = 4;

// Packs the keys and values of all heads, then works on some queries of one head at a time.
class Attention {
 public:
  Attention(at::Tensor query, at::Tensor key, at::Tensor value, double scale, at::Tensor bias)
      : kernels_(kernels::kernels()),
        query_(query.stride(-1) == 1 ? std::move(query) : query.contiguous()),
        key_(std::move(key)),
        value_(std::move(value)),
        bias_(std::move(bias)),
        scale_(static_cast<float>(scale)),
        heads_(batch_of(query_)),
        together_(query_.dim() == 4 ? query_.size(1) : 1),
        queries_(query_.size(-2)),
        by_keys_{&kernels_, key_.size(-1), key_.size(-2)},
        by_values_{&kernels_, value_.size(-2), value_.size(-1)} {
    if (bias_.defined() && bias_.stride(-1) != 1) bias_ = bias_.contiguous();
    const std::int64_t tile = by_keys_.tile();
    rows_ = std::clamp(kScores / by_keys_.width() / tile, kLeastTiles, std::int64_t{8}) * tile;
  }

  void operator()(const at::Tensor& dst) const {
    const at::Tensor packed = empty_pooled({heads_ * head_floats()}, at::kFloat);
    auto* to = packed.mutable_data_ptr<float>();
    on_all_threads([&] {
      pack_all(to);
      run_all(to, dst);
    });
  }

 private:
  std::int64_t head_floats() const { return by_keys_.floats() + by_values_.floats(); }

  void pack_keys(std::int64_t head, float* to) const {
    by_keys_.pack(matrix_of(key_, head).transposed(), to + head * head_floats());
  }
  void pack_values(std::int64_t head, float* to) const {
    by_values_.pack(matrix_of(value_, head), to + head * head_floats() + by_keys_.floats());
  }

  void pack_all(float* to) const {
    parallel_units(2 * heads_, head_floats() / 2, [&](std::int64_t begin, std::int64_t end) {
      for (std::int64_t i = begin; i < end; ++i) {
        i % 2 == 0 ? pack_keys(i / 2, to) : pack_values(i / 2, to);
      }
    });
  }

  void run_all(const float* packed, const at::Tensor& result) const {
    const std::int64_t chunks = ceil_div(queries_, rows_);
    parallel_units(heads_ * chunks, rows_ * by_keys_.floats() / 8,
                   [&](std::int64_t begin, std::int64_t end) {
                     for (std::int64_t i = begin; i < end; ++i) {
                       const std::int64_t head = i / chunks, first = i % chunks * rows_;
                       run_unit(head, first, packed + head * head_floats(), result);
                     }
                   });
  }

  void run_unit(std::int64_t head, std::int64_t first, const float* packed,
                const at::Tensor& result) const {
    const std::int64_t rows = std::min(rows_, queries_ - first);
    const std::int64_t scores_stride = by_keys_.width(), values_stride = by_values_.width();
    float* scores = workspace(rows_ * (scores_stride + values_stride + 1));
    float *values = scores + rows_ * scores_stride, *factors = values + rows_ * values_stride;
    const Matrix query = matrix_of(query_, head);
    multiply_all(by_keys_, {.src = query.data + first * query.row_stride,
                            .src_stride = query.row_stride,
                            .rows = rows,
                            .packed = packed,
                            .first = 0,
                            .bias = nullptr,
                            .dst = scores,
                            .dst_stride = scores_stride});
    const Matrix bias = bias_.defined() ? matrix_of(bias_, head) : Matrix{};
    kernels_.powers_of_rows({.scores = scores,
                             .rows = rows,
                             .count = by_keys_.columns,
                             .stride = scores_stride,
                             .scale = scale_,
                             .bias = bias.data ? bias.data + first * bias.row_stride : nullptr,
                             .bias_stride = bias.row_stride,
                             .factors = factors});
    multiply_all(by_values_, {.src = scores,
                              .src_stride = scores_stride,
                              .rows = rows,
                              .packed = packed + by_keys_.floats(),
                              .first = 0,
                              .bias = nullptr,
                              .dst = values,
                              .dst_stride = values_stride});
    const std::int64_t stride = together_ * by_values_.columns;
    const std::int64_t at =
        (head / together_ * queries_ + first) * stride + head % together_ * by_values_.columns;
    const bool narrow = result.scalar_type() == at::kBFloat16;
    kernels_.scale_rows({.src = values,
                         .rows = rows,
                         .count = by_values_.columns,
                         .src_stride = values_stride,
                         .factors = factors,
                         .dst = narrow ? values : result.mutable_data_ptr<float>() + at,
                         .dst_stride = narrow ? values_stride : stride});
    for (std::int64_t row = 0; narrow && row < rows; ++row) {
      auto* bits = static_cast<std::uint16_t*>(result.mutable_data_ptr()) + at + row * stride;
      kernels_.narrow_floats(values + row * values_stride, bits, by_values_.columns);
    }
  }

  const kernels::Kernels& kernels_;
  at::Tensor query_, key_, value_, bias_;
  float scale_;
  std::int64_t heads_, together_, queries_;  // together: heads whose results are adjacent
  PackedColumns by_keys_, by_values_;
  std::int64_t rows_;  // of a unit
};

}  // namespace

void attention(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
               double scale, const at::Tensor& bias, const at::Tensor& dst) {
  at::DimVector scores(query.sizes());
  scores.back() = key.size(-2);
  const auto numbers = [](const at::Tensor& x) { return x.to(at::kFloat); };
  const at::Tensor bias_of_scores = bias.defined() ? numbers(bias).expand(scores) : bias;
  Attention(numbers(query), numbers(key), numbers(value), scale, bias_of_scores)(dst);
}

}  // namespace torch_blocked
