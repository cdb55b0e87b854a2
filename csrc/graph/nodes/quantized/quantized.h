// Values as bytes, in nodes that read and make them.
#pragma once

#include "graph/passes/rules.h"
#include "graph/running/run.h"
#include "ops/quantized/convolution.h"

namespace torch_blocked::graph {

// Of nodes::quantize and nodes::dequantize, which read one value.
struct Quantized {
  Quantization quantization;
};

// The quantization of the bytes that a node makes, or makes numbers of.
inline const Quantization* quantization_of(const Node* node, const NodeKind& kind) {
  return node && node->is(kind) ? &node->as<Quantized>()->quantization : nullptr;
}

// A node of int8 constants made numbers: their scales, one for each entry of dim `axis`.
struct QuantizedConstant {
  at::Tensor values, scales;  // scales: float32, of one entry where there is no axis
  std::int64_t axis;
};
// What makes a value such; nothing if it does not, or if a zero point is not 0.
std::optional<QuantizedConstant> quantized_constant(const Graph& graph, const Node* maker);

// The weights of a layer of bytes, made ready once.
QuantizedWeights packed(const Running& running, const Node& node,
                        const QuantizedConvolutionPlan& plan, const at::Tensor& weight,
                        const at::Tensor& scales, const at::Tensor& bias);

}  // namespace torch_blocked::graph
