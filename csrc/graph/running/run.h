// Runs a plan: primitives, packed weights, memory and one function per step.
#pragma once

#include <unordered_set>

#include "graph/planning/memory.h"
#include "runtime/fork.h"

namespace torch_blocked::graph {

// The packed weights of one graph's nodes. Graphs with the same Weights share them.
class PackedStore {
 public:
  explicit PackedStore(Weights& weights) : weights_(weights) {}

  at::Tensor get(const Node& node, const std::vector<at::Tensor>& weights,
                 const std::string& format, const std::function<at::Tensor()>& pack);

 private:
  Weights& weights_;
  std::map<std::pair<const Node*, std::string>, at::Tensor> packed_;  // dense ones may be gone
  bool writes_ = false;  // packed_ right now; if not, packed_ is intact after a fork()
  ForkMutex mutex_{[this] {
    if (writes_) abandon(packed_);
  }};
};

// What the functions of steps work on.
struct Running {
  const Plan& plan;
  const MemoryPlan& memory;
  std::vector<at::Tensor>& tensors;  // by slot: physical for blocked formats, else logical
  PackedStore& weights;
};

// A step that is ready to run.
struct Prepared {
  std::function<void()> run;
  bool loops_only = false;  // threads may go through it together
  RunRows run_rows = {};    // of a step that has a row stage
};

// Serves one call at a time.
class Run {
 public:
  Run(const Graph& graph, const Plan& plan, PackedStore& weights);
  Run(const Run&) = delete;
  Run& operator=(const Run&) = delete;

  // Takes inputs of the plan's dims and formats, and gives the values that the graph returns.
  std::map<Value, at::Tensor> operator()(const std::vector<Given>& inputs);
  // How a step ran. `pieces`: how many threads could have shared its largest loop; 0 if we cannot
  // know. `meets`: threads wait for each other before and after it.
  struct Timed {
    double microseconds;
    std::int64_t pieces;
    bool meets;
  };
  // Runs step by step and times each.
  std::vector<Timed> timed(const std::vector<Given>& inputs);
  // Runs step by step and calls seen(step's index, value, its result as a plain tensor).
  using Seen = std::function<void(std::size_t, Value, const at::Tensor&)>;
  void watched(const std::vector<Given>& inputs, const Seen& seen);
  std::int64_t arena_bytes() const { return memory_.bytes; }

 private:
  void place(Slot slot, void* data);
  void make_leaving();
  void begin(const std::vector<Given>& inputs);
  std::function<void()> chain_of(const Chain& chain) const;
  void run_each(std::size_t first, std::size_t end);
  void run_steps(std::size_t first, std::size_t end);
  void leave(std::size_t first, std::size_t end);
  void run_observed();
  void check_tails(std::size_t first, std::size_t end) const;  // of what these steps wrote
  void end();

  const Plan& plan_;
  MemoryPlan memory_;
  at::Tensor arena_;
  std::vector<at::Tensor> slots_;
  std::unordered_set<const c10::StorageImpl*> constants_;  // memory that all calls read
  std::vector<Prepared> steps_;
  std::vector<std::function<void()>> chains_;  // as of the plan
  std::vector<std::size_t> sections_;  // first steps of sections that threads go through together
  std::vector<std::vector<Slot>> releases_;  // by step: ATen's memory that nobody reads after it
};

}  // namespace torch_blocked::graph
