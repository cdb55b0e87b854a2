// Sums over pixels in float64, for chunks whose sums in float32 are not finite: squares of numbers
// beyond 1e19 are no float32, and Kahan's correction makes NaN of an infinity. ATen sums for batch
// norms in float64 throughout; ours take it where it matters, at a tenth of the speed.
#pragma once

#include <c10/core/ScalarType.h>

#include "kernels/rows/normalization.h"

namespace torch_blocked::exact {

bool all_finite(const float* values, std::int64_t count);

// As the kernels of these arguments, whose results they take the place of: [block] each. The
// numbers are float32 or bfloat16.
void sums(const kernels::PixelSums& sums, at::ScalarType dtype, double* sum);
void squares(const kernels::PixelSums& sums, double* sum);
void moments(const kernels::PixelMoments& moments, at::ScalarType dtype, double* mean,
             double* squares);
void gradient_sums(const kernels::PixelGradientSums& sums, at::ScalarType dtype, double* sum,
                   double* dot);

}  // namespace torch_blocked::exact
