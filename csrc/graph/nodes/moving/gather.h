// A choice of channels, as convolutions that read the sources themselves see it.
#pragma once

#include "graph/running/run.h"
#include "ops/moving/shuffle.h"

namespace torch_blocked::graph {

// Channels of the node's sources in any order: what a chain of splits, concats and shuffles comes
// to. `src` counts the node's arguments.
struct Gather {
  std::vector<ChannelOf> channels;  // of dst
};

// Where a step reads the sources of a gather, how many channels each has, and its data.
std::vector<Slot> sources(const Step& step, const Node& gather);
std::vector<std::int64_t> channel_counts(const Plan& plan, const std::vector<Slot>& slots);
std::vector<const float*> data_of(const std::vector<at::Tensor>& tensors,
                                  const std::vector<Slot>& slots);

}  // namespace torch_blocked::graph
