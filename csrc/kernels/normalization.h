// Arguments of the kernels of normalization: sums over the pixels of a channel block, and the
// passes over rows that apply them. A row is one channel block of one image, [pixels, block].
#pragma once

#include <cstdint>

namespace torch_blocked::kernels {

// dst[row, pixel, lane] = src[row, pixel, lane] * scale[row, lane] + shift[row, lane]; scale and
// shift have `periods` rows and repeat.
struct Affine {
  const float *src, *scale, *shift;
  float* dst;
  std::int64_t block, pixels, periods;
};

// dst = (src - mean) * scale + shift, rows and periods as in Affine: near a mean far from zero it
// keeps the digits that src * scale loses.
struct Normalization {
  const float *src, *mean, *scale, *shift;
  float* dst;
  std::int64_t block, pixels, periods;
};

// diff_src = diff_dst * diff_scale + (src - mean) * src_scale + shift, rows and periods as in
// Affine.
struct NormalizationGradient {
  const float *diff_dst, *src, *mean, *diff_scale, *src_scale, *shift;
  float* diff_src;
  std::int64_t block, pixels, periods;
};

// The sum of every lane of src [pixels, block].
struct PixelSums {
  const float* src;
  std::int64_t block, pixels;
  float* sum;
};

// The mean of every lane of src [pixels, block], and the sum of squared deviations from it.
struct PixelMoments {
  const float* src;
  std::int64_t block, pixels;
  float *mean, *squares;
};

// dst = (src - mean) / sqrt(variance + eps) * weight + bias over the channels of each row, or of
// each pixel of a block that is a vector; dst may be src.
struct RowNormalization {
  const float *src, *weight, *bias;  // weight and bias: [channels], or null
  float* dst;
  std::int64_t channels;
  std::int64_t row_step, vector_step;  // floats from a row, or vector of one, to the next
  double eps;
};

// The sums of diff_dst and of diff_dst * (src - mean).
struct PixelGradientSums {
  const float *diff_dst, *src, *mean;
  std::int64_t block, pixels;
  float *sum, *dot;
};

}  // namespace torch_blocked::kernels
