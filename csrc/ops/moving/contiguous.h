// Copies of views in order.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

namespace torch_blocked {

// A view of float32 copied in order, by loops that threads may go through together. Windows and
// patches of images are made of runs of floats, and heads of attention are transposed: 1536 patches
// of 16 times 2 times 2 floats take 56 us on one thread, and 467 by ATen's loops.
class CopyInOrder {
 public:
  // Of a view with these sizes, none of them 0, and strides.
  CopyInOrder(at::IntArrayRef sizes, at::IntArrayRef strides);

  void operator()(const float* src, float* dst) const;

 private:
  struct Dim {
    std::int64_t size, src, dst;  // and the strides of both
  };

  void copy(std::int64_t piece, const float* src, float* dst) const;  // of one unit

  std::vector<Dim> outer_;  // whose products are the units that threads share
  // What a unit is: [inner_[0], inner_[1]] runs of inner_[2] floats; or, transposed, inner_[1] rows
  // of src that are columns of dst, which has inner_[2] rows.
  Dim inner_[3];
  bool transposes_ = false;
};

// The tensor itself if it is contiguous, else a copy that is. What is no float32 is left to ATen.
at::Tensor contiguous(const at::Tensor& src);

}  // namespace torch_blocked
