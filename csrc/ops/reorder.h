// Reorders between dense, channels-last and blocked activations. Each is counted.
#pragma once

#include <optional>

#include "ops/blocked.h"

namespace torch_blocked {

// Either side of a reorder: the physical tensor of a blocked format, or else a dense tensor, whose
// format is read from its strides.
struct ReorderSide {
  at::Tensor tensor;
  Format format = kStrided;

  bool is_blocked() const { return format.is_blocked(); }
};

// Memory of an activation [N, C, *spatial] in a format, which is not kStrided.
ReorderSide reorder_side(const void* data, at::IntArrayRef dims, Format format,
                         at::ScalarType dtype);

// src -> dst, both [N, C, *spatial] = dims.
void reorder(const char* op, at::IntArrayRef dims, const ReorderSide& src, const ReorderSide& dst);

// [N, C, *spatial] with any strides -> nC*<block>c. `op` names who asked, for the trace.
Blocked reorder_to_blocked(const char* op, const at::Tensor& src, std::int64_t block,
                           std::optional<at::ScalarType> dtype = std::nullopt);

// nC*<block>c -> contiguous or channels-last.
at::Tensor reorder_to_dense(const char* op, const Blocked& src, bool channels_last,
                            std::optional<at::ScalarType> dtype = std::nullopt);

}  // namespace torch_blocked
