// Copies of views in order.
#pragma once

#include <ATen/core/Tensor.h>

namespace torch_blocked {

// The tensor itself if it is contiguous, else a copy that is. ATen's copies runs of two or four
// floats, as windows and patches of images are, at 3 ns a float.
at::Tensor contiguous(const at::Tensor& src);

}  // namespace torch_blocked
