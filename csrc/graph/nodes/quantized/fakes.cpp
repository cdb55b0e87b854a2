// Other words for quantization than quantized_decomposed's: ops that quantize and dequantize at
// once, which models that were trained for bytes have, and products of constant bytes with their
// scales.
#include <ATen/ExpandUtils.h>
#include <ATen/ops/full.h>
#include <ATen/ops/mul.h>
#include <ATen/ops/reciprocal.h>
#include <ATen/ops/round.h>
#include <ATen/ops/zeros_like.h>

#include "graph/nodes/quantized/quantized.h"

namespace torch_blocked::graph {
namespace {

// (input, scale, zero point, least, most), each a number or a tensor of one
constexpr std::string_view kPerTensor = "aten::fake_quantize_per_tensor_affine";
// (input, scales, zero points, axis, least, most)
constexpr std::string_view kPerChannel = "aten::fake_quantize_per_channel_affine";

// A constant parameter as a tensor; undefined if it is computed.
at::Tensor parameter(const Graph& graph, const Argument& argument) {
  if (const at::Tensor* found = constant_of(graph, argument)) return *found;
  const auto one = scalar(graph, argument);
  return one ? at::full({1}, *one, at::kDouble) : at::Tensor();
}

// The parameters of a node whose constant it makes signed bytes of zero point 0; else nothing.
struct Weights8 {
  at::Tensor scales, zeros;
  std::int64_t axis;  // -1: one scale for all
  std::int64_t least, most;
};
std::optional<Weights8> weights_of(const Graph& graph, const Node& node) {
  const bool per_channel = node.name == kPerChannel;
  if (!per_channel && node.name != kPerTensor) return std::nullopt;
  const std::size_t bounds = per_channel ? 4 : 3;
  const at::Tensor* numbers = constant_of(graph, node.arguments[0]);
  const auto least = scalar(graph, node.arguments[bounds]),
             most = scalar(graph, node.arguments[bounds + 1]);
  const Weights8 found{parameter(graph, node.arguments[1]), parameter(graph, node.arguments[2]),
                       per_channel ? node.arguments[3].constant().toInt() : -1,
                       static_cast<std::int64_t>(least.value_or(0)),
                       static_cast<std::int64_t>(most.value_or(0))};
  const bool known = numbers && numbers->scalar_type() == at::kFloat && found.scales.defined() &&
                     found.zeros.defined() && least && most;
  if (!known || found.least < -128 || found.most > 127 || found.axis >= numbers->dim()) {
    return std::nullopt;
  }
  const bool fits = found.scales.numel() == (found.axis < 0 ? 1 : numbers->size(found.axis)) &&
                    !found.zeros.any().item<bool>();
  return fits ? std::optional(found) : std::nullopt;
}

// Makes a node dequantize constant bytes of zero point 0, by one scale or one per entry of dim
// `axis`.
void dequantize(Graph& graph, Node& node, const at::Tensor& bytes, const at::Tensor& scales,
                std::int64_t axis, std::int64_t least, std::int64_t most) {
  const auto add = [&](const at::Tensor& constant) -> Argument {
    const Value value = graph.values++;
    graph.constants[value] = constant;
    return {ValueRef{value}};
  };
  const auto is = [](std::int64_t number) -> Argument { return {c10::IValue(number)}; };
  const Argument type = is(static_cast<std::int64_t>(at::kChar)), same_type{c10::IValue()};
  node.overload.clear();
  if (axis < 0) {
    node.name = "quantized_decomposed::dequantize_per_tensor";
    node.arguments = {
        add(bytes), {c10::IValue(scales.item<double>())}, is(0), is(least), is(most), type,
        same_type};
  } else {
    const at::Tensor zeros = at::zeros_like(scales, at::kLong);
    node.name = "quantized_decomposed::dequantize_per_channel";
    node.arguments = {add(bytes), add(scales), add(zeros), is(axis),
                      is(least),  is(most),    type,       same_type};
  }
}

// The dim along which a product of `values` takes other factors; -1 if all are the same, nothing if
// the product is no dequantization.
std::optional<std::int64_t> axis_of(const at::Tensor& values, const at::Tensor& factors) {
  if (values.scalar_type() != at::kChar || factors.scalar_type() != at::kFloat) return std::nullopt;
  if (factors.dim() > values.dim() || values.dim() < 2) return std::nullopt;
  if (factors.numel() == 1) return -1;
  for (std::int64_t i = 1; i <= factors.dim(); ++i) {
    if (factors.size(-i) == factors.numel() && values.size(-i) == factors.numel()) {
      return values.dim() - i;
    }
  }
  return std::nullopt;
}

// Products of constant bytes and scales.
void take_products(Graph& graph) {
  for (Node& node : graph.nodes) {
    if (node.name != "aten::mul" || node.overload != "Tensor") continue;
    for (const std::size_t i : {0, 1}) {
      const at::Tensor *values = constant_of(graph, node.arguments[i]),
                       *factors = constant_of(graph, node.arguments[1 - i]);
      const auto axis = values && factors ? axis_of(*values, *factors) : std::nullopt;
      if (!axis) continue;
      dequantize(graph, node, at::Tensor(*values), factors->flatten(), *axis, -128, 127);
      break;
    }
  }
}

// Differences of such products and zero points that are 0.
void drop_zeros(Graph& graph) {
  const Uses uses(graph);
  for (Node& node : graph.nodes) {
    if (node.name != "aten::sub" || node.overload != "Tensor" || node.read(0) == kNone) continue;
    const Node* maker = uses.maker[Uses::at(node.read(0))];
    const at::Tensor* zeros = constant_of(graph, node.arguments[1]);
    const auto bytes = quantized_constant(graph, maker);
    if (!bytes || !zeros || zeros->any().item<bool>()) continue;
    const bool as_large =
        zeros->dim() <= bytes->values.dim() &&
        at::infer_size(zeros->sizes(), bytes->values.sizes()) == bytes->values.sizes().vec();
    if (!as_large || at::promote_types(zeros->scalar_type(), at::kFloat) != at::kFloat) continue;
    const Value from = node.output(), to = maker->output();
    node.outputs.clear();
    replace(graph, from, to);
  }
  sweep(graph);
}

}  // namespace

void quantize_weights(Graph& graph) {
  take_products(graph);
  drop_zeros(graph);
  for (Node& node : graph.nodes) {
    const auto found = weights_of(graph, node);
    if (!found) continue;
    const at::Tensor& numbers = graph.constants.at(node.read(0));
    // As ATen rounds: with the inverse, in float32.
    const at::Tensor scales = found->scales.to(at::kFloat);
    const at::Tensor bytes =
        at::round(at::mul(numbers, along(at::reciprocal(scales), found->axis, numbers.dim())))
            .clamp(found->least, found->most)
            .to(at::kChar);
    dequantize(graph, node, bytes, scales.flatten(), found->axis, found->least, found->most);
  }
}

void split_fakes(Rewrite& rewrite) {
  std::vector<Node> nodes = std::move(rewrite.graph.nodes);
  std::vector<Node>& made = rewrite.graph.nodes = {};
  for (Node& node : nodes) {
    const bool of_float = node.name == kPerTensor && node.read(0) != kNone &&
                          rewrite.meta(node.read(0)).dtype == at::kFloat;
    const bool is_signed = of_float && number(node.arguments[3], 0) < 0;
    const auto q = of_float ? unsigned_quantization(
                                  rewrite.graph, std::span(node.arguments).subspan(1, 4), is_signed)
                            : std::nullopt;
    if (q) {
      Node first = node;
      first.become(nodes::quantize, {{ValueRef{node.read(0)}}}, Quantized{*q});
      first.outputs = {add_value(rewrite, {rewrite.meta(node.read(0)).dims, at::kByte})};
      node.become(nodes::dequantize, {{ValueRef{first.output()}}}, Quantized{*q});
      made.push_back(std::move(first));
    }
    made.push_back(std::move(node));
  }
}

}  // namespace torch_blocked::graph
