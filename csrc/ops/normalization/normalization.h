// What the normalizations share: one value per lane of a physical tensor, and the passes that apply
// x * scale + shift and its gradient. They take float32 and bfloat16 and compute in float32.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>
#include <vector>

#include "ops/blocked.h"
#include "ops/normalization/channel_sums.h"
#include "ops/registered.h"

namespace torch_blocked {

using Parameter = std::optional<at::Tensor>;

// Raises unless `physical` is a blocked tensor of float32, bfloat16 or float16.
Blocked norm_argument(const char* op, const at::Tensor& physical, std::int64_t channels);

// Whether the passes below take numbers of that type. float16, and on some CPUs bfloat16, are
// converted to float32 first.
bool norms_take(at::ScalarType dtype);

Parameter in_float32(const Parameter& parameter);

// Raises unless the parameter is missing or [channels], of float32 or of src's type.
void check_parameter(const char* op, const char* name, const Parameter& parameter,
                     const Blocked& src);

// The type of the statistics: that of the parameters, or of src if there are none. Source:
// at::native::param_scalar_type.
at::ScalarType statistics_type(const at::Tensor& src,
                               std::initializer_list<const Parameter*> parameters);

// The gradients of src and of two parameters that were asked for, converted to their types.
Gradients narrowed(const Gradients& gradients, at::ScalarType of_src, at::ScalarType of_parameters,
                   std::array<bool, 3> output_mask);

// One value per channel in physical lanes [blocks * block], or per channel and image in [N * blocks
// * block]. Lanes beyond C are 0, which keeps the tail zero.
using Lanes = std::vector<float>;

Lanes lanes(const Blocked& src);
Lanes lanes(const Blocked& src, const Parameter& parameter, float missing);

// The first C lanes as a dense tensor.
at::Tensor dense(const Blocked& src, const Lanes& values, at::ScalarType dtype);

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
