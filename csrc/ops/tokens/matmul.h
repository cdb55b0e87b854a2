// Products of matrices that are computed both, batch by batch.
#pragma once

#include <ATen/core/Tensor.h>

namespace torch_blocked {

// dst [..., M, N] = left [..., M, K] right [..., K, N]; float32, no empty dim, the dims before of
// left and right broadcast to those of dst. left and right have any strides; of dst rows or columns
// are dense.
void matmul(const at::Tensor& left, const at::Tensor& right, const at::Tensor& dst);

}  // namespace torch_blocked
