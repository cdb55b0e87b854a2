// A model's forward as nodes and values. Sizes, formats and memory belong to a plan, not to the
// graph.
//
//   Meta (value.h)           what a value is: sizes and type; with a format, of a slot
//   Graph (graph.h)          what is computed, and for which inputs that was shown (guards.cpp)
//   NodeKind (node_kind.h)   all that there is to say of one kind of node; a file each in nodes/
//   Plan (plan.h)            for given input dims, of the graph simplified for these
//                            (simplify.cpp): formats and implementations, measured
//   Run (run.h)              a plan's steps and memory, for one call at a time
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>

#include <any>
#include <functional>
#include <map>
#include <optional>
#include <span>
#include <string>
#include <variant>
#include <vector>

#include "graph/value.h"
#include "graph/weights.h"
#include "ops/blocked.h"

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

// Where in the model an op was called.
struct Origin {
  std::string module;  // the path of the module, "layer1.0.conv2"; empty: the model itself
  std::string line;    // of the code outside of torch that led there, "model.py:12"; empty: unknown
};

struct NodeKind;   // node_kind.h
struct Narrowing;  // passes/types.h
namespace nodes {
extern const NodeKind boxed;  // anything: an op called through the dispatcher on plain tensors
}

struct Node {
  std::string name, overload;       // the op it came from: "aten::conv2d", ""
  std::vector<Argument> arguments;  // the op's; for a kind with a `held`, the values it reads
  std::vector<Value> outputs;
  const NodeKind* kind = &nodes::boxed;
  std::any held = {};         // what the kind stores for this node: weights, sizes, an epilogue
  Origin origin = {};         // does not change when neighbours are fused into the node
  std::string declined = {};  // why the kind meant for its op did not take it

  Value output() const { return outputs[0]; }
  // An argument that is a value; kNone if it is something else, or there are fewer.
  Value read(std::size_t i) const { return i < arguments.size() ? arguments[i].value() : kNone; }
  bool is(const NodeKind& other) const { return kind == &other; }
  // What the kind holds; null if it has another type.
  template <typename T>
  const T* as() const {
    return std::any_cast<T>(&held);
  }
  template <typename T>
  T* as() {
    return std::any_cast<T>(&held);
  }
  // Makes it a node of another kind, on these values.
  void become(const NodeKind& other, std::vector<Argument> reads, std::any holds) {
    kind = &other;
    arguments = std::move(reads);
    held = std::move(holds);
  }
};

// What Python asked about a value's sizes while the model ran, and the answer. Given the same
// answers, Python calls the same ops.
struct Question {
  // Special values of `what`. Any other value is the dim whose size was asked for. kOnePixel:
  // whether the dims from the third on have one element.
  static constexpr std::int64_t kSizes = -1, kRank = -2, kElements = -3, kOnePixel = -4;
  // Whether a dim is at least that long: the answer is {dim, length, 1 if it is}.
  static constexpr std::int64_t kAtLeast = -5;

  Value value;
  std::int64_t what;
  Dims answer;
};

struct Graph {
  std::vector<Node> nodes;  // in order of execution
  std::vector<Value> inputs;
  std::vector<Argument> outputs;
  std::map<Value, at::Tensor> constants;
  Value values = 0;                     // how many there are
  std::vector<Meta> input_metas;        // of the run that recorded the nodes
  std::vector<std::vector<Meta>> also;  // of inputs for which another run recorded the same nodes
  std::map<Value, Meta> metas;          // of results in that run
  std::vector<Question> questions;
  bool fixed_sizes = false;  // it holds for these sizes only: not all questions are known
};

// Calls f(Value) for each value among arguments and in their lists.
template <typename F>
void for_values(std::span<const Argument> arguments, F&& f) {
  for (const Argument& argument : arguments) {
    if (argument.value() != kNone) f(argument.value());
    if (const auto* list = std::get_if<std::vector<Argument>>(&argument.held)) {
      for_values(*list, f);
    }
  }
}

// simplify.cpp: in place, removes nodes that do nothing in inference and lets each kind of node
// take its ops. The result holds for these metas only: at other sizes a sum may broadcast, or a
// reshape may move channels.
// narrowing: what is computed in bfloat16 instead of float32; null: nothing.
void simplify(Graph& graph, std::vector<Meta> metas, Weights& weights,
              const Narrowing* narrowing = nullptr);

// simplify.cpp: runs ops that read only constants, once for all sizes, except those to `keep`.
using Keeps = std::function<bool(const Graph& graph, const Node& node)>;
void fold_constants(
    Graph& graph, const Keeps& keep = [](const Graph&, const Node&) { return false; });

// guards.cpp: whether the graph is what the model computes for inputs of these metas.
bool covers(const Graph& graph, const std::vector<Meta>& inputs);

// spellings.cpp: rewrites a node to the spelling that the passes look for; false if its op has no
// other. `metas`: of all values that it reads.
bool respell(Node& node, const std::vector<Meta>& metas);

// shapes.cpp: the metas of the node's results by a rule for its op; nothing if there is none.
std::optional<std::vector<Meta>> known_results(const Node& node, const std::vector<Meta>& metas);
// infer.cpp: the metas of all values for inputs of these metas. Ops without a rule run on meta
// tensors.
std::vector<Meta> infer(const Graph& graph, const std::vector<Meta>& inputs);

}  // namespace torch_blocked::graph
