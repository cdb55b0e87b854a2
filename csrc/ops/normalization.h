// What the normalizations share: one value per lane of a physical tensor, and the passes
// x * scale + shift and its gradient.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>
#include <vector>

#include "ops/blocked.h"
#include "ops/channel_sums.h"

namespace torch_blocked {

using Parameter = std::optional<at::Tensor>;

// Raises unless the parameter is missing or float32 [channels].
void check_parameter(const char* op, const char* name, const Parameter& parameter,
                     std::int64_t channels);

// One value per channel in physical lanes [blocks * block], or per channel and image in
// [N * blocks * block]; lanes beyond C are 0, which keeps the tail zero.
using Lanes = std::vector<float>;

Lanes lanes(const Blocked& src);
Lanes lanes(const Blocked& src, const Parameter& parameter, float missing);

// The first C lanes as a dense tensor.
at::Tensor dense(const Blocked& src, const Lanes& values);

// dst = src * scale + shift, in the given channel blocks.
void affine(const Blocked& src, BlockRange range, const Lanes& scale, const Lanes& shift,
            const at::Tensor& dst);

// dst = (src - mean) * scale + shift, in all of them.
void normalize(const Blocked& src, const Lanes& mean, const Lanes& scale, const Lanes& shift,
               const at::Tensor& dst);

// diff_dst * diff_scale + (src - mean) * src_scale + shift.
struct NormalizationGradient {
  Lanes mean, diff_scale, src_scale, shift;
};
void normalization_gradient(const Blocked& diff_dst, const Blocked& src, BlockRange range,
                            const NormalizationGradient& gradient, const at::Tensor& diff_src);

}  // namespace torch_blocked
