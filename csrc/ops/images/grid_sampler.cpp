// Samples an image at the points of a grid, 2-D and 3-D, and computes the gradients. Every point
// becomes a few taps: pixels of the image with a weight each. Taps are found once and used for all
// channels. float32.
#include "kernels/images/grid_sampler.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>
#include <vector>

#include "format/errors.h"
#include "kernels/kernels.h"
#include "ops/blocked.h"
#include "ops/registered.h"
#include "torch_blocked/threads.h"

namespace torch_blocked {
namespace {

// Numbered as in aten::grid_sampler_2d.
enum SampledBy : std::int64_t { kLinear, kNearest, kCubic };
enum Padding : std::int64_t { kZeros, kBorder, kReflection };

struct Sampling {
  std::int64_t interpolation, padding;
  bool align_corners;
  bool flat;      // 2-D
  bool backward;  // the taps are for gradients

  std::int64_t taps_per_dim() const {
    return interpolation == kLinear ? 2 : interpolation == kNearest ? 1 : 4;
  }
};

// A coordinate and its derivative by the grid's value.
struct Coordinate {
  float at, slope;
};

// The pixel coordinate of a grid value in [-1, 1].
Coordinate pixel_coordinate(float value, std::int64_t size, bool align_corners) {
  const auto extent = static_cast<float>(size);
  if (align_corners) return {(value + 1) / 2 * (extent - 1), (extent - 1) / 2};
  return {((value + 1) * extent - 1) / 2, extent / 2};
}

// As in ATen's kernels, NaN becomes the first pixel in 2-D. In 3-D it becomes the last one, which
// gets no gradient.
Coordinate clip(Coordinate c, std::int64_t size, const Sampling& sampling) {
  const auto last = static_cast<float>(size - 1);
  if (std::isnan(c.at) && !sampling.flat) return {sampling.backward ? c.at : last, 0};
  if (!(c.at > 0)) return {0, 0};
  return c.at >= last ? Coordinate{last, 0} : c;
}

// Mirrors a coordinate at the outer pixels, or at their outer edges, as often as needed.
Coordinate reflect(Coordinate c, std::int64_t size, bool align_corners) {
  const float low = align_corners ? 0.f : -0.5f;
  const float span = static_cast<float>(align_corners ? size - 1 : size);
  if (span == 0) return {0, 0};
  float distance = c.at - low;
  if (distance < 0) distance = -distance, c.slope = -c.slope;
  const float rest = std::fmod(distance, span);
  const bool flipped = std::fmod(std::floor(distance / span), 2.f) != 0;
  if (flipped) return {span - rest + low, -c.slope};
  return {rest + low, c.slope};
}

Coordinate padded(Coordinate c, std::int64_t size, const Sampling& sampling) {
  if (sampling.padding == kReflection) c = reflect(c, size, sampling.align_corners);
  return sampling.padding == kZeros ? c : clip(c, size, sampling);
}

// The taps of one coordinate along its dim. Weight and slope are 0 outside the image. But in 2-D a
// NaN weight stays NaN there, as in ATen: NaN times zero makes the result NaN.
struct DimTaps {
  std::array<std::int64_t, 4> index{};
  std::array<float, 4> weight{}, slope{};
  std::array<bool, 4> inside{};

