// A plan made ready: primitives, packed weights, memory and one function per step.
#pragma once

#include <mutex>

#include "graph/memory.h"

namespace torch_blocked::graph {

// Packed weights by node and format, shared by all runs of a graph. They lie one after the other in
// large pieces of memory: whole huge pages for each would leave 14 MiB of ResNet-50's unused.
class PackedStore {
 public:
  at::Tensor get(const Node& node, const std::string& format,
                 const std::function<at::Tensor()>& pack);
  std::int64_t bytes();

 private:
  at::Tensor placed(const at::Tensor& packed);

  std::mutex mutex_;
  std::map<std::pair<const Node*, std::string>, at::Tensor> packed_;
  at::Tensor piece_;  // the one that is being filled, this far
  std::int64_t filled_ = 0;
};

// Runs one call at a time.
class Run {
 public:
  Run(const Graph& graph, const Plan& plan, PackedStore& weights);
  Run(const Run&) = delete;
  Run& operator=(const Run&) = delete;

  // Contiguous inputs of the plan's dims -> the values that the graph returns.
  std::map<Value, at::Tensor> operator()(const std::vector<at::Tensor>& inputs);
  // The same with the time of each step in microseconds.
  std::vector<double> timed(const std::vector<at::Tensor>& inputs);
  std::int64_t arena_bytes() const { return memory_.bytes; }

 private:
  struct Prepared {
    std::function<void()> run;
    bool loops_only = false;  // threads may go through it together
  };

  Prepared prepare(const Step& step, std::size_t index, PackedStore& weights);
  Prepared prepare_convolution(const Step& step, PackedStore& weights);
  Prepared prepare_gathered(const Step& step, PackedStore& weights);
  Prepared prepare_gather(const Step& step);
  Prepared prepare_affine(const Step& step);
  Prepared prepare_squeeze_excite(const Step& step, PackedStore& weights);
  Prepared prepare_linear(const Step& step, PackedStore& weights);
  Prepared prepare_pooling(const Step& step);
  Prepared prepare_regroup(const Step& step);
  Prepared prepare_reorder(const Step& step);
  Prepared prepare_concat(const Step& step);
  Prepared prepare_boxed(const Step& step);
  std::vector<Slot> sources(const Step& step, const Gather& gather) const;
  std::vector<std::int64_t> channels(const std::vector<Slot>& slots) const;
  std::vector<const float*> data(const std::vector<Slot>& slots) const;
  void begin(const std::vector<at::Tensor>& inputs);
  void run_steps(std::size_t first, std::size_t end);
  void end();

  const Plan& plan_;
  MemoryPlan memory_;
  at::Tensor arena_;
  std::vector<at::Tensor> slots_;  // physical for blocked formats, else as their strides say
  std::vector<Prepared> steps_;
  std::vector<std::size_t> sections_;        // where steps begin that threads go through together
  std::vector<std::vector<Slot>> releases_;  // by step: ATen's memory that nobody reads any more
};

}  // namespace torch_blocked::graph
