// softmax(scale query key^T + bias) value, head by head, without the scores in memory.
#pragma once

#include <ATen/core/Tensor.h>

namespace torch_blocked {

// query [B, H, T, D], key [B, H, S, D], value [B, H, S, E], or all without H; float32 with any
// strides and no empty dim; scale > 0. bias: broadcast to [B, H, T, S], or undefined. The result
// [B, H, T, E] lies in memory as [B, T, H, E], as the layer after it reads it.
at::Tensor attention(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
                     double scale, const at::Tensor& bias);

}  // namespace torch_blocked
