// Decides which values are bfloat16, and converts where a node reads another type than its operand
// has.
//
// A node that has a kernel in bfloat16 and is a product (convolution, linear) computes in it. What
// surrounds products follows them, so that conversions are few. Everything else stays in float32:
// ops without such a kernel, positions, statistics, and sums with a value that is float32. These
// are the rules of torch.autocast, with one difference: constants do not decide a type.
#include "graph/passes/types.h"

#include <algorithm>

#include "graph/passes/rules.h"
#include "runtime/isa.h"

namespace torch_blocked::graph {
namespace {

// ATen's ops whose results are elements of what they read, in another place.
bool only_moves(const Node& node) {
  return moves_elements(node) ||
         is_any(node,
                {"aten::cat", "aten::stack", "aten::expand", "aten::slice", "aten::select",
                 "aten::narrow", "aten::split", "aten::chunk", "aten::unbind", "aten::index_select",
                 "aten::flip", "aten::roll", "aten::repeat", "aten::clone", "aten::movedim",
                 "aten::swapaxes", "aten::adjoint", "aten::split_with_sizes"});
}

Types types_of(const Rewrite& rewrite, const Node& node) {
  const bool makes_numbers = std::ranges::any_of(
      node.outputs, [&](Value value) { return rewrite.meta(value).dtype == at::kFloat; });
  if (!makes_numbers) return Types::kFloat32;
  if (node.is(nodes::boxed)) return only_moves(node) ? Types::kFollows : Types::kFloat32;
  return node.kind->types(rewrite, node);
}

class Typing {
 public:
  Typing(Rewrite& rewrite, const Narrowing& narrowing) : rewrite_(rewrite), narrowing_(narrowing) {}

  void run() {
    Graph& graph = rewrite_.graph;
    for (const Node& node : graph.nodes) {
      types_.push_back(is_in_float32(node) ? Types::kFloat32 : types_of(rewrite_, node));
      decide(node, types_.back());
    }
    const Uses uses(graph);
    for (std::size_t i = graph.nodes.size(); i-- > 0;) {
      if (types_[i] == Types::kEachItsOwn) suit_readers(graph.nodes[i], uses);
    }
    convert();
  }

 private:
  bool is_kept(std::string_view module) const {
    return std::ranges::any_of(narrowing_.keep, [&](const std::string& path) {
      return path.empty() || module == path || module.starts_with(path + ".");
    });
  }

  // Counts stretches, so it is called for each node in order.
  bool is_in_float32(const Node& node) {
    const bool wide = narrowing_.in_float32.contains(stretch_) || is_kept(node.origin.module);
    if (std::ranges::any_of(node.outputs,
                            [&](Value value) { return narrowing_.cuts.contains(value); })) {
      ++stretch_;
    }
    return wide;
  }

  bool is_number(Value value) const { return rewrite_.meta(value).dtype == at::kFloat; }

  double elements(Value value) const {
    return static_cast<double>(c10::multiply_integers(rewrite_.meta(value).dims));
  }

  // The values that a node reads in the type of its result, except constants.
  template <typename F>
  void for_operands(const Node& node, F&& f) const {
    for_values(tied(node), [&](Value value) {
      if (is_number(value) && !rewrite_.graph.constants.contains(value)) f(value);
    });
  }

  // Some kinds read parameters behind the operands, in float32 always.
  static std::span<const Argument> tied(const Node& node) {
    return std::span(node.arguments)
        .first(std::min(node.arguments.size(),
                        node.is(nodes::boxed) ? std::size_t{1} : node.kind->tied_end));
  }

  void decide(const Node& node, Types types) {
    if (types == Types::kFloat32) return;
    double narrow = 0, wide = 0;
    const bool each = types == Types::kEachItsOwn;
    for_operands(node, [&](Value value) {
      // What broadcasts is small, and does not decide.
      if (each && elements(value) != elements(node.output())) return;
      (narrow_.contains(value) ? narrow : wide) += elements(value);
    });
    // A sum of both types stays in float32. A concat takes the type of most of it.
    const bool follows = narrow > 0 && (each ? wide == 0 : narrow >= wide);
    if (types != Types::kProduct && !follows) return;
    for (const Value value : node.outputs) {
      if (is_number(value)) narrow_.insert(value);
    }
  }

