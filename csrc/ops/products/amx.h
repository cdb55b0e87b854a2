// Multiplies float32 by tiles of bfloat16 (kernels/matrix/amx.h). It runs ordinary convolutions of
// any kernel, stride, dilation and padding, and linear layers, whose rows count as pixels.
//
// Weights stay float32. They are split into bfloat16 one part of a sum at a time, between the
// products of the part before. Finished results are written there too, because tiles leave the rest
// of the core idle. The errors are half of the direct kernel's, because 32 products are summed
// before a sum is rounded.
#pragma once

#include <ATen/core/Tensor.h>

#include <array>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "kernels/matrix/amx.h"
#include "ops/convolution_problem.h"
#include "ops/products/transposed_phases.h"
#include "runtime/per_threads.h"
#include "torch_blocked/threads.h"

namespace torch_blocked {

// The distances in floats between pixels, between vectors of channels, and between images.
struct PixelSteps {
  std::int64_t pixel, vector, image;
};

// The problem. `sizes` are those of one image.
struct AmxProblem {
  std::int64_t images, ic, oc;
  SpatialSizes sizes;
  OutputGrid grid;
  PixelSteps src, dst;
  bool has_tail;  // whether dst has a channel tail
  kernels::Epilogue epilogue;
};

// How many times faster tiles must be than others to run a 1x1 convolution. Tiles slow down the
// layers around them a little, which a measurement of one layer does not show. With 1.12,
// EfficientNet-Lite0, MixNet-S and MobileNetV2 take 0.95 to 0.98 of their time with 1, on two cores
// of a Xeon. Models that gain more from tiles take the same time.
inline constexpr double kAmxHandicap = 1.1;

class AmxProducts {
 public:
  // Whether this CPU has AMX and the limits of runtime/isa.h allow it.
  static bool available();
  // Microseconds of all threads together, as if none waited for the busiest.
  static double estimate(const AmxProblem& problem);

  explicit AmxProducts(AmxProblem problem);

  // weight [oc, ic, d, h, w] -> [pairs of vectors, and one that is left][steps, taps, kLanes,
  // vectors, kWidth] from `packed` on
  void pack(const at::Tensor& weight, float* packed) const;
  std::int64_t packed_floats() const { return vectors() * vector_floats(); }

  struct Buffers {
    const float *src, *weights, *bias, *residual;  // bias and residual may be null
    float* dst;
  };
  void run(const Buffers& buffers) const;

  // Whether a dst pixel sees only the src pixel at the same place.
  bool pixelwise() const { return pixelwise_; }
  // Runs `pixels` pixels of a pixelwise problem, in one thread. `src_vector` and `dst_vector` are
  // the distances between vectors of channels.
  void run_pixels(const Buffers& buffers, std::int64_t pixels, std::int64_t src_vector,
                  std::int64_t dst_vector) const;

 private:
  using Amx = kernels::Amx;
  using Sizes3 = std::array<std::int64_t, 3>;  // d, h, w

  // Outputs [row, row + rows) x [column, column + columns) of a plane of an image.
  struct Band {
    std::int64_t image, plane, row, rows, column, columns;
  };
  // How the work is cut up: bands of a plane of outputs, and chunks of pairs of vectors.
  struct Cut {
    std::int64_t row_bands, column_bands, chunks;
  };
  std::int64_t rows(const Cut& cut) const { return ceil_div(p_.sizes.out[1], cut.row_bands); }
  std::int64_t columns(const Cut& cut) const { return ceil_div(p_.sizes.out[2], cut.column_bands); }
  // The bands of all images.
  std::int64_t bands(const Cut& cut) const {
    return p_.images * p_.sizes.out[0] * cut.row_bands * cut.column_bands;
  }
  // The scratchpad of a thread.
  struct Memory {
    float* sums;
    std::uint8_t *weight_parts, *slots;
  };
  // The slots of a band: planes, rows and columns.
  Sizes3 slots_of(std::int64_t rows, std::int64_t columns) const;
  std::int64_t band_bytes(std::int64_t rows, std::int64_t columns) const;
  // The stride of src positions that are copied to slots, along dim i.
  std::int64_t slot_stride(std::size_t i) const {
    return p_.sizes.kernel[i] == 1 ? p_.sizes.stride[i] : 1;
  }
  // The distance in slots between outputs.
  std::int64_t output_stride(std::size_t i) const { return p_.sizes.stride[i] / slot_stride(i); }
  std::int64_t steps() const { return ceil_div(p_.ic, Amx::kLanes); }
  std::int64_t taps() const { return p_.sizes.kernel[0] * p_.sizes.kernel[1] * p_.sizes.kernel[2]; }
  std::int64_t vectors() const { return ceil_div(p_.oc, Amx::kWidth); }
  std::int64_t pairs() const { return ceil_div(vectors(), 2); }
  std::int64_t vector_floats() const { return steps() * taps() * Amx::kLanes * Amx::kWidth; }
  // Cuts the work into bands that fit in the cache, so that the busiest thread has the least to
  // do.
  Cut cut() const;
  // Halves bands: rows first, then columns in whole tiles. False if they cannot be halved.
  bool halve(Cut& cut) const;
  // Microseconds of the busiest thread.
  double busiest(const Cut& cut) const;
  Band band_of(const Cut& cut, std::int64_t index) const;
  void fill(const Band& band, const float* src, std::uint8_t* slots) const;
  std::vector<std::int64_t> segments_of(const Band& band) const;
  Memory memory(std::int64_t rows, std::int64_t columns) const;
  void run_band(const Band& band, Range pairs, const std::vector<std::int64_t>& segments,
                const Memory& memory, const Buffers& buffers) const;

  AmxProblem p_;
  bool pixelwise_;
  std::shared_ptr<PerThreads<Cut>> cuts_ = std::make_shared<PerThreads<Cut>>();
};

}  // namespace torch_blocked
