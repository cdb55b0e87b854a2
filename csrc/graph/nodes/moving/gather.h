// Gathers of channels, for convolutions that read the sources of a gather directly.
#pragma once

#include "graph/running/run.h"
#include "ops/moving/shuffle.h"

namespace torch_blocked::graph {

// Channels of the node's sources in any order: the result of a chain of splits, concats and
// shuffles. ChannelOf's `src` counts the node's arguments.
struct Gather {
  std::vector<ChannelOf> channels;  // of dst
};

// The slots of a gather's sources, how many channels each has, and the data of each.
std::vector<Slot> sources(const Step& step, const Node& gather);
std::vector<std::int64_t> channel_counts(const Plan& plan, const std::vector<Slot>& slots);
std::vector<const void*> data_of(const std::vector<at::Tensor>& tensors,
                                 const std::vector<Slot>& slots);

}  // namespace torch_blocked::graph
