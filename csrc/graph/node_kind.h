// One kind of node: what it is made from, the sizes and formats of what it makes, where this may
// lie, how it is prepared to run and what the report says of it.
//
// Each kind is one constant in one file of nodes/ and one row of nodes/list.inc. Passes, planner,
// memory, run and report go through these rows and know no kind by name.
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
  double microseconds;                 // measured alone; 0 where it was not
  std::string refusal;                 // why it does not take the problem; empty: it does
};

// The cost of what a kind cannot do.
inline constexpr double kImpossible = std::numeric_limits<double>::infinity();

struct NodeKind {
  const char* name;  // of steps that are no node's

  // ---- from ops to nodes, in this order; simplify.cpp calls each for all kinds in turn

  // Makes nodes of this kind from ops.
  void (*find)(Rewrite& rewrite) = [](Rewrite&) {};
  // Takes neighbours into nodes of this kind.
  void (*fuse)(Rewrite& rewrite) = [](Rewrite&) {};
  // Whether an op that nobody has taken, with one image as its result, is of this kind as it is.
  bool (*takes)(const Candidate& candidate) = [](const Candidate&) { return false; };
  // Whether it does so of images of unsigned bytes, too.
  bool takes_bytes = false;
  // Makes one node of this kind from several, once the kinds of all are known.
  void (*combine)(Rewrite& rewrite) = [](Rewrite&) {};

  // ---- sizes

  // Sizes and types of the results; none: those of the node's op (infer.cpp).
  std::vector<Meta> (*results)(const Node& node, const std::vector<Meta>& metas) =
      [](const Node&, const std::vector<Meta>&) { return std::vector<Meta>(); };

  // ---- formats

  // The formats of a kind that has fixed ones; nothing: the planner chooses that of the result.
  std::optional<FixedFormats> (*fixed)(const Node& node) = [](const Node&) {
    return std::optional<FixedFormats>();
  };
  // The arguments [tied_from, tied_end) are read in the format of the result, or in the fixed one.
  // For the others plan() chooses the format.
  std::size_t tied_from = 0, tied_end = std::numeric_limits<std::size_t>::max();
  // Whether the choice of formats begins with a blocked result; other kinds begin with plain ones.
  bool prefers_blocks = false;
  // The time in microseconds with the result in this format, and that of bringing arguments that
  // are not tied to the formats in which it reads them.
  double (*cost)(Planner& planner, const Node& node, Format format) = [](Planner&, const Node&,
                                                                         Format) { return 0.0; };
  // A bound below cost() for which nothing is timed that has not been; null: cost() times nothing.
  double (*least)(Planner& planner, const Node& node, Format format) = nullptr;
  // Whether it runs only when something first needs its result.
  bool waits = false;
  // Adds to the step what is not known from the tied arguments: other reads, the kind's choice.
  void (*plan)(Planner& planner, const Node& node, Step& step) = [](Planner&, const Node&, Step&) {
  };

  // ---- memory

  // Whether it writes into memory that it is given; else it makes its own. Of what may be a view
  // this says so where it is known to copy.
  bool (*fills)(const Step& step, const SlotPlan& dst) = [](const Step&, const SlotPlan&) {
    return false;
  };
  // Whether its result may be a view of what it reads.
  bool may_be_view = false;
  // Its results as views of `src`, which has no data but the sizes and strides of all that the step
  // reads; empty: it copies.
  std::vector<at::Tensor> (*views)(const Step& step, const at::Tensor& src) =
      [](const Step&, const at::Tensor&) { return std::vector<at::Tensor>(); };
  // Whether its result is byte for byte what it reads.
  bool (*is_same_memory)(const Step& step, const SlotPlan& src, const SlotPlan& dst) =
      [](const Step&, const SlotPlan&, const SlotPlan&) { return false; };
  // Whether its result is its operands, one after the other along the channels.
  bool joins_channels = false;
  // The value that the result may be stored over, if nobody else reads it.
  Value (*stored_over)(const Step& step) = [](const Step&) { return kNone; };

  // ---- running

  Prepared (*prepare)(const Step& step, const Running& running);
  // How a step runs for some rows of an image at a time; nothing where it does not.
  std::optional<RowStage> (*row_stage)(const Step& step) = [](const Step&) {
    return std::optional<RowStage>();
  };
  // Makes it run by what has that row stage, where this may be another implementation.
  void (*choose_rows)(Step& step) = [](Step&) {};

  // ---- the report

  // Floating-point operations of its products; 0 for what the memory bounds, not they. Winograd
  // counts as what it takes the place of.
  double (*flops)(const Plan& plan, const Step& step) = [](const Plan&, const Step&) {
    return 0.0;
  };
  // What ran, and why that.
  std::string (*implementation)(const Plan& plan, const Step& step);
  std::string (*why)(const Step& step) = [](const Step&) { return std::string(); };
  // What could run in its place, in its formats and in others, timed; for explain.
  std::vector<Rival> (*rivals)(Planner& planner, const Step& step) = [](Planner&, const Step&) {
    return std::vector<Rival>();
  };

  // ---- weights

  // Copies what the model could change and the node reads at every run.
  void (*own)(Node& node, Weights& weights) = [](Node&, Weights&) {};
  // Lets go of what has been packed.
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