  void set(std::size_t tap, float at, std::int64_t size, float w, float s, bool keeps_nan) {
    inside[tap] = at >= 0 && at <= static_cast<float>(size - 1);
    if (inside[tap]) index[tap] = static_cast<std::int64_t>(at);
    if (inside[tap] || (keeps_nan && std::isnan(w))) weight[tap] = w;
    if (inside[tap] || (keeps_nan && std::isnan(s))) slope[tap] = s;
  }
};

// Keys' cubic convolution with A = -0.75, and its derivative. Source: ATen, UpSample.h.
constexpr float kA = -0.75f;
float near_weight(float x) { return ((kA + 2) * x - (kA + 3)) * x * x + 1; }
float far_weight(float x) { return ((kA * x - 5 * kA) * x + 8 * kA) * x - 4 * kA; }
float near_slope(float x) { return (3 * (kA + 2) * x - 2 * (kA + 3)) * x; }
float far_slope(float x) { return (3 * kA * x - 10 * kA) * x + 8 * kA; }

DimTaps dim_taps(float value, std::int64_t size, const Sampling& sampling) {
  DimTaps taps;
  const Coordinate raw = pixel_coordinate(value, size, sampling.align_corners);
  if (sampling.interpolation == kCubic) {
    const float base = std::floor(raw.at), t = raw.at - base;
    const std::array weights{far_weight(t + 1), near_weight(t), near_weight(1 - t),
                             far_weight(2 - t)};
    const std::array slopes{far_slope(t + 1), near_slope(t), -near_slope(1 - t), -far_slope(2 - t)};
    for (std::size_t tap = 0; tap < 4; ++tap) {
      const Coordinate at = padded({base - 1 + static_cast<float>(tap), 0}, size, sampling);
      taps.set(tap, at.at, size, weights[tap], slopes[tap] * raw.slope, sampling.flat);
    }
    return taps;
  }
  const Coordinate c = padded(raw, size, sampling);
  if (sampling.interpolation == kNearest) {
    taps.set(0, std::nearbyint(c.at), size, 1, 0, sampling.flat);
    return taps;
  }
  const float base = std::floor(c.at);
  taps.set(0, base, size, base + 1 - c.at, -c.slope, sampling.flat);
  taps.set(1, base + 1, size, c.at - base, c.slope, sampling.flat);
  return taps;
}

// The taps of all points of one image's grid: [points, taps].
struct ImageTaps {
  std::int64_t taps, points;
  std::vector<std::int64_t> offsets;
  std::vector<float> weights;
  std::vector<std::vector<float>> slopes;  // for each dim's coordinate; for gradients only
};

class Sampler {
 public:
  Sampler(const Blocked& src, const at::Tensor& grid, const Sampling& sampling)
      : sampling_(sampling), block_(src.block()), grid_(grid.contiguous()) {
    for (std::int64_t dim = 2; dim < src.ndims(); ++dim) sizes_.push_back(src.physical.size(dim));
    taps_ = 1;
    for (std::size_t dim = 0; dim < sizes_.size(); ++dim) taps_ *= sampling.taps_per_dim();
    points_ = grid.numel() / std::max<std::int64_t>(1, grid.size(0) * grid.size(-1));
  }

  std::int64_t points() const { return points_; }

  ImageTaps taps(std::int64_t image, bool with_slopes) const {
    const auto count = static_cast<std::size_t>(points_ * taps_);
    ImageTaps result{
        taps_, points_, std::vector<std::int64_t>(count), std::vector<float>(count), {}};
    if (with_slopes) result.slopes.assign(sizes_.size(), std::vector<float>(count));
    const auto dims = static_cast<std::int64_t>(sizes_.size());
    const float* values = grid_.const_data_ptr<float>() + image * points_ * dims;
    parallel_units(points_, taps_ * 16, [&](std::int64_t begin, std::int64_t end) {
      for (std::int64_t point = begin; point < end; ++point) {
        fill(values + point * dims, static_cast<std::size_t>(point * taps_), result);
      }
    });
    return result;
  }

