// Reorders between any two descriptors of equal dims, those of weights included.
#pragma once

#include <ATen/core/Tensor.h>

#include "torch_blocked/descriptor.h"

namespace torch_blocked {

// Memory that a descriptor describes: `bytes` is a tensor of bytes from its start.
struct DescribedMemory {
  const Descriptor& desc;
  const at::Tensor& bytes;
};

// src -> dst, whose padding becomes zero. Other types are converted as oneDNN does: what becomes an
// integer is rounded to the nearest, to even between two, and cut at the ends of its range.
// Raises ValueError for other dims, for descriptors without a format, for memory that ends too
// early, and for a dst in which elements share memory.
void reorder_memory(const DescribedMemory& src, const DescribedMemory& dst);

}  // namespace torch_blocked
