// Concatenates the channels of several tensors.
#pragma once

#include <cstdint>
#include <vector>

#include "ops/moving/shuffle.h"

namespace torch_blocked {

// The channels of the result. `channels`: how many each operand has.
std::vector<ChannelOf> joined_channels(at::IntArrayRef channels);

}  // namespace torch_blocked
