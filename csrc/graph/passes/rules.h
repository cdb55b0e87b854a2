// What the passes over a graph share.
#pragma once

#include "graph/aten.h"
#include "graph/node_kind.h"
#include "kernels/vector/epilogue.h"

namespace torch_blocked::graph {

using kernels::Activation;
using kernels::Epilogue;
using Activated = Activation::Kind;

// nodes/quantized/quantized.cpp: whether a node turns bytes into numbers; layers of bytes read the
// bytes themselves.
bool makes_numbers(const Node& node);
// The same for constants, also by a conversion to float32.
bool widens_bytes(const Graph& graph, const Node& node);
// The results of a quantizer's op, which is written in Python and may not be imported; nothing for
// other nodes.
std::optional<std::vector<Meta>> results_of_quantizer(const Node& node,
                                                      const std::vector<Meta>& metas);
// The numbers of a node that dequantizes constants of zero point 0; nothing for other nodes.
std::optional<at::Tensor> dequantized_constant(const Graph& graph, const Node& node);
// nodes/quantized/fakes.cpp: makes weights that are bytes in other words dequantizations of bytes.
void quantize_weights(Graph& graph);

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

// Removes nodes without outputs: passes mark what is to be removed by clearing them.
inline void sweep(Graph& graph) {
  std::erase_if(graph.nodes, [](const Node& node) { return node.outputs.empty(); });
}

// The reads of a node with an epilogue: only sums have the second.
inline std::vector<Argument> with_residual(Value src, Value residual) {
  std::vector<Argument> reads{{ValueRef{src}}};
  if (residual != kNone) reads.push_back({ValueRef{residual}});
  return reads;
}

// "aten::conv2d + relu": a node's name with one more op.
inline std::string joined_name(const std::string& name, const Node& more) {
  return name + " + " + more.name.substr(std::string_view("aten::").size());
}

// The graph that passes change, and the metas of its values. Whoever adds a value adds its meta.
struct Rewrite {
  Graph& graph;
  std::vector<Meta>& metas;
  Weights& weights;
  bool narrows = false;  // settle_types() will make parts of it bfloat16

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

// nodes/rows/softmax.cpp: whether a node is a softmax over the last dim.
bool is_softmax_of_rows(const Rewrite& rewrite, const Node& node);

// A node that no kind has taken, whose only result is an image: floats [N, C, *spatial].
struct Candidate {
  const Graph& graph;
  const Node& node;
  const Uses& uses;
  const std::vector<Meta>& metas;

  const Meta& meta(Value value) const { return metas[Uses::at(value)]; }
  const Meta& result() const { return meta(node.output()); }
  // Whether it reads only images of that type and rank, and no constants.
  bool reads_images() const;
  // Whether a value comes from a node that makes images in any format.
  bool is_from_image(Value value) const;
};

// Whether a node's result may be in another format than plain.
bool makes_images(const Node& node);

// scaling.cpp: folds batch norms into their neighbours' weights, or makes them affine nodes; folds
// products and sums with constants per channel into weights.
void fold_scalings(Rewrite& rewrite);

// views.cpp: reshapes to the dims of another value stop reading that value, since its dims are
// known.
void forget_examples(Rewrite& rewrite);
// views.cpp: moves activations past views and concats to the layers before them.
void settle_views(Rewrite& rewrite);

// spellings.cpp: renames ops to the spellings that the passes look for.
void settle_spellings(Rewrite& rewrite);
void settle_masks(Graph& graph);

// native_layers.cpp: replaces layers that ATen has as one op, such as transformer layers, by the
// ops that they consist of.
void open_native_layers(Rewrite& rewrite);

// product_ops.cpp: turns mm, addmm, einsum and others into linear layers, 1x1 convolutions or
// matmul.
void settle_product_ops(Rewrite& rewrite);
// product_ops.cpp: the dims of the matmul of tensors of these dims.
Dims matmul_dims(const Dims& left, const Dims& right);

// token_layers.cpp: turns linear layers into 1x1 convolutions where their tokens are the pixels of
// a neighbouring image; false if there are none.
bool join_token_layers(Rewrite& rewrite);

// sums_of_layers.cpp: merges convolutions and affines of the same image that are summed.
void simplify_sums(Rewrite& rewrite);

// nodes/rows/program.cpp: a program that is the only reader of an image runs in the layer that
// makes it.
void join_programs(Rewrite& rewrite);

// one_by_one.cpp: merges consecutive 1x1 convolutions, and moves them before ops that enlarge
// images.
void simplify_products(Rewrite& rewrite);

// simplify.cpp: replaces all reads of `from` by reads of `to`.
void replace(Graph& graph, Value from, Value to);

// simplify.cpp: removes nodes and constants that nobody reads.
void drop_dead(Graph& graph);

// The activation that a node applies to its first argument; nothing if kernels have no such one.
std::optional<Activation> find_activation(const Node& node);

// Joins nodes with their readers until join() finds none. It starts at the end: of two layers that
// are summed, the later one takes the sum, since the earlier one's result, its residual, exists by
// then. join() gets a node that is still in the graph, and returns whether it joined it.
void join_from_end(Rewrite& rewrite,
                   bool (*join)(const Rewrite& rewrite, Node& node, const Uses& uses));

// Adds `reader`, the only reader of `value`, to the epilogue of the node that makes the value. The
// other operand of a sum becomes the residual. Returns false and changes nothing if the epilogue
// cannot take the reader.
bool join_epilogue(const Graph& graph, const Node& reader, Value value,
                   const std::vector<Meta>& metas, Epilogue& epilogue, Value& residual);

}  // namespace torch_blocked::graph
