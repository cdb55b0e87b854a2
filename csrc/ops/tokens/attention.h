// softmax(scale query key^T + bias) value, head by head, without the scores in memory.
#pragma once

#include <ATen/core/Tensor.h>

namespace torch_blocked {

// query [..., T, D], key [..., S, D], value [..., S, E] with the same dims before, at least one of
// them; float32 with any strides and no empty dim; scale > 0. bias: broadcast to [..., T, S], or
// undefined; -infinity hides a key, and each query sees one. dst, contiguous: [..., T, E], but
// where query is [B, H, T, D], [B, T, H, E] as the layer after it reads it.
void attention(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
               double scale, const at::Tensor& bias, const at::Tensor& dst);

}  // namespace torch_blocked