 private:
  // Fills in every combination of the dims' taps.
  void fill(const float* values, std::size_t first, ImageTaps& result) const {
    const std::size_t dims = sizes_.size();
    std::array<DimTaps, 3> of_dim;
    for (std::size_t dim = 0; dim < dims; ++dim) {  // the grid's values are x, y, z
      of_dim[dim] = dim_taps(values[dims - 1 - dim], sizes_[dim], sampling_);
    }
    const auto per_dim = static_cast<std::size_t>(sampling_.taps_per_dim());
    for (std::size_t tap = 0; tap < static_cast<std::size_t>(taps_); ++tap) {
      std::int64_t pixel = 0;
      float weight = 1;
      bool inside = true;
      std::array<float, 3> slope{1, 1, 1};
      std::size_t rest = tap;
      for (std::size_t dim = dims; dim-- > 0; rest /= per_dim) {
        const DimTaps& taps = of_dim[dim];
        const std::size_t at = rest % per_dim;
        std::int64_t stride = 1;
        for (std::size_t inner = dim + 1; inner < dims; ++inner) stride *= sizes_[inner];
        pixel += taps.index[at] * stride;
        weight *= taps.weight[at];
        inside = inside && taps.inside[at];
        for (std::size_t by = 0; by < dims; ++by) {
          slope[by] *= by == dim ? taps.slope[at] : taps.weight[at];
        }
      }
      weight = inside || !sampling_.backward ? weight : 0;
      // Outside no pixel is read: 0 times a NaN would be a NaN.
      result.offsets[first + tap] = inside || std::isnan(weight) ? pixel * block_ : -1;
      result.weights[first + tap] = weight;
      for (std::size_t by = 0; by < result.slopes.size(); ++by) {
        result.slopes[by][first + tap] = slope[by];
      }
    }
  }

