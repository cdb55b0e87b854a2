// Turns the ops of a capture into nodes that we have kernels for. simplify(), at the end, has the
// order of the passes.
#include <ATen/ops/full.h>

#include <array>
#include <limits>
#include <set>

#include "format/errors.h"
#include "graph/nodes/boxed.h"
#include "graph/passes/arithmetic.h"
#include "graph/passes/rules.h"
#include "graph/passes/types.h"

namespace torch_blocked::graph {
namespace {

constexpr float kUnbounded = std::numeric_limits<float>::infinity();

constexpr std::array kKinds{
#define NODE(name) &nodes::name,
#include "graph/nodes/list.inc"
#undef NODE
};

void replace(std::vector<Argument>& arguments, Value from, Value to) {
  for (Argument& argument : arguments) {
    if (argument.value() == from) argument.held = ValueRef{to};
    if (auto* list = std::get_if<std::vector<Argument>>(&argument.held)) replace(*list, from, to);
  }
}

// Whether a dropout (input, p, train) is off. One that is on draws random numbers in inference,
// too, because the model asks for it.
bool is_dropout_off(const Node& node) {
  if (!is_any(node, {"aten::dropout", "aten::feature_dropout", "aten::alpha_dropout",
                     "aten::feature_alpha_dropout"})) {
    return false;
  }
  const Argument& train = node.arguments[2];
  return train.is_constant() && train.constant() == c10::IValue(false);
}

// Whether a conversion such as to(self, ...) keeps the type. Its memory format, the last argument,
// does not matter: the plan chooses formats.
bool is_converted_to_itself(const Rewrite& rewrite, const Node& node) {
  if (node.name == "aten::type_as") {
    return rewrite.meta(node.output()).dtype == rewrite.meta(node.read(0)).dtype;
  }
  if (node.name != "aten::to" || node.overload.starts_with("prim_")) return false;
  const auto elsewhere = [](const Argument& argument) {
    return argument.is_constant() && argument.constant().isDevice() &&
           !argument.constant().toDevice().is_cpu();
  };
  const Argument& format = node.arguments.back();
  const bool preserves =
      is_none(format) || number(format, -1) == double(at::MemoryFormat::Preserve);
  return preserves && std::ranges::none_of(node.arguments, elsewhere) &&
         rewrite.meta(node.output()) == rewrite.meta(node.read(0));
}

// A slice or an expansion that is as large as its source: x[:, :].
bool is_whole(const Rewrite& rewrite, const Node& node) {
  return is_any(node, {"aten::slice", "aten::narrow", "aten::expand"}) &&
         rewrite.meta(node.output()) == rewrite.meta(node.read(0));
}

void drop_identities(Rewrite& rewrite) {
  for (Node& node : rewrite.graph.nodes) {
    if (node.outputs.size() != 1 || node.read(0) == kNone) continue;
    if (!is_dropout_off(node) && !is_whole(rewrite, node) &&
        !is_converted_to_itself(rewrite, node) &&
        !is_any(node, {"aten::detach", "aten::alias", "aten::lift_fresh"})) {
      continue;
    }
    const Value from = node.output(), to = node.arguments[0].value();
    node.outputs.clear();
    replace(rewrite.graph, from, to);
  }
  sweep(rewrite.graph);
}

// Whether a layer of ours makes the value, or a pointwise function of such a value. It is then in
// the order that the plan chose, not in strides of ATen's.
bool is_from_layer(const Uses& uses, Value value) {
  constexpr std::string_view kAten = "aten::";
  const Node* maker = value == kNone ? nullptr : uses.maker[Uses::at(value)];
  if (!maker) return false;
  const std::array layers{&nodes::convolution, &nodes::linear, &nodes::pooling, &nodes::affine};
  if (std::ranges::count(layers, maker->kind) > 0) return true;
  return maker->is(nodes::boxed) && maker->name.starts_with(kAten) &&
         is_pointwise(std::string_view(maker->name).substr(kAten.size())) &&
         is_from_layer(uses, maker->read(0));
}

// Drops x.contiguous() of a value that is in order already. Python calls no op then, but traces and
// scripts do.
void drop_contiguous(Rewrite& rewrite) {
  const Uses uses(rewrite.graph);
  for (Node& node : rewrite.graph.nodes) {
    if (!node.is(nodes::boxed) || node.name != "aten::contiguous" || !is_reshape(node)) continue;
    if (!is_from_layer(uses, node.read(0))) continue;
    const Value from = node.output(), to = node.read(0);
    node.outputs.clear();
    replace(rewrite.graph, from, to);
  }
  sweep(rewrite.graph);
}

// Turns tensors of one number that a model makes as it runs, such as x.new_zeros(()), into
// constants.
void fold_fills(Rewrite& rewrite) {
  struct Fill {
    std::string_view name;
    std::size_t value_at;  // 0: `value`
    double value;
  };
  static constexpr auto kFills = std::to_array<Fill>({{"aten::zeros", 0, 0},
                                                      {"aten::ones", 0, 1},
                                                      {"aten::new_zeros", 0, 0},
                                                      {"aten::new_ones", 0, 1},
                                                      {"aten::full", 1, 0},
                                                      {"aten::new_full", 2, 0},
                                                      {"aten::full_like", 1, 0},
                                                      {"aten::zeros_like", 0, 0},
                                                      {"aten::ones_like", 0, 1}});
  Graph& graph = rewrite.graph;
  for (Node& node : graph.nodes) {
    const auto* fill = std::ranges::find(kFills, node.name, &Fill::name);
    if (fill == kFills.end() || !node.overload.empty() || node.outputs.size() != 1) continue;
    const auto& [dims, dtype] = rewrite.meta(node.output());
    if (c10::multiply_integers(dims) != 1 || !at::isFloatingType(dtype)) continue;
    if (fill->value_at > 0 && !is_real(node.arguments[fill->value_at])) continue;
    const double value =
        fill->value_at > 0 ? number(node.arguments[fill->value_at], 0) : fill->value;
    graph.constants[node.output()] = at::full(dims, value, dtype);
    node.outputs.clear();
  }
  sweep(graph);
}

// Why a value (`what`: a node's input or result) can only be in the plain format; empty if it can
// be in others.
std::string not_an_image(const char* what, const Meta& meta) {
  const auto& [dims, dtype] = meta;
  if (dims.size() < 3 || dims.size() > 5) {
    return text("its ", what, " has ", dims.size(),
                " dims, and blocked formats 3 to 5; nothing to do: it is no image");
  }
  if (dtype == at::kFloat || dtype == at::kBFloat16 || dtype == at::kByte) return "";
  const std::string type = c10::toString(dtype);
  const std::string advice =
      c10::isQIntType(dtype) ? "quantize the model by torch_blocked.quantize instead"
                             : text("keep ops on ", type, " together, or convert it to float32");
  return text("its ", what, " is ", type, ", and kernels are for float32 and bfloat16; ", advice);
}

// Why an op that no kind takes reads a value that can only be plain; empty if that is not the
// reason.
std::string reads_no_image(const Rewrite& rewrite, const Node& node) {
  const Value first = node.arguments.empty() ? kNone : node.read(0);
  return first == kNone ? "" : not_an_image("input", rewrite.meta(first));
}

// Assigns a kind to each op that needs no rewriting, in order: a kind may look at the kinds of
// earlier nodes.
void take(Rewrite& rewrite) {
  const Uses uses(rewrite.graph);
  for (Node& node : rewrite.graph.nodes) {
    if (!node.is(nodes::boxed) || node.outputs.size() != 1) continue;
    const std::string reason = not_an_image("result", rewrite.meta(node.output()));
    if (node.declined.empty()) node.declined = reason;
    if (!reason.empty()) continue;
    const Candidate candidate{rewrite.graph, node, uses, rewrite.metas};
    const bool bytes = candidate.result().dtype == at::kByte;
    const auto found = std::ranges::find_if(kKinds, [&](const NodeKind* kind) {
      return (kind->takes_bytes || !bytes) && kind->takes(candidate);
    });
    if (found != kKinds.end()) {
      node.kind = *found;
    } else if (node.declined.empty()) {
      node.declined = reads_no_image(rewrite, node);
    }
  }
}

}  // namespace

std::span<const NodeKind* const> node_kinds() { return kKinds; }

void drop_dead(Graph& graph) {
  for (bool changed = true; changed;) {
    const Uses uses(graph);
    const std::size_t before = graph.nodes.size();
    std::erase_if(graph.nodes, [&](const Node& node) {
      return std::ranges::all_of(node.outputs, [&](Value value) {
        return uses.readers[Uses::at(value)].empty() && !uses.is_output[Uses::at(value)];
      });
    });
    changed = graph.nodes.size() != before;
  }
  std::set<Value> read;
  for (const Node& node : graph.nodes)
    for_values(node.arguments, [&](Value value) { read.insert(value); });
  for_values(graph.outputs, [&](Value value) { read.insert(value); });
  std::erase_if(graph.constants, [&](const auto& each) { return !read.contains(each.first); });
}

void replace(Graph& graph, Value from, Value to) {
  for (Node& node : graph.nodes) replace(node.arguments, from, to);
  replace(graph.outputs, from, to);
}

bool Candidate::reads_images() const {
  bool fits = true;
  for_values(node.arguments, [&](Value value) {
    fits &= !graph.constants.contains(value) && meta(value).dtype == result().dtype &&
            meta(value).dims.size() == result().dims.size();
  });
  return fits;
}

bool Candidate::is_from_image(Value value) const {
  const Node* maker = uses.maker[Uses::at(value)];
  return maker && makes_images(*maker);
}

bool makes_images(const Node& node) {
  const auto fixed = node.kind->fixed(node);
  return !fixed || (fixed->writes != kPlain && fixed->writes != kStrided);
}

std::optional<Activation> find_activation(const Node& node) {
  const auto& a = node.arguments;
  const auto clamp = [](double low, double high) -> std::optional<Activation> {
    if (low > 0 || high < 0) return std::nullopt;  // the tail would not stay zero
    return Activation{Activated::kClamp, static_cast<float>(low), static_cast<float>(high)};
  };
  if (node.name == "aten::relu") return clamp(0, kUnbounded);
  if (node.name == "aten::relu6") return clamp(0, 6);
  if (node.name == "aten::hardtanh") return clamp(number(a[1], -1), number(a[2], 1));
  if (node.name == "aten::clamp" && node.overload.empty()) {
    return clamp(number(a[1], -kUnbounded), number(a[2], kUnbounded));
  }
  if (node.name == "aten::clamp_min" && node.overload.empty()) {
    return clamp(number(a[1], 0), kUnbounded);
  }
  if (node.name == "aten::leaky_relu") {
    return Activation{Activated::kLeakyRelu, static_cast<float>(number(a[1], 0.01)), 0};
  }
  if (node.name == "aten::hardswish") return Activation{Activated::kHardswish};
  if (node.name == "aten::silu") return Activation{Activated::kSilu};
  if (node.name == "aten::tanh") return Activation{Activated::kTanh};
  if (node.name == "aten::mish") return Activation{Activated::kMish};
  if (node.name == "aten::gelu") {
    const bool tanh = a[1].is_constant() && a[1].constant().toStringView() == "tanh";
    return Activation{tanh ? Activated::kGeluTanh : Activated::kGelu};
  }
  return std::nullopt;
}

void join_from_end(Rewrite& rewrite, bool (*join)(const Rewrite&, Node&, const Uses&)) {
  auto& nodes = rewrite.graph.nodes;
  for (bool changed = true; changed;) {
    changed = false;
    const Uses uses(rewrite.graph);
    for (auto node = nodes.rbegin(); node != nodes.rend() && !changed; ++node) {
      changed = !node->outputs.empty() && join(rewrite, *node, uses);
    }
    sweep(rewrite.graph);
  }
}

bool join_epilogue(const Graph& graph, const Node& reader, Value value,
                   const std::vector<Meta>& metas, Epilogue& epilogue, Value& residual) {
  if (const auto activation = find_activation(reader)) {
    Activation& place = epilogue.residual ? epilogue.after : epilogue.before;
    if (place.kind != Activated::kNone) return false;
    place = *activation;
    return true;
  }
  if (reader.name != "aten::add" || reader.overload != "Tensor" || epilogue.residual ||
      number(reader.arguments[2], 1) != 1) {
    return false;
  }
  const Value a = reader.arguments[0].value(), b = reader.arguments[1].value();
  const Value other = a == value ? b : a;
  if (a == b || other == kNone || graph.constants.contains(other)) return false;
  if (metas[Uses::at(other)] != metas[Uses::at(value)]) return false;
  epilogue.residual = true;
  residual = other;
  return true;
}

// Names fill(empty_like(x), number), which 1 / x is made of, by what is known of it.
static void name_fills(Graph& graph) {
  const Uses uses(graph);
  for (Node& node : graph.nodes) {
    if (node.name != "aten::fill" || node.overload != "Scalar" || node.read(0) == kNone) continue;
    const Node* maker = uses.maker[Uses::at(node.read(0))];
    if (!maker || maker->name != "aten::empty_like") continue;
    const Argument value = node.arguments[1];
    node.name = "aten::full_like";
    node.overload.clear();
    node.arguments = maker->arguments;
    node.arguments.insert(node.arguments.begin() + 1, value);
  }
}

void fold_constants(Graph& graph, const Keeps& keep) {
  name_fills(graph);
  std::set<Value> folded;
  for (Node& node : graph.nodes) {
    // The op that dequantizes may not be imported, so it is computed here.
    const auto bytes = dequantized_constant(graph, node);
    // The results of empty() and its variants are not filled, so they are no constants.
    bool constant = bytes || (!is_random(node) && node.name.find("empty") == std::string::npos);
    // For these ops oneDNN trusts sizes that infer() checks only later.
    constant &= !is_any(node, {"aten::lstm", "aten::gru", "aten::rnn_tanh", "aten::rnn_relu"});
    for_values(node.arguments, [&](Value value) { constant &= graph.constants.contains(value); });
    if (!constant || keep(graph, node)) continue;
    const auto results =
        bytes ? std::vector<c10::IValue>{*bytes}
              : call(node, [&](Value value) -> c10::IValue { return graph.constants.at(value); });
    const bool tensors =
        results.size() == node.outputs.size() && std::ranges::all_of(results, [](const auto& each) {
          return each.isTensor() && each.toTensor().defined();
        });
    if (!tensors) continue;
    for (std::size_t i = 0; i < results.size(); ++i) {
      graph.constants[node.outputs[i]] = results[i].toTensor();
      folded.insert(node.outputs[i]);
    }
    node.outputs.clear();
  }
  sweep(graph);
  for_values(graph.outputs, [&](Value value) { folded.erase(value); });
  for (const Node& node : graph.nodes) {
    for_values(node.arguments, [&](Value value) { folded.erase(value); });
  }
  for (const Value value : folded) graph.constants.erase(value);  // only folded nodes read it
}

namespace {

// Keeps what makes weights of linear layers, and nothing else, of bytes.
Keeps for_linear_layers(Graph& graph) {
  const Uses uses(graph);
  std::set<Value> weights;
  for (const Node& node : graph.nodes) {
    if (node.name != "aten::linear" || node.read(1) == kNone) continue;
    if (uses.only_reader(node.read(1))) weights.insert(node.read(1));
  }
  return [weights = std::move(weights)](const Graph& all, const Node& node) {
    return weights.contains(node.output()) && widens_bytes(all, node);
  };
}

}  // namespace

void simplify(Graph& graph, std::vector<Meta> metas, Weights& weights, const Narrowing* narrowing) {
  Rewrite rewrite{graph, metas, weights, narrowing != nullptr};
  drop_identities(rewrite);
  settle_spellings(rewrite);
  open_native_layers(rewrite);
  fold_fills(rewrite);
  forget_examples(rewrite);
  settle_product_ops(rewrite);
  recognize_functions(rewrite);
  for (const NodeKind* kind : kKinds) {
    kind->find(rewrite);
    // Dequantized weights that no layer of bytes has taken become numbers for other layers, those
    // of linear layers once these have looked at the bytes.
    if (kind == &nodes::quantized_convolution) fold_constants(graph, for_linear_layers(graph));
    if (kind == &nodes::linear) fold_constants(graph);
  }
  drop_contiguous(rewrite);
  settle_views(rewrite);
  if (join_token_layers(rewrite)) settle_views(rewrite);
  simplify_sums(rewrite);
  simplify_products(rewrite);
  for (const NodeKind* kind : kKinds) kind->fuse(rewrite);
  take(rewrite);
  for (const NodeKind* kind : kKinds) kind->combine(rewrite);
  join_programs(rewrite);
  drop_dead(graph);
  if (narrowing) settle_types(rewrite, *narrowing);
}

}  // namespace torch_blocked::graph
