// A model's forward as nodes and values, free of sizes, formats and memory: those are a plan's.
//
//   Graph (graph.h)      what is computed, and for which inputs that was shown (guards.cpp)
//   Plan (plan.h)        for given input dims, of the graph simplified for these (simplify.cpp):
//                        formats and implementations, measured
//   Run (run.h)          a plan's steps and memory, for one call at a time
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>

#include <functional>
#include <map>
#include <optional>
#include <string>
#include <variant>
#include <vector>

#include "graph/weights.h"
#include "ops/convolution.h"
#include "ops/linear.h"
#include "ops/pooling.h"
#include "ops/shuffle.h"
#include "ops/squeeze_excite.h"

namespace torch_blocked::graph {

// Values are numbered; -1 is none.
using Value = std::int64_t;
inline constexpr Value kNone = -1;

struct ValueRef {
  Value value;
};

// An argument of an op: a constant, a value of the graph, or a list of these.
struct Argument {
  std::variant<c10::IValue, ValueRef, std::vector<Argument>> held;

  Value value() const {  // kNone if it is a constant or a list
    const auto* ref = std::get_if<ValueRef>(&held);
    return ref ? ref->value : kNone;
  }
  bool is_constant() const { return std::holds_alternative<c10::IValue>(held); }
  const c10::IValue& constant() const { return std::get<c10::IValue>(held); }
};

// What a node does in terms of formats.
enum class Kind {
  kBoxed,          // anything: called through the dispatcher on plain tensors
  kConvolution,    // may change the format
  kAffine,         // x * scale + shift per channel
  kPointwise,      // takes any format and keeps it, all operands in the same
  kImages,         // treats channels alike (pooling, resampling, zero padding): keeps the format
  kConcat,         // along channels: keeps the format
  kGather,         // any choice of channels: keeps the format
  kRegroup,        // other spatial dims over the same pixels: keeps the format
  kSqueezeExcite,  // x times gates that its means decide: keeps the format
  kLinear,         // on plain tensors, by oneDNN
  // Between [N, C, *spatial] in channels-last and [N, *spatial, C]: the same memory.
  kToLast,
  kFromLast,
};

// With parameters as dense tensors, batch norm folded in; bias may be undefined.
struct Convolution {
  Value src, residual = kNone;
  at::Tensor weight, bias;
  Dims stride, padding, dilation, output_padding;
  Dims padding_end;  // zeros beyond the symmetric padding, at the far end; empty: none
  bool transposed;
  std::int64_t groups;
  Epilogue epilogue = {};
};

struct Affine {
  Value src;
  at::Tensor scale, shift;  // [C]
  Activation activation = {};
};

struct Linear {
  Value src;
  at::Tensor weight, bias;  // [O, I]; [O] or undefined
  LinearActivation activation = LinearActivation::kNone;
};

// src times a gate for each channel: `gate` of what the layers make, one after the other, of the
// means of src over the spatial dims.
struct SqueezeExcite {
  Value src, residual = kNone;
  std::vector<SqueezeExciteLayer> layers;
  Gate gate;
  Epilogue epilogue = {};
};

// Channels of several values in any order: what a chain of splits, concats and shuffles comes to.
struct Gather {
  std::vector<Value> srcs;
  std::vector<ChannelOf> channels;  // of dst; `src` counts srcs
};

struct Node {
  std::string name, overload;  // the op it came from: "aten::conv2d", ""
  std::vector<Argument> arguments;
  std::vector<Value> outputs;
  Kind kind = Kind::kBoxed;
  std::optional<Convolution> convolution = {};
  std::optional<Affine> affine = {};
  std::optional<Linear> linear = {};
  std::optional<Gather> gather = {};
  std::optional<SqueezeExcite> squeeze_excite = {};

  Value output() const { return outputs[0]; }
};

// Sizes and element type of a value.
struct Meta {
  Dims dims;
  at::ScalarType dtype = at::kFloat;

  bool operator==(const Meta&) const = default;
};

// What Python asked of a value's sizes while the model ran, and the answer that it got. With the
// same answers it calls the same ops.
struct Question {
  static constexpr std::int64_t kSizes = -1, kRank = -2, kElements = -3;  // else one dim's size

