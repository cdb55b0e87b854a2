// Multiplies matrices that are both computed at run time, batch by batch.
#pragma once

#include <ATen/core/Tensor.h>

namespace torch_blocked {

// dst [..., M, N] = left [..., M, K] right [..., K, N], each of float32 or bfloat16, without empty
// dims. Sums are float32. The leading
// dims of left and right broadcast to those of dst. left and right have any strides; the rows or
// the columns of dst are dense.
void matmul(const at::Tensor& left, const at::Tensor& right, const at::Tensor& dst);

}  // namespace torch_blocked
