// What the passes over a graph share.
#pragma once

#include <algorithm>
#include <initializer_list>
#include <string_view>

#include "graph/graph.h"

namespace torch_blocked::graph {

using Activated = Activation::Kind;

// Who makes and who reads each value.
struct Uses {
  std::vector<Node*> maker;
  std::vector<std::vector<Node*>> readers;
  std::vector<bool> is_output;

  explicit Uses(Graph& graph)
      : maker(static_cast<std::size_t>(graph.values)),
        readers(maker.size()),
        is_output(maker.size()) {
    for (Node& node : graph.nodes) {
      for (const Value value : node.outputs) maker[at(value)] = &node;
      for_reads(node, [&](Value value) { readers[at(value)].push_back(&node); });
    }
    for_arguments(graph.outputs, [&](Value value) { is_output[at(value)] = true; });
  }

  static std::size_t at(Value value) { return static_cast<std::size_t>(value); }
  // The only reader of a value that is no output of the graph; else null.
  Node* only_reader(Value value) const {
    const auto& all = readers[at(value)];
    return all.size() == 1 && !is_output[at(value)] ? all[0] : nullptr;
  }
};

inline bool is_any(const Node& node, std::initializer_list<std::string_view> names) {
  return std::ranges::find(names, std::string_view(node.name)) != names.end();
}

inline const at::Tensor* constant_of(const Graph& graph, const Argument& argument) {
  const auto found = graph.constants.find(argument.value());
  return found == graph.constants.end() ? nullptr : &found->second;
}

inline bool is_none(const Argument& argument) {
  return argument.is_constant() && argument.constant().isNone();
}

inline double number(const Argument& argument, double missing) {
  if (!argument.is_constant() || !argument.constant().isScalar()) return missing;
  return argument.constant().toScalar().toDouble();
}

// Takes out nodes marked by having no outputs.
inline void sweep(Graph& graph) {
  std::erase_if(graph.nodes, [](const Node& node) { return node.outputs.empty(); });
}

// "aten::conv2d + relu": what a node stands for, and one more op.
inline std::string joined_name(const std::string& name, const Node& more) {
  return name + " + " + more.name.substr(std::string_view("aten::").size());
}

// batch_norm.cpp: before zero padding and residuals join the convolutions, which would stand in the
// way.
void fold_batch_norms(Graph& graph, const std::vector<Meta>& metas, Weights& weights);

// The activation that a node is of its first argument; nothing if kernels have none such.
std::optional<Activation> find_activation(const Node& node);

// Whether `reader`, the only reader of `value`, can happen in the epilogue of what makes it; then
// it is added there, with the value that joins a sum as residual.
bool join_epilogue(const Graph& graph, const Node& reader, Value value,
                   const std::vector<Meta>& metas, Epilogue& epilogue, Value& residual);

}  // namespace torch_blocked::graph