  Value value;
  std::int64_t what;
  Dims answer;
};

struct Graph {
  std::vector<Node> nodes;  // in order of execution
  std::vector<Value> inputs;
  std::vector<Argument> outputs;
  std::map<Value, at::Tensor> constants;
  Value values = 0;               // how many there are
  std::vector<Meta> input_metas;  // of the run that told the nodes
  std::vector<Question> questions;
  bool fixed_sizes = false;  // what else was asked, nobody knows
};

// Calls f(Value) for each value that the node reads.
template <typename F>
void for_arguments(const std::vector<Argument>& arguments, F&& f) {
  for (const Argument& argument : arguments) {
    if (argument.value() != kNone) f(argument.value());
    if (const auto* list = std::get_if<std::vector<Argument>>(&argument.held)) {
      for_arguments(*list, f);
    }
  }
}
template <typename F>
void for_reads(const Node& node, F&& f) {
  if (node.convolution) {
    f(node.convolution->src);
    if (node.convolution->residual != kNone) f(node.convolution->residual);
  } else if (node.affine) {
    f(node.affine->src);
  } else if (node.linear) {
    f(node.linear->src);
  } else if (node.gather) {
    for (const Value value : node.gather->srcs) f(value);
  } else if (node.squeeze_excite) {
    f(node.squeeze_excite->src);
    if (node.squeeze_excite->residual != kNone) f(node.squeeze_excite->residual);
  } else {
    for_arguments(node.arguments, f);
  }
}

// The integers of a list of constants, one given for all spatial dims spread over them; nothing if
// it holds something else.
std::optional<Dims> integers(const Argument& argument, std::size_t spatial);

// Whether the node shows the same elements in the same order with other dims.
bool is_reshape(const Node& node);

// The order of dims that a node permutes its first argument into; empty if it does not.
Dims order_of(const Node& node, std::size_t rank);

// simplify.cpp, in place: nodes that do nothing in inference go; batch norms are folded or become
// affine; activations, residual sums and zero padding move into convolutions; kinds are set. It
// holds for values of these metas only: at other sizes a sum may broadcast, a reshape move
// channels.
void simplify(Graph& graph, std::vector<Meta> metas, Weights& weights);

// simplify.cpp: ops on constants alone are run, once and for all sizes.
void fold_constants(Graph& graph);

// pooling.cpp, a part of it: means over the spatial dims become poolings.
void find_means(Graph& graph, std::vector<Meta>& metas);
// squeeze_excite.cpp: means, small layers, a gate and the product with it become one node.
void find_squeeze_excites(Graph& graph, const std::vector<Meta>& metas);
// gather.cpp, the end of it: chains of ops that move channels become one gather each.
void find_gathers(Graph& graph, const std::vector<Meta>& metas);

// guards.cpp: whether the graph is what the model computes for inputs of these metas.
bool covers(const Graph& graph, const std::vector<Meta>& inputs);

// boxed.cpp: calls the node's op through the dispatcher with `value_of` its values. Lists that it
// returns are flattened. `on_meta`: the values are meta tensors, and so are results.
std::vector<c10::IValue> call(const Node& node, const std::function<c10::IValue(Value)>& value_of,
                              bool on_meta = false);
// The convolution that a node is for src of these dims; formats plain.
ConvolutionProblem problem_of(const Node& node, const std::vector<Meta>& metas);
// What a squeeze-excite node is for src of these dims in that format.
SqueezeExciteProblem problem_of(const SqueezeExcite& node, const Dims& dims, std::int64_t format);
// The pooling that a kImages node is in that format; nothing if oneDNN has no such.
std::optional<PoolingProblem> pooling_of(const Node& node, const std::vector<Meta>& metas,
                                         std::int64_t format);
// shapes.cpp: the metas of the node's results by a rule for its op; nothing if there is none.
std::optional<std::vector<Meta>> known_results(const Node& node, const std::vector<Meta>& metas);
// The metas of all values for inputs of these metas; by meta tensors where no rule knows better.
std::vector<Meta> infer(const Graph& graph, const std::vector<Meta>& inputs);

}  // namespace torch_blocked::graph
