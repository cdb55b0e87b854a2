// What the passes over a graph share.
#pragma once

#include "graph/aten.h"
#include "graph/node_kind.h"
#include "kernels/vector/epilogue.h"

namespace torch_blocked::graph {

using kernels::Activation;
using kernels::Epilogue;
using Activated = Activation::Kind;

// nodes/quantized.cpp: whether a node makes numbers of bytes, which layers of bytes read as such.
bool makes_numbers(const Node& node);

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
      for_values(node.arguments, [&](Value value) { readers[at(value)].push_back(&node); });
    }
    for_values(graph.outputs, [&](Value value) { is_output[at(value)] = true; });
  }

  static std::size_t at(Value value) { return static_cast<std::size_t>(value); }
  // The only reader of a value that is no output of the graph; else null.
  Node* only_reader(Value value) const {
    const auto& all = readers[at(value)];
    return all.size() == 1 && !is_output[at(value)] ? all[0] : nullptr;
  }
};

inline const at::Tensor* constant_of(const Graph& graph, const Argument& argument) {
  const auto found = graph.constants.find(argument.value());
  return found == graph.constants.end() ? nullptr : &found->second;
}

// Takes out nodes marked by having no outputs.
inline void sweep(Graph& graph) {
  std::erase_if(graph.nodes, [](const Node& node) { return node.outputs.empty(); });
}

// The reads of a node with an epilogue: the second is there for sums only.
inline std::vector<Argument> with_residual(Value src, Value residual) {
  std::vector<Argument> reads{{ValueRef{src}}};
  if (residual != kNone) reads.push_back({ValueRef{residual}});
  return reads;
}

// "aten::conv2d + relu": what a node stands for, and one more op.
inline std::string joined_name(const std::string& name, const Node& more) {
  return name + " + " + more.name.substr(std::string_view("aten::").size());
}

// The graph that passes change. Metas are those of its values; who adds a value adds its meta.
struct Rewrite {
  Graph& graph;
  std::vector<Meta>& metas;
  Weights& weights;

  const Meta& meta(Value value) const { return metas[Uses::at(value)]; }
};

inline Value add_value(Rewrite& rewrite, const Meta& meta) {
  rewrite.metas.push_back(meta);
  return rewrite.graph.values++;
}

inline Value add_constant(Rewrite& rewrite, const at::Tensor& constant) {
  const Value value = add_value(rewrite, {constant.sizes().vec(), constant.scalar_type()});
  rewrite.graph.constants[value] = constant;
  return value;
}

// nodes/softmax.cpp: whether a node is a softmax over the last dim.
bool is_softmax_of_rows(const Rewrite& rewrite, const Node& node);

// A node whose only result is an image, [N, C, *spatial] of floats, and that no kind has taken.
struct Candidate {
  const Graph& graph;
  const Node& node;
  const Uses& uses;
  const std::vector<Meta>& metas;

  const Meta& meta(Value value) const { return metas[Uses::at(value)]; }
  const Meta& result() const { return meta(node.output()); }
  // Whether all that it reads are images of that type and rank, and no constants.
  bool reads_images() const;
  // Whether a value comes from a node that makes images in any format.
  bool is_from_image(Value value) const;
};

// Whether what a node makes may be in another format than plain.
bool makes_images(const Node& node);

// scaling.cpp: batch norms in inference become part of their neighbours' weights, or affine;
// products with constants per channel, and sums with them, become part of weights.
void fold_scalings(Rewrite& rewrite);

// views.cpp: reshapes to the dims of another value do not read it any more; these dims are known.
void forget_examples(Rewrite& rewrite);
// views.cpp: activations move over views and concats to the layers before these.
void settle_views(Rewrite& rewrite);

// spellings.cpp: ops under the names by which the passes look for them.
void settle_spellings(Rewrite& rewrite);
void settle_masks(Graph& graph);

// native_layers.cpp: layers that ATen has as one op, as those of transformers, as what these are
// of.
void open_native_layers(Rewrite& rewrite);

// product_ops.cpp: mm, addmm, einsum and others become linear layers, 1x1 convolutions or matmul.
void settle_product_ops(Rewrite& rewrite);
// product_ops.cpp: the dims of a matmul of matrices of these dims.
Dims matmul_dims(const Dims& left, const Dims& right);

// token_layers.cpp: linear layers next to an image whose pixels are their tokens become 1x1
// convolutions of it; false if there are none.
bool join_token_layers(Rewrite& rewrite);

// sums_of_layers.cpp: convolutions and affines of the same image that are summed become one.
void simplify_sums(Rewrite& rewrite);

// nodes/program.cpp: programs of one image that only they read run in the layer that makes it.
void join_programs(Rewrite& rewrite);

// one_by_one.cpp: 1x1 convolutions behind another become one, and move before what enlarges images.
void simplify_products(Rewrite& rewrite);

// simplify.cpp: all reads of `from` become reads of `to`.
void replace(Graph& graph, Value from, Value to);

// simplify.cpp: takes out nodes and constants that nobody reads.
void drop_dead(Graph& graph);

// The activation that a node is of its first argument; nothing if kernels have no such activation.
std::optional<Activation> find_activation(const Node& node);

// Joins nodes with their readers, from the end on until join() finds none: of two layers that are
// summed the later then takes the sum, and the earlier's result, which is there by then, is its
// residual. join() takes a node that is still there, and says whether it joined it.
void join_from_end(Rewrite& rewrite,
                   bool (*join)(const Rewrite& rewrite, Node& node, const Uses& uses));

// Adds `reader`, the only reader of `value`, to the epilogue of what makes the value, with the
// value that joins a sum as residual. False, and nothing changes, if it cannot happen there.
bool join_epilogue(const Graph& graph, const Node& reader, Value value,
                   const std::vector<Meta>& metas, Epilogue& epilogue, Value& residual);

}  // namespace torch_blocked::graph
