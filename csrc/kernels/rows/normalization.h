// Arguments of the kernels of normalization: sums over the pixels of a channel block, and the
// passes over rows that apply them. A row is one channel block of one image, [pixels, block]. Its
// numbers are float32, or bfloat16 for the kernels named `bfloats`. All else is float32.
#pragma once

#include <cstdint>

namespace torch_blocked::kernels {

// dst[row, pixel, lane] = src[row, pixel, lane] * scale[row, lane] + shift[row, lane]; scale and
// shift have `periods` rows and repeat.
struct Affine {
  const void* src;
  const float *scale, *shift;
  void* dst;
  std::int64_t block, pixels, periods;
};

// dst = (src - mean) * scale + shift, with rows and periods as in Affine. If the mean is far from
// zero, this keeps digits that src * scale would lose.
struct Normalization {
  const void* src;
  const float *mean, *scale, *shift;
  void* dst;
  std::int64_t block, pixels, periods;
};

// diff_src = diff_dst * diff_scale + (src - mean) * src_scale + shift, rows and periods as in
// Affine.
struct NormalizationGradient {
  const void *diff_dst, *src;
  const float *mean, *diff_scale, *src_scale, *shift;
  void* diff_src;
  std::int64_t block, pixels, periods;
};

// The sum of every lane of src [pixels, block], or the sum of its squares.
struct PixelSums {
  const void* src;
  std::int64_t block, pixels;
  float* sum;
};

// The mean of every lane of src [pixels, block], and the sum of squared deviations from it.
struct PixelMoments {
  const void* src;
  std::int64_t block, pixels;
  float *mean, *squares;
};

// dst = (src - mean) / sqrt(variance + eps) * weight + bias over the channels of each row, or of
// each pixel if the block is one vector. dst may be src.
struct RowNormalization {
  const float *src, *weight, *bias;  // weight and bias: [channels], or null
  float* dst;
  std::int64_t channels;
  std::int64_t row_step, vector_step;  // floats from a row, or vector of one, to the next
  double eps;
};

// The sums of diff_dst and of diff_dst * (src - mean).
struct PixelGradientSums {
  const void *diff_dst, *src;
  const float* mean;
  std::int64_t block, pixels;
  float *sum, *dot;
};

}  // namespace torch_blocked::kernels
