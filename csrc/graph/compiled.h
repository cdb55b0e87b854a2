// What torch_blocked.optimize returns, below Python: a simplified graph, its plans by input dims,
// and as many runs of each as callers need at once.
#pragma once

#include <list>
#include <memory>

#include "graph/run.h"

namespace torch_blocked::graph {

// One line of .plan().
struct StepReport {
  std::string op, output, implementation, why;
  double microseconds;  // of this step in one run
};

class Compiled {
 public:
  Compiled(Graph graph, const std::vector<at::Tensor>& example, Tuner tuner);

  // What the graph returns for these inputs; a list where it returns several. Any thread may call.
  std::vector<at::Tensor> operator()(const std::vector<at::Tensor>& inputs);

  // Plans for these dims without running.
  void prepare(const std::vector<at::Tensor>& inputs);
  std::vector<StepReport> report(const std::vector<at::Tensor>& inputs);
  std::int64_t packed_bytes() { return weights_.bytes(); }
  Tuner::Known times();
  // Lets go of the dense weights: from now on only dims that have a plan are taken.
  void release();
  std::int64_t arena_bytes(const std::vector<at::Tensor>& inputs);

 private:
  // One plan and the runs that nobody uses at the moment.
  struct Entry {
    std::string key;
    Plan plan;
    std::mutex mutex;
    std::vector<std::unique_ptr<Run>> idle;
  };
  std::shared_ptr<Entry> entry_for(const std::vector<at::Tensor>& inputs);
  std::unique_ptr<Run> take(Entry& entry);
  void put_back(Entry& entry, std::unique_ptr<Run> run);

  Graph graph_;
  PackedStore weights_;
  std::mutex mutex_;  // of all that follows
  bool released_ = false;
  Tuner tuner_;
  std::list<std::shared_ptr<Entry>> entries_;  // the last used first
};

}  // namespace torch_blocked::graph
