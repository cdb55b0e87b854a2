// Measures the memory's bandwidth, to compare steps with that compute little.
#pragma once

namespace torch_blocked {

// GB/s that all threads read and write now when they copy memory that no cache holds: the fastest
// of several copies.
double memory_bandwidth_gbs();

}  // namespace torch_blocked
