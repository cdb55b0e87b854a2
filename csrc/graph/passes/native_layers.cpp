// Replaces transformer layers that ATen has as one op by linear layers, attention and norms.
// Modules in evaluation mode call such ops.

#include "graph/passes/rules.h"

namespace torch_blocked::graph {
namespace {

using c10::IValue;

Argument constant(IValue value) { return {std::move(value)}; }
Argument list(std::initializer_list<std::int64_t> numbers) {
  std::vector<Argument> items;
  for (const std::int64_t number : numbers) items.push_back(constant(number));
  return {std::move(items)};
}

class NativeLayers {
 public:
  explicit NativeLayers(Rewrite& rewrite) : rewrite_(rewrite) {}

  void open_all() {
    const Uses uses(rewrite_.graph);
    std::vector<Node> nodes = std::move(rewrite_.graph.nodes);
    for (Node& node : nodes) {
      origin_ = node.origin;
      if (is_attention(node, uses)) {
        attention(node);
      } else if (is_encoder(node)) {
        encoder(node);
      } else {
        made_.push_back(std::move(node));
        continue;
      }
      made_.back().outputs = {node.outputs[0]};
    }
    rewrite_.graph.nodes = std::move(made_);
  }

 private:
  // Whether a node works on tokens [N, L, C] of one type, without a mask.
  bool is_of_tokens(const Node& node, std::size_t mask) const {
    const Meta& result = rewrite_.meta(node.outputs[0]);
    bool same = result.dims.size() == 3;
    for_values(node.arguments,
               [&](Value value) { same &= rewrite_.meta(value).dtype == result.dtype; });
    return same && is_none(node.arguments[mask]);
  }

  // (query, key, value, embed_dim, heads, 4: weights of the layers, mask, need_weights, ...)
  bool is_attention(const Node& node, const Uses& uses) const {
    if (node.name != "aten::_native_multi_head_attention" || !node.overload.empty()) return false;
    const Value weights = node.outputs[1];
    const bool is_read =
        !uses.readers[Uses::at(weights)].empty() || uses.is_output[Uses::at(weights)];
    return !is_read && is_of_tokens(node, 9) && node.read(0) == node.read(1) &&
           node.read(1) == node.read(2);
  }

  void attention(const Node& node) {
    const auto& a = node.arguments;
    attended(a[0], a[4].constant().toInt(), {&a[5], 4});
  }

  // (src, embed_dim, heads, 3: weights of the attention, 7: use_gelu, norm_first, eps, 10: weights
  // of norms, 14: of linear layers, 18: mask, ...)
  bool is_encoder(const Node& node) const {
    return node.name == "aten::_transformer_encoder_layer_fwd" && node.overload.empty() &&
           is_of_tokens(node, 18);
  }

  void encoder(const Node& node) {
    const auto& a = node.arguments;
    const std::int64_t heads = a[2].constant().toInt();
    const bool first = a[8].constant().toBool();
    const auto normed = [&](const Argument& tokens, std::size_t weights) {
      return add("aten::layer_norm", "",
                 {tokens, list({rewrite_.meta(tokens.value()).dims[2]}), a[weights], a[weights + 1],
                  a[9], constant(true)});
    };
    const auto summed = [&](const Argument& left, const Argument& right) {
      return add("aten::add", "Tensor", {left, right, constant(1)});
    };
    const auto fed_forward = [&](const Argument& tokens) {
      const Argument wide = add("aten::linear", "", {tokens, a[14], a[15]});
      const Argument active = a[7].constant().toBool()
                                  ? add("aten::gelu", "", {wide, constant("none")})
                                  : add("aten::relu", "", {wide});
      return add("aten::linear", "", {active, a[16], a[17]});
    };
    if (first) {
      const Argument between = summed(a[0], attended(normed(a[0], 10), heads, {&a[3], 4}));
      summed(between, fed_forward(normed(between, 12)));
    } else {
      const Argument between = normed(summed(a[0], attended(a[0], heads, {&a[3], 4})), 10);
      normed(summed(between, fed_forward(between)), 12);
    }
  }

  // Attention of tokens [N, L, C]. `weights`: those of the layer that makes queries, keys and
  // values, then those of the output layer.
  Argument attended(const Argument& tokens, std::int64_t heads, std::span<const Argument> weights) {
    const Dims dims = rewrite_.meta(tokens.value()).dims;
    const std::int64_t n = dims[0], l = dims[1], c = dims[2];
    const Argument all = add("aten::linear", "", {tokens, weights[0], weights[1]});
    const Argument of_heads = add("aten::view", "", {all, list({n, l, 3, heads, c / heads})});
    const Argument in_turn = add("aten::permute", "", {of_heads, list({2, 0, 3, 1, 4})});
    std::array<Argument, 3> parts;
    for (std::int64_t i = 0; i < 3; ++i) {
      parts[static_cast<std::size_t>(i)] =
          add("aten::select", "int", {in_turn, constant(0), constant(i)});
    }
    const Argument result = add("aten::scaled_dot_product_attention", "",
                                {parts[0], parts[1], parts[2], constant({}), constant(0.0),
                                 constant(false), constant({}), constant(false)});
    const Argument back = add("aten::transpose", "int", {result, constant(1), constant(2)});
    const Argument joined = add("aten::reshape", "", {back, list({n, l, c})});
    return add("aten::linear", "", {joined, weights[2], weights[3]});
  }

  // Adds a node. There must be a rule for the sizes of its result.
  Argument add(const char* name, const char* overload, std::vector<Argument> arguments) {
    Node node{
        .name = name, .overload = overload, .arguments = std::move(arguments), .outputs = {kNone}};
    node.origin = origin_;
    node.outputs = {add_value(rewrite_, known_results(node, rewrite_.metas).value()[0])};
    made_.push_back(std::move(node));
    return {ValueRef{made_.back().output()}};
  }

  Rewrite& rewrite_;
  std::vector<Node> made_;
  Origin origin_;
};

}  // namespace

void open_native_layers(Rewrite& rewrite) { NativeLayers(rewrite).open_all(); }

}  // namespace torch_blocked::graph
