// A convolution as sizes, formats and an epilogue. Everything that runs a convolution takes this:
// convolution/ runs it, gradient/ computes its gradients, quantized/ runs it on bytes, linear/ and
// products/ read their sizes from it.
#pragma once

#include <ATen/core/Tensor.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <functional>

#include "kernels/vector/epilogue.h"
#include "ops/blocked.h"
#include "ops/window.h"
#include "runtime/onednn/primitive.h"

namespace torch_blocked {

// Whether strides, dilations or paddings are the same `value` along all dims.
inline bool are_all(const Dims& dims, std::int64_t value) {
  return std::ranges::all_of(dims, [&](std::int64_t each) { return each == value; });
}

using kernels::Activation;
using kernels::Epilogue;

// Everything that decides how a convolution runs; logical sizes, one entry per spatial dim.
struct ConvolutionProblem {
  Dims src_dims, dst_dims;  // [N, IC, *spatial], [N, OC, *spatial]
  Dims weight_dims;         // ATen's: [OC, IC/groups, *kernel], transposed [IC, OC/groups, *kernel]
  Dims stride, padding, dilation, output_padding;
  std::int64_t groups;
  Format src_format, dst_format;  // not kStrided
  bool transposed, has_bias;
  at::ScalarType dtype;
  Epilogue epilogue = {};  // dst = epilogue(sum + bias)

  std::size_t spatial() const { return stride.size(); }
  Window window(std::size_t i) const {
    return {weight_dims[2 + i], stride[i], padding[i], dilation[i]};
  }
  // Whether src and dst have one blocked format. Most implementations are made for this.
  bool blocked() const { return src_format == dst_format && src_format.is_blocked(); }
};

// Called for `pixels` pixels of dst from `first` on, all in one row of [N, blocks of channels]. The
// thread that stored them calls it at once, while they are in its caches.
using OnStored = std::function<void(std::int64_t row, std::int64_t first, std::int64_t pixels)>;

inline constexpr auto kFloatBytes = static_cast<std::int64_t>(sizeof(float));

// Checks these arguments and makes a problem of them, with src and dst in one format. As in ATen, a
// list of one number holds for all spatial dims. Raises ValueError or TypeError.
ConvolutionProblem convolution_problem(at::IntArrayRef src_dims, Format format,
                                       const at::Tensor& weight, const at::Tensor& bias,
                                       at::IntArrayRef stride, at::IntArrayRef padding,
                                       at::IntArrayRef dilation, bool transposed,
                                       at::IntArrayRef output_padding, std::int64_t groups);

// All fields of a problem as a key. `name` distinguishes the caches that use such keys.
Key convolution_key(const char* name, const ConvolutionProblem& problem);

// All spatial sizes of a problem, as d, h, w.
struct SpatialSizes {
  std::array<std::int64_t, 3> in, out, kernel, stride, padding, dilation;
};
SpatialSizes spatial_sizes(const ConvolutionProblem& problem);

// Groups bundled so that a bundle fills whole blocks of src and dst. A bundle is one convolution
// with zero weights between its groups: two groups of 8 channels fill a block of 16, and half of
// the products are wasted. `count` bundles of `groups` lie side by side. There are none if groups
// are left over. src and dst have one blocked format.
struct GroupBundles {
  std::int64_t count, groups;
};
GroupBundles group_bundles(const ConvolutionProblem& problem);

}  // namespace torch_blocked
