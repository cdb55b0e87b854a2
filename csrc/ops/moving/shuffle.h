// Gathers channels of blocked tensors in any order.
#pragma once

#include <cstdint>
#include <vector>

#include "kernels/rows/shuffle.h"
#include "ops/blocked.h"

namespace torch_blocked {

// Channel `channel` of source `src`; zeros if src is -1.
struct ChannelOf {
  std::int64_t src, channel;
  bool operator==(const ChannelOf&) const = default;
};

// Makes dst [N, channels, *spatial]. Each of its channels is a channel of a source. All tensors
// have the same block and elements of four or two bytes.
class ChannelGather {
 public:
  // `src_channels`: how many each source has.
  ChannelGather(const std::vector<ChannelOf>& channels,
                const std::vector<std::int64_t>& src_channels, std::int64_t batch,
                std::int64_t pixels, std::int64_t block, std::int64_t element_bytes);
  // Writes the blocks of each image from first_block on. Earlier ones are already in dst if a
  // source lies there.
  void run(const std::vector<const void*>& srcs, void* dst, std::int64_t first_block = 0) const;

 private:
  std::vector<kernels::GatheredLane> lanes_;  // of all blocks of dst
  std::vector<std::int64_t> src_images_;      // elements of an image
  std::int64_t batch_, block_, pixels_, element_;
};

// A tensor with these channels of the sources. The sources differ only in their number of channels.
at::Tensor gathered(const std::vector<Blocked>& srcs, const std::vector<ChannelOf>& channels);

}  // namespace torch_blocked
