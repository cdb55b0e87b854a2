// Quantized values: what nodes that read or make bytes know of them.
#pragma once

#include "graph/passes/rules.h"
#include "graph/running/run.h"
#include "ops/quantized/convolution.h"

namespace torch_blocked::graph {

// Held by nodes::quantize and nodes::dequantize, which read one value.
struct Quantized {
  Quantization quantization;
};

// The quantization of the bytes that a node of this kind reads or makes; null for other nodes.
inline const Quantization* quantization_of(const Node* node, const NodeKind& kind) {
  return node && node->is(kind) ? &node->as<Quantized>()->quantization : nullptr;
}

// A number, given as such or as a constant tensor with one element.
std::optional<double> scalar(const Graph& graph, const Argument& argument);
// The quantization to unsigned bytes, signed ones shifted by 128, of a scale, a zero point, the
// least and the most byte; nothing if these are not constants, or beyond bytes.
std::optional<Quantization> unsigned_quantization(const Graph& graph,
                                                  std::span<const Argument> parameters,
                                                  bool is_signed);

// `parameters` of dim `axis`, or of all (-1), as they meet values of this rank.
at::Tensor along(const at::Tensor& parameters, std::int64_t axis, std::int64_t rank);

// fakes.cpp: makes a quantization and a dequantization of each op that does both at once.
void split_fakes(Rewrite& rewrite);

// The bytes that a node reads and makes in place of numbers; none: numbers.
struct Bytes {
  std::optional<Quantization> src, dst;
};
// Makes a node that reads one value read the bytes of a dequantization, and make the bytes of a
// quantization that alone reads its result. Clears the outputs of that one.
void join_bytes(const Uses& uses, Node& node, Bytes& bytes);

// int8 constants that a node turns into numbers, and their scales, one per entry of dim `axis`.
struct QuantizedConstant {
  at::Tensor values, scales;  // scales: float32, one entry if there is no axis
  std::int64_t axis;
};
// The constants that `maker` turns into numbers; nothing if there are none, or if a zero point is
// not 0.
std::optional<QuantizedConstant> quantized_constant(const Graph& graph, const Node* maker);

// A node that makes float32 numbers of int8 constants with a scale for each entry of dim 0.
Node dequantization(Rewrite& rewrite, Value bytes, Value scales);

// The packed weights of a layer of bytes, made once.
QuantizedWeights packed(const Running& running, const Node& node,
                        const QuantizedConvolutionPlan& plan, const at::Tensor& weight,
                        const at::Tensor& scales, const at::Tensor& bias);

}  // namespace torch_blocked::graph
