// Linear layers of bytes by tiles of dot products: the rows of src are the pixels of an image whose
// channels are one block, and those of dst, which tiles make in blocks, are put together after.
#include <ATen/ops/empty.h>

#include <algorithm>

#include "ops/quantized_convolution.h"
#include "ops/rows_of_blocks.h"

namespace torch_blocked {
std::optional<QuantizedConvolutionPlan> plan_quantized_linear(const QuantizedLinearProblem& p) {
  if (p.inputs % 4 != 0) return std::nullopt;
  const Format blocks = quantized_src_format(p.inputs + 4);  // of dst: those of a vector
  const QuantizedConvolutionProblem rows{
      .sizes = {.src_dims = {1, p.inputs, p.rows},
                .dst_dims = {1, p.outputs, p.rows},
                .weight_dims = {p.outputs, p.inputs, 1},
                .stride = {1},
                .padding = {0},
                .dilation = {1},
                .output_padding = {0},
                .groups = 1,
                .src_format = {Format::Kind::kBlocked, p.inputs},
                .dst_format = blocks,
                .transposed = false,
                .has_bias = true,
                .dtype = at::kByte,
                .epilogue = {.before = p.activation, .after = {}}},
      .src = p.src,
      .dst = p.dst,
      .residual = {}};
  auto plan = plan_dots(rows);
  if (!plan) return std::nullopt;
  const std::int64_t width = blocks.block, size = p.dst ? 1 : 4;
  plan->run = [p, width, size, inner = std::move(plan->run)](
                  const std::uint8_t* src, const QuantizedWeights& weights,
                  const std::uint8_t* residual, void* dst) {
    const at::Tensor in_blocks =
        at::empty({(p.outputs + width - 1) / width * width * p.rows * size}, at::kByte);
    inner(src, weights, residual, in_blocks.mutable_data_ptr());
    const auto join = p.dst ? join_rows<std::uint8_t> : join_rows<float>;
    join({p.rows, p.outputs, width}, in_blocks.const_data_ptr(), dst);
  };
  return plan;
}

}  // namespace torch_blocked