  // Whether a node reads a value in bfloat16; nothing if it takes both.
  std::optional<bool> wanted_by(const Node& reader) const {
    const Types types = types_[static_cast<std::size_t>(&reader - rewrite_.graph.nodes.data())];
    if (types == Types::kEachItsOwn) return std::nullopt;
    return types != Types::kFloat32 && narrow_.contains(reader.output());
  }

  // Makes the result of a node that can have both types the one that all of its readers want.
  void suit_readers(const Node& node, const Uses& uses) {
    const Value value = node.output();
    bool narrow = false, wide = uses.is_output[Uses::at(value)];
    for (const Node* reader : uses.readers[Uses::at(value)]) {
      const auto wants = wanted_by(*reader);
      narrow |= wants == true;
      wide |= wants == false;
    }
    if (wide && !narrow) narrow_.erase(value);
    if (narrow && !wide) narrow_.insert(value);
  }

  void convert() {
    Graph& graph = rewrite_.graph;
    std::vector<Node> nodes;
    for (const Value value : narrow_) rewrite_.metas[Uses::at(value)].dtype = at::kBFloat16;
    for (std::size_t i = 0; i < graph.nodes.size(); ++i) {
      Node node = std::move(graph.nodes[i]);
      const bool narrow = types_[i] != Types::kFloat32 && narrow_.contains(node.output());
      if (types_[i] != Types::kEachItsOwn) {
        const std::size_t count = narrow ? tied(node).size() : node.arguments.size();
        for (std::size_t k = 0; k < count; ++k) {
          read(node.arguments[k], narrow, node.origin, nodes);
        }
      }
      if (narrow && node.kind->narrow) node.kind->narrow(rewrite_, node);
      nodes.push_back(std::move(node));
    }
    for (Argument& output : graph.outputs) read(output, false, {}, nodes);
    graph.nodes = std::move(nodes);
  }

  // Lets an argument be the value in the other type if it does not have the wanted one.
  void read(Argument& argument, bool narrow, const Origin& origin, std::vector<Node>& nodes) {
    if (auto* list = std::get_if<std::vector<Argument>>(&argument.held)) {
      for (Argument& each : *list) read(each, narrow, origin, nodes);
      return;
    }
    const Value value = argument.value();
    if (value == kNone) return;
    const auto found = converted_.find({value, narrow});
    if (found != converted_.end()) {
      argument = {ValueRef{found->second}};
      return;
    }
    if (rewrite_.graph.constants.contains(value)) {
      if (narrow && is_number(value)) {
        const at::Tensor constant = narrowed(rewrite_, rewrite_.graph.constants.at(value));
        argument = {ValueRef{converted_[{value, true}] = add_constant(rewrite_, constant)}};
      }
      return;
    }
    if (narrow ? !is_number(value) : !narrow_.contains(value)) return;
    const Meta meta{rewrite_.meta(value).dims, narrow ? at::kBFloat16 : at::kFloat};
    const Value result = converted_[{value, narrow}] = add_value(rewrite_, meta);
    nodes.push_back(conversion(rewrite_, value, result, origin));
    argument = {ValueRef{result}};
  }

  Rewrite& rewrite_;
  const Narrowing& narrowing_;
  std::size_t stretch_ = 0;
  std::vector<Types> types_;  // by node
  std::set<Value> narrow_;
  std::map<std::pair<Value, bool>, Value> converted_;  // by the value and whether to bfloat16
};

}  // namespace

at::Tensor narrowed(Rewrite& rewrite, const at::Tensor& constant) {
  return rewrite.weights
      .folded({constant}, "to bfloat16", [&] { return Folded{{}, constant.to(at::kBFloat16)}; })
      .bias;
}

void settle_types(Rewrite& rewrite, const Narrowing& narrowing) {
  if (multiplies_bfloats()) Typing(rewrite, narrowing).run();
}

}  // namespace torch_blocked::graph