  Sampling sampling_;
  std::int64_t block_, taps_, points_;
  at::Tensor grid_;
  Dims sizes_;
};

kernels::PixelTaps part_of(const ImageTaps& taps, std::int64_t begin, std::int64_t end,
                           std::int64_t block) {
  return {taps.offsets.data() + begin * taps.taps, taps.weights.data() + begin * taps.taps,
          taps.taps, end - begin, block};
}

Blocked check(const at::Tensor& input, std::int64_t channels, const at::Tensor& grid,
              const Sampling& sampling) {
  constexpr const char* kOp = "grid_sampler";
  const Blocked src = float_argument(kOp, input, channels);
  const std::int64_t ndims = src.ndims();
  if (grid.scalar_type() != at::kFloat) {
    fail_not_implemented(kOp, "a float32 grid", text(grid.dtype().name()), "");
  }
  if (ndims < 4 || grid.dim() != ndims || grid.size(0) != src.batch() ||
      grid.size(-1) != ndims - 2) {
    fail_value(kOp, text("an image [N, C, *spatial] and a grid [N, *out, dims]"),
               text(src.dims(), " and ", grid.sizes()), "");
  }
  if (src.pixels() == 0) fail_value(kOp, "an image with pixels", text(src.dims()), "");
  // Coordinates are float32, which represents every integer up to this.
  const at::IntArrayRef spatial = src.physical.sizes().slice(2, src.physical.dim() - 3);
  if (std::ranges::any_of(spatial, [](std::int64_t size) { return size > 1 << 24; })) {
    fail_not_implemented(kOp, "at most 2^24 pixels in a dim", text(src.dims()), "");
  }
  if (sampling.interpolation < kLinear || sampling.interpolation > kCubic ||
      sampling.padding < kZeros || sampling.padding > kReflection ||
      (sampling.interpolation == kCubic && ndims != 4)) {
    fail_value(kOp, "a mode of aten::grid_sampler", text(sampling.interpolation), "");
  }
  return src;
}

Dims output_dims(const Blocked& src, const at::Tensor& grid) {
  Dims dims{src.batch(), src.channels};
  for (std::int64_t dim = 1; dim + 1 < grid.dim(); ++dim) dims.push_back(grid.size(dim));
  return dims;
}

}  // namespace

at::Tensor grid_sampler(const at::Tensor& input, std::int64_t channels, const at::Tensor& grid,
                        std::int64_t interpolation_mode, std::int64_t padding_mode,
                        bool align_corners) {
  const Sampling sampling{interpolation_mode, padding_mode, align_corners, grid.dim() == 4, false};
  const Blocked src = check(input, channels, grid, sampling);
  Blocked dst = empty_blocked(output_dims(src, grid), src.block(), input.options());
  const Sampler sampler(src, grid, sampling);
  const std::int64_t block = src.block(), blocks = src.blocks();
  const std::int64_t src_row = src.pixels() * block, dst_row = sampler.points() * block;
  const auto kernel = kernels::kernels_for(block).sample_pixels;
  for (std::int64_t image = 0; image < src.batch(); ++image) {
    const ImageTaps taps = sampler.taps(image, false);
    const float* in = src.physical.const_data_ptr<float>() + image * blocks * src_row;
    float* out = dst.physical.mutable_data_ptr<float>() + image * blocks * dst_row;
    parallel_units(taps.points, blocks * block, [&](std::int64_t begin, std::int64_t end) {
      for (std::int64_t row = 0; row < blocks; ++row) {
        kernel(part_of(taps, begin, end, block), in + row * src_row,
               out + row * dst_row + begin * block);
      }
    });
  }
  clear_tail_(dst.physical, channels);  // a NaN weight turns the tail's zeros into NaN
  return dst.physical;
}

std::tuple<at::Tensor, at::Tensor> grid_sampler_backward(
    const at::Tensor& grad_output, const at::Tensor& input, std::int64_t channels,
    const at::Tensor& grid, std::int64_t interpolation_mode, std::int64_t padding_mode,
    bool align_corners, std::array<bool, 2> output_mask) {
  const Sampling sampling{interpolation_mode, padding_mode, align_corners, grid.dim() == 4, true};
  const Blocked src = check(input, channels, grid, sampling);
  const Blocked diff_dst = float_argument("grid_sampler_backward", grad_output, channels);
  if (diff_dst.dims() != output_dims(src, grid) || diff_dst.block() != src.block()) {
    fail_value("grid_sampler_backward", text("a gradient of dims ", output_dims(src, grid)),
               text(diff_dst.dims()), "");
  }
  const at::Tensor none = at::empty({0}, input.options());
  at::Tensor diff_src = output_mask[0] ? at::zeros(src.physical.sizes(), input.options()) : none;
  const at::Tensor diff_grid =
      output_mask[1] ? at::zeros(grid.sizes(), grid.options()) : none.clone();
  const Sampler sampler(src, grid, sampling);
  const auto dims = static_cast<std::size_t>(src.ndims() - 2);
  const std::int64_t block = src.block(), blocks = src.blocks(), points = sampler.points();
  const std::int64_t src_row = src.pixels() * block, dst_row = points * block;
  const auto& table = kernels::kernels_for(block);
  for (std::int64_t image = 0; image < src.batch(); ++image) {
    const ImageTaps taps = sampler.taps(image, output_mask[1]);
    const float* in = src.physical.const_data_ptr<float>() + image * blocks * src_row;
    const float* diff = diff_dst.physical.const_data_ptr<float>() + image * blocks * dst_row;
    if (output_mask[0]) {  // threads take whole channel blocks, so no two write the same pixel
      float* out = diff_src.mutable_data_ptr<float>() + image * blocks * src_row;
      parallel_units(blocks, dst_row, [&](std::int64_t begin, std::int64_t end) {
        for (std::int64_t row = begin; row < end; ++row) {
          table.spread_pixels(part_of(taps, 0, points, block), diff + row * dst_row,
                              out + row * src_row);
        }
      });
    }
    if (!output_mask[1]) continue;
    float* out =
        diff_grid.mutable_data_ptr<float>() + image * points * static_cast<std::int64_t>(dims);
    parallel_units(points, blocks * block, [&](std::int64_t begin, std::int64_t end) {
      std::vector<float> dots(static_cast<std::size_t>((end - begin) * taps.taps));
      for (std::int64_t row = 0; row < blocks; ++row) {
        table.dot_pixels(part_of(taps, begin, end, block), diff + row * dst_row + begin * block,
                         in + row * src_row, dots.data());
      }
      for (std::int64_t point = begin; point < end; ++point) {
        for (std::size_t by = 0; by < dims; ++by) {
          float sum = 0;
          for (std::int64_t tap = 0; tap < taps.taps; ++tap) {
            sum += dots[static_cast<std::size_t>((point - begin) * taps.taps + tap)] *
                   taps.slopes[by][static_cast<std::size_t>(point * taps.taps + tap)];
          }
          out[static_cast<std::size_t>(point) * dims + dims - 1 - by] = sum;
        }
      }
    });
  }
  if (output_mask[0]) clear_tail_(diff_src, channels);
  return {diff_src, diff_grid};
}

}  // namespace torch_blocked
