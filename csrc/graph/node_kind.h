// Everything about one kind of node: which ops it takes, the sizes and formats of its results,
// where they may lie in memory, how it is prepared to run, and what the report says of it.
//
// Each kind is one constant in one file of nodes/ and one row of nodes/list.inc. Passes, planner,
// memory, run and report go through these rows.
#pragma once

#include <limits>

#include "graph/graph.h"
#include "ops/products/row_chain.h"

namespace torch_blocked::graph {

class Planner;     // planner.h
struct SlotPlan;   // plan.h
struct Step;       // plan.h
struct Plan;       // plan.h
struct Running;    // run.h
struct Prepared;   // run.h
struct Rewrite;    // rules.h
struct Candidate;  // rules.h

// The formats that a node insists on, whatever its neighbours have.
struct FixedFormats {
  Format reads, writes;
};

// An implementation that a step could have.
struct Rival {
  std::string implementation, format;  // "nchw -> nChw16c", or one for both
  double microseconds;                 // measured alone; 0: not measured
  std::string refusal;                 // why it does not take the problem; empty if it does
};

// Which types a node takes for what the capture has in float32. Computations are in float32 or more
// precise in any case.
enum class Types : std::uint8_t {
  kFloat32,    // only float32
  kProduct,    // bfloat16 for all that it reads and makes; it is faster than in float32
  kFollows,    // the same, but only worth it if what it reads is bfloat16
  kEachItsOwn  // float32 or bfloat16 for each value, at no cost
};

// The cost of a format in which a kind cannot run.
inline constexpr double kImpossible = std::numeric_limits<double>::infinity();

struct NodeKind {
  const char* name;  // the report's op for steps that belong to no node

  // ---- from ops to nodes, in this order; simplify.cpp calls each for all kinds in turn

  // Makes nodes of this kind from ops.
  void (*find)(Rewrite& rewrite) = [](Rewrite&) {};
  // Takes neighbours into nodes of this kind.
  void (*fuse)(Rewrite& rewrite) = [](Rewrite&) {};
  // Whether an op with one image as its result, which no kind has taken, is of this kind unchanged.
  bool (*takes)(const Candidate& candidate) = [](const Candidate&) { return false; };
  // Whether `takes` is asked about images of unsigned bytes, too.
  bool takes_bytes = false;
  // Makes one node of this kind from several, once the kinds of all are known.
  void (*combine)(Rewrite& rewrite) = [](Rewrite&) {};

  // ---- sizes

  // Sizes and types of the results; an empty list stands for those of the node's op (infer.cpp).
  std::vector<Meta> (*results)(const Node& node, const std::vector<Meta>& metas) =
      [](const Node&, const std::vector<Meta>&) { return std::vector<Meta>(); };

  // ---- types (types.cpp)

  // Asked about nodes of this kind when a graph is to compute in bfloat16.
  Types (*types)(const Rewrite& rewrite, const Node& node) = [](const Rewrite&, const Node&) {
    return Types::kFloat32;
  };
  // Makes a node's results bfloat16, and its weights. null: results() has the type from what the
  // node reads.
  void (*narrow)(Rewrite& rewrite, Node& node) = nullptr;

  // ---- formats

  // The formats of a kind that has fixed ones; otherwise the planner chooses the result's format.
  std::optional<FixedFormats> (*fixed)(const Node& node) = [](const Node&) {
    return std::optional<FixedFormats>();
  };
  // The arguments [tied_from, tied_end) are read in the format of the result, or in the fixed one.
  // plan() chooses the format of the others.
  std::size_t tied_from = 0, tied_end = std::numeric_limits<std::size_t>::max();
  // Whether the search for formats starts from a blocked result; for other kinds it starts from a
  // plain one.
  bool prefers_blocks = false;
  // Microseconds with the result in this format, plus those of reordering untied arguments to the
  // formats in which the node reads them.
  double (*cost)(Planner& planner, const Node& node, Format format) = [](Planner&, const Node&,
                                                                         Format) { return 0.0; };
  // A lower bound of cost() that times nothing new; null if cost() itself times nothing.
  double (*least)(Planner& planner, const Node& node, Format format) = nullptr;
  // Whether it runs only once something needs its result.
  bool waits = false;
  // Adds to the step what the tied arguments do not tell: other reads, the kind's choice.
  void (*plan)(Planner& planner, const Node& node, Step& step) = [](Planner&, const Node&, Step&) {
  };

  // ---- memory

  // Whether it writes into memory that it is given; otherwise it makes its own. For kinds that may
  // return a view: true only if this step is known to copy.
  bool (*fills)(const Step& step, const SlotPlan& dst) = [](const Step&, const SlotPlan&) {
    return false;
  };
  // Whether its result may be a view of what it reads.
  bool may_be_view = false;
  // Its results as views of `src`, which has the sizes and strides of what the step reads, but no
  // data; empty if the step copies.
  std::vector<at::Tensor> (*views)(const Step& step, const at::Tensor& src) =
      [](const Step&, const at::Tensor&) { return std::vector<at::Tensor>(); };
  // Whether its result has the same bytes as what it reads.
  bool (*is_same_memory)(const Step& step, const SlotPlan& src, const SlotPlan& dst) =
      [](const Step&, const SlotPlan&, const SlotPlan&) { return false; };
  // Whether its result consists of its operands, one after the other along the channels.
  bool joins_channels = false;
  // The value that the result may overwrite, if nobody else reads it.
  Value (*stored_over)(const Step& step) = [](const Step&) { return kNone; };

  // ---- running

  Prepared (*prepare)(const Step& step, const Running& running);
  // How a step runs on some rows of an image at a time; nothing if it cannot.
  std::optional<RowStage> (*row_stage)(const Step& step) = [](const Step&) {
    return std::optional<RowStage>();
  };
  // Switches the step to the implementation of that row stage, which may differ from its own.
  void (*choose_rows)(Step& step) = [](Step&) {};

  // ---- the report

  // Floating-point operations of its products; 0 if memory bounds the step. Winograd counts as the
  // direct convolution that it replaces.
  double (*flops)(const Plan& plan, const Step& step) = [](const Plan&, const Step&) {
    return 0.0;
  };
  // What ran, and why that was chosen.
  std::string (*implementation)(const Plan& plan, const Step& step);
  std::string (*why)(const Step& step) = [](const Step&) { return std::string(); };
  // For explain: what could run in its place, in its formats and in others, timed.
  std::vector<Rival> (*rivals)(Planner& planner, const Step& step) = [](Planner&, const Step&) {
    return std::vector<Rival>();
  };

  // ---- weights

  // Copies what the node reads at every run and the model could change.
  void (*own)(Node& node, Weights& weights) = [](Node&, Weights&) {};
  // Drops what has been packed.
  void (*release)(Node& node) = [](Node&) {};
};

namespace nodes {
#define NODE(name) extern const NodeKind name;
#include "graph/nodes/list.inc"
#undef NODE
}  // namespace nodes

// All of them, in the order of the list.
std::span<const NodeKind* const> node_kinds();

}  // namespace torch_blocked::graph
