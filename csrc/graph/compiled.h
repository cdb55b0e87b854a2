// What torch_blocked.optimize returns, below Python: a graph, its plans by input dims, and as many
// runs of each as callers need at once.
#pragma once

#include <list>
#include <memory>

#include "graph/report.h"
#include "graph/running/run.h"
#include "runtime/fork.h"

namespace torch_blocked::graph {

class Compiled {
 public:
  // Graphs that share constants share `weights`.
  Compiled(Graph graph, Tuner tuner, std::shared_ptr<Weights> weights);

  // What the graph returns for these inputs; a list where it returns several. Any thread may call.
  std::vector<at::Tensor> operator()(const std::vector<Given>& inputs);
  // The same by the ops of the capture, one after the other, as they are.
  std::vector<at::Tensor> by_ops(const std::vector<Given>& inputs);

  // Raises what infer() raises for the inputs of the capture: results whose sizes depend on values.
  void check_sizes() const;
  // The same of arguments that no sizes tell of, by runs (well_formed.h); for graphs of files.
  void check_unknown() const;
  // Whether the graph is what the model computes for inputs of these sizes.
  bool covers(const std::vector<Given>& inputs);
  // Notes that another run of the model, for these inputs, has recorded the same graph; false if it
  // cannot be planned for them, because an op tells the sizes of its results in a run only.
  bool add_covered(const std::vector<Given>& inputs);
  // Plans for these dims without running.
  void prepare(const std::vector<Given>& inputs);
  std::vector<StepReport> report(const std::vector<Given>& inputs);
  // Its steps' names, implementations and formats: of plans with the same weights, those that have
  // these in common give the same bits.
  std::string outline(const std::vector<Given>& inputs);
  // For each step of report() what else could have been. Raises ValueError after release().
  std::vector<StepExplanation> explain(const std::vector<Given>& inputs);
  // The first step whose result is not that of the capture's ops, within `tolerance` of the largest
  // value, in words; empty if there is none.
  std::string first_difference(const std::vector<Given>& inputs, double tolerance);
  // What the graph returns by a plan from estimates that is not kept.
  std::vector<at::Tensor> by_estimates(const std::vector<Given>& inputs);
  // Lets go of plans and packed weights: by_ops() is what runs.
  void forget_plans();
  Tuner::Known times();
  // Lets go of the dense weights: from now on only dims that have a plan are taken.
  void release();
  std::int64_t arena_bytes(const std::vector<Given>& inputs);

 private:
  // One plan, the graph that it is of, and the runs that nobody uses at the moment.
  struct Entry {
    std::string key;
    Graph graph;
    Plan plan;
    PackedStore packed;
    std::vector<std::unique_ptr<Run>> idle;
    ForkMutex mutex{[this] { abandon(idle); }};

    explicit Entry(Weights& weights) : packed(weights) {}
  };
  using Entries = std::list<std::shared_ptr<Entry>>;  // the last used first
  std::shared_ptr<Entry> entry_for(const std::vector<Given>& inputs, bool simplified = true);
  std::shared_ptr<Entry> planned(const std::vector<Given>& inputs, bool simplified, Tuner& tuner,
                                 Weights& packed);
  // Calls f with the tuner that chooses: one that knows no times where these must not decide.
  template <typename F>
  auto with_tuner(F&& f);
  std::vector<StepExplanation> explained(const Entry& entry, const std::vector<Given>& inputs,
                                         Tuner& tuner);
  std::vector<at::Tensor> run(Entry& entry, const std::vector<Given>& inputs);
  std::unique_ptr<Run> take(Entry& entry);
  void put_back(Entry& entry, std::unique_ptr<Run> run);

  Graph graph_;
  std::shared_ptr<Weights> weights_;
  void renew();
  ForkMutex mutex_{[this] { renew(); }};  // of all that follows
  bool released_ = false;
  Tuner tuner_;
  Entries simplified_, as_captured_;
};

}  // namespace torch_blocked::graph
