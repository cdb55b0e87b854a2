// Reorders between dense, channels-last and blocked activations. Each is counted.
#pragma once

#include <optional>

#include "ops/blocked.h"

namespace torch_blocked {

// [N, C, *spatial] with any strides -> nC*<block>c. `op` names who asked, for the trace.
Blocked reorder_to_blocked(const char* op, const at::Tensor& src, std::int64_t block,
                           std::optional<at::ScalarType> dtype = std::nullopt);

// nC*<block>c -> contiguous or channels-last.
at::Tensor reorder_to_dense(const char* op, const Blocked& src, bool channels_last,
                            std::optional<at::ScalarType> dtype = std::nullopt);

}  // namespace torch_blocked
