// Declares the functions behind torch.ops.torch_blocked.*, one for each row of list.inc. They take
// physical tensors and logical channel counts, and return physical tensors.
#pragma once

#include <ATen/core/Tensor.h>

#include <array>
#include <cstdint>
#include <optional>
#include <tuple>

namespace torch_blocked {

// Results that several ops share. Gradients that were not asked for are empty.
using Gradients = std::tuple<at::Tensor, at::Tensor, at::Tensor>;  // of input, weight and bias
using TwoGradients = std::tuple<at::Tensor, at::Tensor>;           // of input and grid
// output, mean and 1 / sqrt(var + eps)
using Normalized = std::tuple<at::Tensor, at::Tensor, at::Tensor>;

#define OP(result, name, arguments, schema) result name arguments;
#include "ops/list.inc"

}  // namespace torch_blocked
