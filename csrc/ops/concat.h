// Concats along channels into memory that there is already.
#pragma once

#include <vector>

#include "ops/blocked.h"

namespace torch_blocked {

// dst = the channels of `srcs`, one after the other, zero tail included; 4-byte elements. All it
// does to memory is in loops of share_units.
void join_channels(const std::vector<Blocked>& srcs, const Blocked& dst);

}  // namespace torch_blocked
