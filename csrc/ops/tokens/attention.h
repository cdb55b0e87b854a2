// Computes softmax(scale query key^T + bias) value, head by head, without writing all scores to
// memory.
#pragma once

#include <ATen/core/Tensor.h>

namespace torch_blocked {

// query [..., T, D], key [..., S, D], value [..., S, E], with the same leading dims, at least one
// of them. They are float32 or bfloat16, with any strides and no empty dim; scale > 0. bias
// broadcasts to [..., T, S], or is undefined. -infinity hides a key; each query must see at least
// one. dst is contiguous [..., T, E], of either type. For a query [B, H, T, D] it is [B, T, H, E],
// as the next layer reads it.
void attention(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
               double scale, const at::Tensor& bias, const at::Tensor& dst);

}  // namespace torch_blocked
