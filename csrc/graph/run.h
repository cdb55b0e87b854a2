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
  std::function<void()> prepare(const Step& step, std::size_t index, PackedStore& weights);
  std::function<void()> prepare_convolution(const Step& step, PackedStore& weights);
  std::function<void()> prepare_gathered(const Step& step, PackedStore& weights);
  std::function<void()> prepare_gather(const Step& step);
  std::function<void()> prepare_affine(const Step& step);
  std::function<void()> prepare_squeeze_excite(const Step& step, PackedStore& weights);
  std::function<void()> prepare_linear(const Step& step, PackedStore& weights);
  std::function<void()> prepare_pooling(const Step& step);
  std::function<void()> prepare_regroup(const Step& step);
  std::function<void()> prepare_reorder(const Step& step);
  std::function<void()> prepare_concat(const Step& step);
  std::function<void()> prepare_boxed(const Step& step);
  std::vector<Slot> sources(const Step& step, const Gather& gather) const;
  std::vector<std::int64_t> channels(const std::vector<Slot>& slots) const;
  std::vector<const float*> data(const std::vector<Slot>& slots) const;
  void begin(const std::vector<at::Tensor>& inputs);
  void end();

  const Plan& plan_;
  MemoryPlan memory_;
  at::Tensor arena_;
  std::vector<at::Tensor> slots_;  // physical for blocked formats, else as their strides say
  std::vector<std::function<void()>> steps_;
  std::vector<std::vector<Slot>> releases_;  // by step: ATen's memory that nobody reads any more
};

}  // namespace torch_blocked::graph
