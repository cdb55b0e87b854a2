#include "graph/nodes/quantized/rivals.h"

#include <ATen/ops/ones.h>

#include "runtime/memory/memory_pool.h"

namespace torch_blocked::graph {

Contest::Entry ByteLayer::entry(QuantizedConvolutionPlan plan) const {
  const auto bytes = [](const Dims& dims) { return empty_pooled(dims, at::kByte).fill_(1); };
  const at::Tensor values = at::ones(weight, at::kChar);
  const QuantizedWeights weights{plan.pack(values),
                                 plan.channels(values, at::ones({outputs}, at::kFloat), {})};
  const at::Tensor residual = has_residual ? bytes(dst) : at::Tensor();
  const at::Tensor to = empty_pooled(dst, is_float32 ? at::kFloat : at::kByte);
  return {.run =
              [run = std::move(plan.run), weights, from = bytes(src), residual, to] {
                run(from.const_data_ptr<std::uint8_t>(), weights,
                    residual.defined() ? residual.const_data_ptr<std::uint8_t>() : nullptr,
                    to.mutable_data_ptr());
              },
          .weights = weights.packed};
}

}  // namespace torch_blocked::graph
