// What the memory could do at most: the yardstick of what computes little.
#pragma once

namespace torch_blocked {

// GB/s read and written by copies of memory that no cache holds, by all threads now: the fastest of
// several.
double memory_bandwidth_gbs();

}  // namespace torch_blocked
