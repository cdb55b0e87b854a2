// Reorders memory between any two descriptors of equal dims, including descriptors of weights.
#pragma once

#include <ATen/core/Tensor.h>

#include "torch_blocked/descriptor.h"

namespace torch_blocked {

// Memory and its descriptor. `bytes` is a tensor of bytes from the start of the memory.
struct DescribedMemory {
  const Descriptor& desc;
  const at::Tensor& bytes;
};

// Reorders src to dst and zeroes dst's padding. Types are converted as oneDNN does: a number that
// becomes an integer is rounded to the nearest, ties to even, and saturates. Raises ValueError if
// the dims differ, if a descriptor has no format, if memory ends too early, or if elements of dst
// share memory.
void reorder_memory(const DescribedMemory& src, const DescribedMemory& dst);

}  // namespace torch_blocked
