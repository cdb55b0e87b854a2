// Channels of blocked tensors in any order.
#pragma once

#include <cstdint>
#include <vector>

#include "kernels/rows/shuffle.h"
#include "ops/blocked.h"

namespace torch_blocked {

// Channel `channel` of source `src`; src -1: zeros.
struct ChannelOf {
  std::int64_t src, channel;
  bool operator==(const ChannelOf&) const = default;
};

// Makes dst [N, channels, *spatial], each channel of which is a channel of a source. All tensors
// have one block and 4-byte elements.
class ChannelGather {
 public:
  // `src_channels`: how many each source has.
  ChannelGather(const std::vector<ChannelOf>& channels,
                const std::vector<std::int64_t>& src_channels, std::int64_t batch,
                std::int64_t pixels, std::int64_t block);
  // All but the first blocks of each image, which may be those of a source that lies in dst.
  void run(const std::vector<const float*>& srcs, float* dst, std::int64_t first_block = 0) const;

 private:
  std::vector<kernels::GatheredLane> lanes_;  // of all blocks of dst
  std::vector<std::int64_t> src_images_;      // elements of an image
  std::int64_t batch_, block_, pixels_;
};

// A tensor with these channels of the sources, which are like the first but for their channels.
at::Tensor gathered(const std::vector<Blocked>& srcs, const std::vector<ChannelOf>& channels);

}  // namespace torch_blocked
