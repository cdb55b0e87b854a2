// Reorders between dense, channels-last and blocked activations. Each is counted.
#pragma once

#include <optional>

#include "ops/blocked.h"

namespace torch_blocked {

// Either side of a reorder: a strided tensor (block 0), or the physical tensor of a blocked one.
struct ReorderSide {
  at::Tensor tensor;
  std::int64_t block;
};

// Memory of an activation [N, C, *spatial] in a format: a block, kPlain or kChannelsLast.
ReorderSide reorder_side(const void* data, at::IntArrayRef dims, std::int64_t format,
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
