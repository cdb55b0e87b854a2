// Sums over pixels in float64, for chunks whose sums in float32 are not finite. Squares of numbers
// beyond 1e19 overflow float32, and Kahan's correction turns an infinity into NaN. ATen always sums
// in float64 for batch norms. We do it only where needed, because it runs at a tenth of the speed.
#pragma once

#include <c10/core/ScalarType.h>

#include "kernels/rows/normalization.h"

namespace torch_blocked::exact {

bool all_finite(const float* values, std::int64_t count);

// These replace the results of the kernels with the same arguments: [block] values each. The
// numbers are float32 or bfloat16.
void sums(const kernels::PixelSums& sums, at::ScalarType dtype, double* sum);
void squares(const kernels::PixelSums& sums, double* sum);
void moments(const kernels::PixelMoments& moments, at::ScalarType dtype, double* mean,
             double* squares);
void gradient_sums(const kernels::PixelGradientSums& sums, at::ScalarType dtype, double* sum,
                   double* dot);

}  // namespace torch_blocked::exact
