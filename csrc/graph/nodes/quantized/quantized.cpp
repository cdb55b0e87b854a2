// Quantization and dequantization, as PyTorch's quantizers write them into a graph: ops of
// quantized_decomposed, with a dequantization for each reader. A dequantization and a quantization
// with equal parameters cancel, and ops between them that move elements move bytes instead.
//
// Signed bytes become unsigned by adding 128, where only dequantizations read them.
#include "graph/nodes/quantized/quantized.h"

#include <ATen/ops/full.h>
#include <ATen/ops/mul.h>
#include <ATen/ops/zeros.h>

#include <array>

#include "graph/nodes/boxed.h"
#include "graph/planning/planner.h"
#include "kernels/kernels.h"
#include "ops/registered.h"
#include "torch_blocked/threads.h"

namespace torch_blocked::graph {
namespace {

constexpr std::int64_t kSigned = 128;  // what is added to signed bytes

// The ops that quantizers write. Arguments: (input, scale, zero point, least, most, dtype)
struct Op {
  std::string_view name;
  bool quantizes;
};
constexpr auto kOps = std::to_array<Op>({{"quantized_decomposed::quantize_per_tensor", true},
                                         {"quantized_decomposed::dequantize_per_tensor", false}});

// (input, scales, zero points, axis, least, most, dtype)
constexpr std::string_view kPerChannel = "quantized_decomposed::dequantize_per_channel";

const Op* op_of(const Node& node) {
  const auto* found = std::ranges::find(kOps, node.name, &Op::name);
  return found == kOps.end() ? nullptr : found;
}

at::ScalarType dtype_of(const Argument& argument) {
  return argument.is_constant() && argument.constant().isInt()
             ? static_cast<at::ScalarType>(argument.constant().toInt())
             : at::ScalarType::Undefined;
}

// The quantization of a node's op, for unsigned bytes; nothing if its parameters are not constants.
std::optional<Quantization> parameters(const Graph& graph, const Node& node) {
  const at::ScalarType dtype = dtype_of(node.arguments[5]);
  if (dtype != at::kByte && dtype != at::kChar) return std::nullopt;
  return unsigned_quantization(graph, std::span(node.arguments).subspan(1, 4), dtype == at::kChar);
}

// Whether only dequantizations to float32 with known parameters read a node's result.
bool is_for_readers(const Rewrite& rewrite, const Uses& uses, const Node& node) {
  const Value bytes = node.output();
  if (uses.is_output[Uses::at(bytes)]) return false;
  return std::ranges::all_of(uses.readers[Uses::at(bytes)], [&](const Node* reader) {
    const Op* op = op_of(*reader);
    return op && !op->quantizes && reader->read(0) == bytes &&
           rewrite.meta(reader->output()).dtype == at::kFloat &&
           parameters(rewrite.graph, *reader).has_value();
  });
}

void become(Rewrite& rewrite, Node& node, const NodeKind& kind) {
  node.become(kind, {{ValueRef{node.read(0)}}}, Quantized{*parameters(rewrite.graph, node)});
}

void find_ops(Rewrite& rewrite) {
  const Uses uses(rewrite.graph);
  for (Node& node : rewrite.graph.nodes) {
    const Op* op = op_of(node);
    if (!op || !op->quantizes || node.read(0) == kNone) continue;
    const bool from_float = rewrite.meta(node.read(0)).dtype == at::kFloat;
    if (!from_float || !parameters(rewrite.graph, node) || !is_for_readers(rewrite, uses, node)) {
      continue;
    }
    for (Node* reader : uses.readers[Uses::at(node.output())]) {
      become(rewrite, *reader, nodes::dequantize);
    }
    rewrite.metas[Uses::at(node.output())].dtype = at::kByte;
    become(rewrite, node, nodes::quantize);
  }
}

// Whether a node pads with zeros.
bool pads_with_zeros(const Node* node) {
  if (!node || node->held.has_value()) return false;
  if (node->name == "aten::constant_pad_nd") return number(node->arguments[2], 0) == 0;
  return node->name == "aten::pad" && node->arguments[2].constant().toStringView() == "constant" &&
         number(node->arguments[3], 0) == 0;
}

// Quantizes before padding instead of after it. The padding is then the zero point, which the
// convolution behind it can pad with itself.
void pad_bytes(Rewrite& rewrite) {
  const Uses uses(rewrite.graph);
  for (Node& node : rewrite.graph.nodes) {
    const Quantization* q = quantization_of(&node, nodes::quantize);
    Node* pad = q ? uses.maker[Uses::at(node.read(0))] : nullptr;
    if (!pads_with_zeros(pad) || pad->read(0) == kNone) continue;
    if (!uses.only_reader(pad->output()) || q->zero < q->least || q->zero > q->most) continue;
    const Value bytes = add_value(rewrite, {rewrite.meta(pad->read(0)).dims, at::kByte});
    const Argument pads = pad->arguments[1];
    const auto zero = static_cast<double>(q->zero);
    pad->become(nodes::quantize, {{ValueRef{pad->read(0)}}}, node.held);
    std::swap(pad->name, node.name);
    std::swap(pad->overload, node.overload);
    pad->outputs = {bytes};
    node.name = "aten::constant_pad_nd";
    node.overload.clear();
    node.become(nodes::boxed, {{ValueRef{bytes}}, pads, {c10::IValue(zero)}}, {});
  }
}

// Drops quantizations of numbers that were dequantized with the same parameters.
void drop_pairs(Rewrite& rewrite) {
  Graph& graph = rewrite.graph;
  const Uses uses(graph);
  for (Node& node : graph.nodes) {
    const Quantization* q = quantization_of(&node, nodes::quantize);
    if (!q) continue;
    const Node* maker = uses.maker[Uses::at(node.read(0))];
    const Quantization* of_maker = quantization_of(maker, nodes::dequantize);
    if (!of_maker || *of_maker != *q) continue;
    const Value from = node.output(), to = maker->read(0);
    node.outputs.clear();
    replace(graph, from, to);
  }
  sweep(graph);
}

// Whether an op does with bytes what it does with their numbers: it only moves or selects them.
bool moves_bytes(const Node& node) {
  return is_reshape(node) || moves_elements(node) ||
         is_any(node, {"aten::cat", "aten::flatten", "aten::slice", "aten::chunk", "aten::permute",
                       "aten::transpose", "aten::upsample_nearest2d", "aten::max_pool2d"});
}

// An op that moves numbers between a dequantization and a quantization with equal parameters moves
// the bytes instead.
void move_bytes(Rewrite& rewrite) {
  Graph& graph = rewrite.graph;
  const Uses uses(graph);
  for (Node& node : graph.nodes) {
    if (node.held.has_value() || node.outputs.size() != 1 || !moves_bytes(node)) continue;
    Node* reader = uses.only_reader(node.output());
    const Quantization* q = quantization_of(reader, nodes::quantize);
    bool same = q != nullptr;
    for_values(node.arguments, [&](Value value) {
      const Quantization* of_value =
          quantization_of(uses.maker[Uses::at(value)], nodes::dequantize);
      same &= of_value && q && *of_value == *q;
    });
    if (!same) continue;
    const auto bytes_of = [&](auto&& self, std::vector<Argument>& arguments) -> void {
      for (Argument& argument : arguments) {
        if (auto* list = std::get_if<std::vector<Argument>>(&argument.held)) self(self, *list);
        const Value value = argument.value();
        if (value != kNone) argument = {ValueRef{uses.maker[Uses::at(value)]->read(0)}};
      }
    };
    bytes_of(bytes_of, node.arguments);
    rewrite.metas[Uses::at(node.output())].dtype = at::kByte;
    const Value from = reader->output();
    reader->outputs.clear();
    replace(graph, from, node.output());
  }
  sweep(graph);
}

// Dequantizes after a reshape instead of before it, so that a linear layer behind it finds bytes.
void reshape_bytes(Rewrite& rewrite) {
  const Uses uses(rewrite.graph);
  for (Node& node : rewrite.graph.nodes) {
    const bool reshapes = !node.held.has_value() && node.outputs.size() == 1 && is_reshape(node);
    Node* maker = reshapes && node.read(0) != kNone ? uses.maker[Uses::at(node.read(0))] : nullptr;
    const Quantization* q = quantization_of(maker, nodes::dequantize);
    if (!q || uses.only_reader(maker->output()) != &node) continue;
    const Quantized held{*q};
    const Value bytes = add_value(rewrite, {rewrite.meta(node.output()).dims, at::kByte});
    std::vector<Argument> arguments = std::move(node.arguments);
    arguments[0] = maker->arguments[0];
    node.become(nodes::dequantize, {{ValueRef{bytes}}}, held);
    maker->become(nodes::boxed, std::move(arguments), {});
    maker->outputs = {bytes};
    std::swap(maker->name, node.name);
    std::swap(maker->overload, node.overload);
  }
}

void find(Rewrite& rewrite) {
  find_ops(rewrite);
  split_fakes(rewrite);
  pad_bytes(rewrite);
  drop_pairs(rewrite);
  move_bytes(rewrite);
  reshape_bytes(rewrite);
}

std::vector<Meta> as_bytes(const Node& node, const std::vector<Meta>& metas) {
  return {{metas[Uses::at(node.read(0))].dims, at::kByte}};
}

std::vector<Meta> as_numbers(const Node& node, const std::vector<Meta>& metas) {
  return {{metas[Uses::at(node.read(0))].dims, at::kFloat}};
}

// Runs `convert` over the elements of src, in order. Then clears the tail, because 0 may be
// converted to another number.
template <typename From, typename To>
Prepared prepare(const Step& step, const Running& running,
                 void (*convert)(const kernels::Quantizer&, const From*, To*, std::int64_t)) {
  const Slot src = step.reads.at(step.node->read(0)), dst = step.writes[0];
  const SlotPlan& slot = running.plan.slots[dst];
  const bool has_tail = slot.is_blocked() && slot.format.tail(slot.dims[1]) > 0;
  const auto run = [&tensors = running.tensors, src, dst, convert, has_tail,
                    channels = slot.dims.size() > 1 ? slot.dims[1] : 1,
                    quantizer = step.node->as<Quantized>()->quantization.quantizer()] {
    const auto* from = tensors[src].template const_data_ptr<From>();
    auto* to = tensors[dst].template mutable_data_ptr<To>();
    constexpr std::int64_t kPart = 1024;
    const std::int64_t count = tensors[dst].numel();
    parallel_units((count + kPart - 1) / kPart, kPart, [&](std::int64_t begin, std::int64_t end) {
      const std::int64_t first = begin * kPart, last = std::min(end * kPart, count);
      convert(quantizer, from + first, to + first, last - first);
    });
    if (has_tail) clear_tail_(tensors[dst], channels);
  };
  return {run, !has_tail};
}

}  // namespace

std::optional<double> scalar(const Graph& graph, const Argument& argument) {
  if (is_real(argument)) return number(argument, 0);
  const at::Tensor* constant = constant_of(graph, argument);
  if (!constant || constant->numel() != 1) return std::nullopt;
  return constant->to(at::kDouble).item<double>();
}

std::optional<Quantization> unsigned_quantization(const Graph& graph,
                                                  std::span<const Argument> parameters,
                                                  bool is_signed) {
  std::array<double, 4> numbers;
  for (std::size_t i = 0; i < 4; ++i) {
    const auto found = scalar(graph, parameters[i]);
    if (!found) return std::nullopt;
    numbers[i] = *found;
  }
  const auto [scale, zero, least, most] = numbers;
  const std::int64_t more = is_signed ? kSigned : 0;
  const Quantization q{scale, static_cast<std::int64_t>(zero) + more,
                       static_cast<std::int64_t>(least) + more,
                       static_cast<std::int64_t>(most) + more};
  const bool fits = scale > 0 && q.least >= 0 && q.most <= 255 && q.least <= q.most;
  return fits ? std::optional(q) : std::nullopt;
}

at::Tensor along(const at::Tensor& parameters, std::int64_t axis, std::int64_t rank) {
  Dims dims(static_cast<std::size_t>(rank), 1);
  if (axis >= 0) dims[static_cast<std::size_t>(axis)] = parameters.numel();
  return parameters.view(dims);
}

void join_bytes(const Uses& uses, Node& node, Bytes& bytes) {
  const Node* maker = uses.maker[Uses::at(node.read(0))];
  if (const Quantization* q = quantization_of(maker, nodes::dequantize)) {
    bytes.src = *q;
    node.arguments[0] = maker->arguments[0];
  }
  Node* reader = uses.only_reader(node.output());
  if (const Quantization* q = quantization_of(reader, nodes::quantize)) {
    bytes.dst = *q;
    node.outputs = std::exchange(reader->outputs, {});
  }
}

bool makes_numbers(const Node& node) {
  const Op* op = op_of(node);
  return node.name == kPerChannel || (op && !op->quantizes);
}

bool widens_bytes(const Graph& graph, const Node& node) {
  if (makes_numbers(node)) return true;
  const at::Tensor* bytes =
      node.name == "aten::to" ? constant_of(graph, node.arguments[0]) : nullptr;
  return bytes && bytes->scalar_type() == at::kChar && bytes->dim() == 2;
}

std::optional<QuantizedConstant> quantized_constant(const Graph& graph, const Node* maker) {
  if (!maker) return std::nullopt;
  const Op* op = op_of(*maker);
  const bool per_channel = maker->name == kPerChannel;
  if (!per_channel && (!op || op->quantizes)) return std::nullopt;
  const at::Tensor* values = constant_of(graph, maker->arguments[0]);
  if (!values || values->scalar_type() != at::kChar) return std::nullopt;
  if (!per_channel) {
    const auto scale = scalar(graph, maker->arguments[1]),
               zero = scalar(graph, maker->arguments[2]);
    if (!scale || zero != 0) return std::nullopt;
    return QuantizedConstant{*values, at::full({1}, *scale, at::kFloat), -1};
  }
  const at::Tensor *scales = constant_of(graph, maker->arguments[1]),
                   *zeros = constant_of(graph, maker->arguments[2]);
  if (!scales || !zeros || zeros->any().item<bool>() || !maker->arguments[3].is_constant()) {
    return std::nullopt;
  }
  const std::int64_t axis = maker->arguments[3].constant().toInt();
  const bool fits = axis >= 0 && axis < values->dim() && scales->numel() == values->size(axis);
  if (!fits) return std::nullopt;  // it runs as the op, which says what is wrong
  return QuantizedConstant{*values, scales->to(at::kFloat).contiguous(), axis};
}

Node dequantization(Rewrite& rewrite, Value bytes, Value scales) {
  const Dims& dims = rewrite.meta(bytes).dims;
  const Value zeros = add_constant(rewrite, at::zeros({dims[0]}, at::kLong));
  return {.name = std::string(kPerChannel),
          .overload = "",
          .arguments = {{ValueRef{bytes}},
                        {ValueRef{scales}},
                        {ValueRef{zeros}},
                        {c10::IValue(0)},
                        {c10::IValue(-kSigned)},
                        {c10::IValue(kSigned - 1)},
                        {c10::IValue(static_cast<std::int64_t>(at::kChar))},
                        {c10::IValue()}},
          .outputs = {add_value(rewrite, {dims, at::kFloat})}};
}

std::optional<at::Tensor> dequantized_constant(const Graph& graph, const Node& node) {
  const auto constant = quantized_constant(graph, &node);
  if (!constant || !is_none(node.arguments.back())) return std::nullopt;
  const at::Tensor& values = constant->values;
  return at::mul(values.to(at::kFloat), along(constant->scales, constant->axis, values.dim()));
}

std::optional<std::vector<Meta>> results_of_quantizer(const Node& node,
                                                      const std::vector<Meta>& metas) {
  const Op* op = op_of(node);
  if ((!op && node.name != kPerChannel) || node.read(0) == kNone) return std::nullopt;
  const Dims& dims = metas[Uses::at(node.read(0))].dims;
  // The last argument is the type of the bytes or, in dequantizations, that of the numbers.
  const Argument& last = node.arguments.back();
  if (op && op->quantizes) return {{{dims, dtype_of(last)}}};
  return is_none(last) ? std::optional(std::vector<Meta>{{dims, at::kFloat}}) : std::nullopt;
}

QuantizedWeights packed(const Running& running, const Node& node,
                        const QuantizedConvolutionPlan& plan, const at::Tensor& weight,
                        const at::Tensor& scales, const at::Tensor& bias) {
  std::vector<at::Tensor> all{weight, scales};
  if (bias.defined()) all.push_back(bias);
  return {
      running.weights.get(node, {weight}, plan.weights_format, [&] { return plan.pack(weight); }),
      running.weights.get(node, all, plan.channels_format,
                          [&] { return plan.channels(weight, scales, bias); })};
}

constinit const NodeKind nodes::quantize = {
    .name = "quantize",
    .find = find,
    .results = as_bytes,
    .fills = [](const Step&, const SlotPlan&) { return true; },
    .prepare =
        [](const Step& step, const Running& running) {
          return prepare(step, running, kernels::kernels().quantize);
        },
    .implementation = by_torch_blocked,
};

constinit const NodeKind nodes::dequantize = {
    .name = "dequantize",
    .results = as_numbers,
    .fills = [](const Step&, const SlotPlan&) { return true; },
    .prepare =
        [](const Step& step, const Running& running) {
          return prepare(step, running, kernels::kernels().dequantize);
        },
    .implementation = by_torch_blocked,
};

}  // namespace torch_blocked::graph
