// The channels of several tensors, one after the other.
#pragma once

#include <cstdint>
#include <vector>

#include "ops/moving/shuffle.h"

namespace torch_blocked {

// `channels`: how many each operand has.
std::vector<ChannelOf> joined_channels(at::IntArrayRef channels);

}  // namespace torch_blocked
