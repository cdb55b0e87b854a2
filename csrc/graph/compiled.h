// The C++ side of what torch_blocked.optimize returns: a graph, a plan per set of input dims, and
// as many runs of each plan as callers need at once.
#pragma once

#include <list>
#include <memory>

#include "graph/passes/types.h"
#include "graph/report.h"
#include "graph/running/run.h"
#include "runtime/fork.h"

namespace torch_blocked::graph {

// The types that a graph computes in.
enum class Computes : std::uint8_t {
  kAsCaptured,
  kFastest,  // in bfloat16 where that is faster than float32
  kTimed,    // the same, also on CPUs on which bfloat16 is seldom faster
  kNarrow,   // in bfloat16 wherever it has kernels
};

class Compiled {
 public:
  // Graphs that share constants share `weights`.
  // keep: paths of modules that never compute in bfloat16.
  Compiled(Graph graph, Tuner tuner, std::shared_ptr<Weights> weights,
           Computes computes = Computes::kAsCaptured, std::vector<std::string> keep = {});

  // What the graph returns for these inputs; a list where it returns several. Any thread may call.
  std::vector<at::Tensor> operator()(const std::vector<Given>& inputs);
  // The same, by running the ops of the capture as they are, one after the other.
  std::vector<at::Tensor> by_ops(const std::vector<Given>& inputs);

  // Raises infer()'s error for the inputs of the capture: the sizes of some results depend on
  // values.
  void check_sizes() const;
  // For graphs from files: runs the ops that tell the sizes of their results only in a run, so that
  // they check their arguments (well_formed.h).
  void check_unknown() const;
  // Whether the graph is what the model computes for inputs of these sizes.
  bool covers(const std::vector<Given>& inputs);
  // Notes that a run of the model on these inputs recorded the same graph. False if it cannot be
  // planned for them, because an op tells the sizes of its results only in a run.
  bool add_covered(const std::vector<Given>& inputs);
  // Plans for these dims without running.
  void prepare(const std::vector<Given>& inputs);
  std::vector<StepReport> report(const std::vector<Given>& inputs);
  // Why parts of the plan, or all of it, compute in float32 although bfloat16 was asked for; empty
  // if nothing does.
  std::string types(const std::vector<Given>& inputs);
  // A result of a step of the plan.
  struct Result {
    std::size_t step;
    Value value;
    std::vector<Value> reads;
    at::Tensor tensor;  // plain
  };
  // All results of a run, in order.
  std::vector<Result> results(const std::vector<Given>& inputs);
  // The names, implementations and formats of the plan's steps. Plans with the same weights and the
  // same outline give the same bits.
  std::string outline(const std::vector<Given>& inputs);
  // For each step of report(), what else could run in its place. Raises ValueError after release().
  std::vector<StepExplanation> explain(const std::vector<Given>& inputs);
  // Describes the first step whose result differs from that of the capture's ops by more than
  // `tolerance` of the largest value; empty if there is none.
  std::string first_difference(const std::vector<Given>& inputs, double tolerance);
  // What the graph returns by a plan that is made from estimates and not kept.
  std::vector<at::Tensor> by_estimates(const std::vector<Given>& inputs);
  // Drops plans and packed weights, for graphs that only by_ops() runs.
  void forget_plans();
  // Drops them, and plans in float32 from now on.
  void compute_as_captured();
  Tuner::Known times();
  // Drops the dense weights. From now on only inputs that have a plan are accepted.
  void release();
  std::int64_t arena_bytes(const std::vector<Given>& inputs);

 private:
  // One plan, its graph, and the runs that nobody uses at the moment.
  struct Entry {
    std::string key;
    Graph graph;
    Plan plan;
    std::string types;  // as types()
    PackedStore packed;
    std::vector<std::unique_ptr<Run>> idle;
    ForkMutex mutex{[this] { abandon(idle); }};
    ForkMutex nodes_mutex;  // held while a run is made of the nodes, and while they are released

    explicit Entry(Weights& weights) : packed(weights) {}
  };
  using Entries = std::list<std::shared_ptr<Entry>>;  // the last used first
  std::shared_ptr<Entry> entry_for(const std::vector<Given>& inputs, bool simplified = true);
  std::shared_ptr<Entry> planned(const std::vector<Given>& inputs, bool simplified, Tuner& tuner,
                                 Weights& packed);
  // The same with these types; null: as captured.
  std::shared_ptr<Entry> planned_in(const Narrowing* narrowing, const std::vector<Given>& inputs,
                                    bool simplified, Tuner& tuner, Weights& packed);
  // The fastest of plans in bfloat16, in float32 and in both, by runs.
  std::shared_ptr<Entry> fastest(const std::vector<Given>& inputs, Tuner& tuner, Weights& packed);
  // Calls f with the tuner to choose by. In deterministic mode that is one that knows no times.
  template <typename F>
  auto with_tuner(F&& f);
  std::vector<StepExplanation> explained(const Entry& entry, const std::vector<Given>& inputs,
                                         Tuner& tuner);
  std::vector<at::Tensor> run(Entry& entry, const std::vector<Given>& inputs);
  std::unique_ptr<Run> take(Entry& entry);
  void put_back(Entry& entry, std::unique_ptr<Run> run);

  Graph graph_;
  std::shared_ptr<Weights> weights_;
  Computes computes_;
  std::vector<std::string> keep_;
  void renew();
  ForkMutex mutex_{[this] { renew(); }};  // of all that follows
  bool released_ = false;
  Tuner tuner_;
  Entries simplified_, as_captured_;
};

}  // namespace torch_blocked::graph
