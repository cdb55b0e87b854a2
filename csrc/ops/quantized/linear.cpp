// Runs linear layers of bytes by tiles of dot products. The rows of src are the pixels of an image
// whose channels are one block. Tiles make dst in blocks, which are joined to rows afterwards.
#include <ATen/ops/empty.h>

#include "ops/linear/rows_of_blocks.h"
#include "ops/quantized/convolution.h"

namespace torch_blocked {
namespace {

const char* refuses_rows(const QuantizedLinearProblem& p) {
  return p.inputs % 4 == 0 ? nullptr : "takes whole groups of four inputs";
}

std::optional<QuantizedConvolutionPlan> plan_rows(const QuantizedLinearProblem& p) {
  const Format blocks = quantized_src_format(p.inputs + 4);  // blocks of dst: one vector
  const QuantizedConvolutionProblem rows{
      .sizes = pixels_of_rows(p.rows, p.inputs, p.outputs, blocks.block, at::kByte, p.activation),
      .src = p.src,
      .dst = p.dst,
      .residual = {}};
  auto plan = QuantizedConvolutionImplementations::plan(quantized_convolutions::dots, rows);
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

const QuantizedLinearImplementations kQuantizedLinearImplementations(
    "quantized_linear", {{.name = "dots", .refuses = refuses_rows, .plan = plan_rows}});

}  // namespace

const QuantizedLinearImplementations& quantized_linear_implementations() {
  return kQuantizedLinearImplementations;
}

}  // namespace torch_blocked
