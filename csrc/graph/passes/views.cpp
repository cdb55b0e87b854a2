// Moves activations past views and concats to the layers before them, where a kernel applies them
// for free, and removes views that undo each other.
#include "graph/nodes/layers.h"
#include "graph/passes/rules.h"

namespace torch_blocked::graph {
namespace {

bool is_layer(const Node* node) { return node && (node->as<Convolution>() || node->as<Linear>()); }

class Views {
 public:
  explicit Views(Rewrite& rewrite) : rewrite_(rewrite), uses_(rewrite.graph) {}

  // Moves one activation one view or concat up; false if there is none to move.
  bool hoist_one() {
    for (Node& node : rewrite_.graph.nodes) {
      if (node.held.has_value() || !find_activation(node)) continue;
      Node* before = uses_.only_reader(node.read(0)) ? maker(node.read(0)) : nullptr;
      if (!before || before->held.has_value() || !comes_from_layers(*before)) continue;
      if (is_join(*before)) {
        hoist_over_concat(node, *before);
      } else {
        hoist_over_view(node, *before);
      }
      return true;
    }
    return false;
  }

  // Drops a reshape back to the dims of a layer's result, which is dense; false if there is none.
  bool drop_one() {
    for (Node& node : rewrite_.graph.nodes) {
      if (!is_reshape(node) || node.outputs.size() != 1) continue;
      Node* before = maker(node.read(0));
      if (!before || !is_reshape(*before)) continue;
      const Value whole = before->read(0), result = node.output();
      if (!is_layer(maker(whole)) || rewrite_.meta(whole) != rewrite_.meta(result)) continue;
      node.outputs.clear();
      if (uses_.only_reader(before->output())) before->outputs.clear();
      replace(rewrite_.graph, result, whole);
      sweep(rewrite_.graph);
      return true;
    }
    return false;
  }

 private:
  Node* maker(Value value) const { return uses_.maker[Uses::at(value)]; }

  bool is_join(const Node& node) const {
    return is_concat(node, 1, rewrite_.meta(node.output()).dims.size());
  }

  // Whether all elements of a node's result come from layers that nobody else reads.
  bool comes_from_layers(const Node& node) const {
    if (!is_join(node) && !moves_elements(node)) return false;
    bool all = true;
    const auto check = [&](Value value) {
      const Node* before = uses_.only_reader(value) ? maker(value) : nullptr;
      all = all && before && (is_layer(before) || comes_from_layers(*before));
    };
    if (is_join(node)) {
      for_values(node.arguments, check);
    } else {
      check(node.read(0));
    }
    return all;
  }

  // The same activation as `like`, of `value`.
  Node activation_of(const Node& like, Value value) {
    Graph& graph = rewrite_.graph;
    Node node = like;
    node.arguments[0] = {ValueRef{value}};
    node.outputs = {graph.values++};
    const Meta meta = rewrite_.meta(value);
    rewrite_.metas.push_back(meta);
    return node;
  }

  void hoist_over_view(Node& activation, Node& view) {
    Node moved = activation_of(activation, view.read(0));
    Node after = view;
    after.arguments[0] = {ValueRef{moved.output()}};
    after.outputs = activation.outputs;
    view = std::move(moved);
    activation = std::move(after);
  }

  void hoist_over_concat(Node& activation, Node& concat) {
    Node joined = concat;
    joined.outputs = activation.outputs;
    std::vector<Node> moved;
    for_each_value(joined.arguments, [&](Argument& operand) {
      moved.push_back(activation_of(activation, operand.value()));
      operand = {ValueRef{moved.back().output()}};
    });
    activation = std::move(joined);
    concat.outputs.clear();
    auto& nodes = rewrite_.graph.nodes;
    const auto place = nodes.begin() + (&concat - nodes.data());
    nodes.insert(place, std::make_move_iterator(moved.begin()),
                 std::make_move_iterator(moved.end()));
    sweep(rewrite_.graph);
  }

  template <typename F>
  static void for_each_value(std::vector<Argument>& arguments, F&& f) {
    for (Argument& argument : arguments) {
      if (argument.value() != kNone) f(argument);
      if (auto* list = std::get_if<std::vector<Argument>>(&argument.held)) for_each_value(*list, f);
    }
  }

  Rewrite& rewrite_;
  Uses uses_;
};

}  // namespace

void forget_examples(Rewrite& rewrite) {
  for (Node& node : rewrite.graph.nodes) {
    if (!is_any(node, {"aten::reshape_as", "aten::view_as"})) continue;
    node.name = "aten::reshape";
    node.overload.clear();
    node.arguments[1] = {c10::IValue(rewrite.meta(node.output()).dims)};
  }
}

void settle_views(Rewrite& rewrite) {
  while (Views(rewrite).drop_one()) {
  }
  while (Views(rewrite).hoist_one()) {
  }
}

}  // namespace torch_blocked::graph
