// Resampling by ATen's rules: finds the taps of each dim once, then makes rows of dst from
// resampled rows of src.
#include "ops/images/resampling.h"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstring>
#include <memory>
#include <utility>
#include <vector>

#include "format/errors.h"
#include "kernels/images/grid_sampler.h"
#include "kernels/images/resampling.h"
#include "kernels/kernels.h"
#include "ops/registered.h"
#include "runtime/isa.h"
#include "torch_blocked/threads.h"

namespace torch_blocked {
namespace {

// The taps of positions of dst along one dim: `index` in src, [positions, taps].
struct Axis {
  std::int64_t src = 1, dst = 1, taps = 1;
  std::vector<std::int64_t> index{0};
  std::vector<float> weight{1};
};

// The pixel at a coordinate. With an odd scale the coordinate may be NaN or beyond the image.
std::int64_t pixel_at(float coordinate, std::int64_t last) {
  if (!(coordinate > 0)) return 0;
  return coordinate < static_cast<float>(last) ? static_cast<std::int64_t>(coordinate) : last;
}

// The weights of four pixels for a point `t` beyond the second one. Source: ATen's
// get_cubic_upsample_coefficients, Keys' kernel with a = -0.75.
std::array<float, 4> cubic_weights(float t) {
  constexpr float a = -0.75f;
  const auto near = [](float x) { return ((a + 2) * x - (a + 3)) * x * x + 1; };
  const auto far = [](float x) { return ((a * x - 5 * a) * x + 8 * a) * x - 4 * a; };
  return {far(t + 1), near(t), near(1 - t), far(2 - t)};
}

void add_cubic(Axis& axis, float real) {
  const std::int64_t end = axis.src - 1;
  const float floor = std::clamp(std::floor(real), -2.f, static_cast<float>(end));
  for (std::int64_t i = -1; i <= 2; ++i) {
    axis.index.push_back(std::clamp<std::int64_t>(static_cast<std::int64_t>(floor) + i, 0, end));
  }
  const auto weights = cubic_weights(std::clamp(real - floor, 0.f, 1.f));
  axis.weight.insert(axis.weight.end(), weights.begin(), weights.end());
}

// The pixel nearest to a position of dst, as ATen's kernels of contiguous images choose it. For
// small 2-D images (by H and W) these are nearest_idx and nearest_exact_idx of UpSample.h, for all
// others HelperInterpNearest and HelperInterpNearestExact of cpu/UpSampleKernel.cpp. They round
// differently, and only the first treat sizes that are equal or twice as large as scales of 1 or 2.
// T is float, or double for images of double.
template <typename T>
std::int64_t nearest_pixel(bool is_exact, bool is_small, const Axis& axis, std::int64_t at,
                           const std::optional<double>& given) {
  const auto scale_in = [&]<typename S>(S) {
    return given ? static_cast<S>(1. / *given)
                 : static_cast<S>(axis.src) / static_cast<S>(axis.dst);
  };
  const std::int64_t end = axis.src - 1;
  if (is_small && !is_exact) {
    if (axis.dst == axis.src) return at;
    if (axis.dst == 2 * axis.src) return at / 2;
    return pixel_at(static_cast<float>(at) * scale_in(0.f), end);
  }
  if (is_small) {
    return pixel_at(static_cast<float>((static_cast<double>(at) + 0.5) * scale_in(0.f)), end);
  }
  const T scale = scale_in(T()), position = static_cast<T>(at);
  if (!is_exact) return pixel_at(static_cast<float>(scale * position), end);
  const T real = std::max(scale * (position + T(0.5)) - T(0.5), T(0));
  return pixel_at(static_cast<float>(static_cast<double>(real) + 0.5), end);
}

// Whether ATen takes the kernel of small images. Source: _use_vectorized_kernel_cond_2d.
bool is_small(const ResamplingProblem& p) {
  return p.dst_dims.size() == 4 && p.dst_dims[2] + p.dst_dims[3] <= 128;
}

Axis nearest_axis(const ResamplingProblem& p, std::size_t dim) {
  Axis axis{p.src_dims[2 + dim], p.dst_dims[2 + dim], 1, {}, {}};
  const bool is_exact = p.interpolation == Interpolation::kNearestExact;
  const std::optional<double>& given = p.scales[dim];
  const auto scale = given && *given > 0 ? given : std::nullopt;
  const auto pixel = p.dtype == at::kDouble ? nearest_pixel<double> : nearest_pixel<float>;
  for (std::int64_t at = 0; at < axis.dst; ++at) {
    axis.index.push_back(pixel(is_exact, is_small(p), axis, at, scale));
  }
  axis.weight.resize(axis.index.size(), 1);
  return axis;
}

// The taps along one dim by ATen's rules, in float32 as there. Source: compute_scales_value and
// area_pixel_compute_source_index of UpSample.h.
Axis axis_of(const ResamplingProblem& p, std::size_t dim) {
  if (is_nearest(p.interpolation)) return nearest_axis(p, dim);
  const bool cubic = p.interpolation == Interpolation::kCubic;
  Axis axis{p.src_dims[2 + dim], p.dst_dims[2 + dim], cubic ? 4 : 2, {}, {}};
  const std::optional<double>& given = p.scales[dim];
  float scale = given && *given > 0 ? static_cast<float>(1. / *given)
                                    : static_cast<float>(axis.src) / static_cast<float>(axis.dst);
  if (p.align_corners) {
    scale = axis.dst > 1 ? static_cast<float>(axis.src - 1) / static_cast<float>(axis.dst - 1) : 0;
  }
  const std::int64_t end = axis.src - 1;
  for (std::int64_t at = 0; at < axis.dst; ++at) {
    const auto position = static_cast<float>(at);
    float real = p.align_corners ? scale * position : scale * (position + 0.5f) - 0.5f;
    if (cubic) {
      add_cubic(axis, real);
      continue;
    }
    if (axis.src == axis.dst) real = position;
    real = std::max(real, 0.f);
    const std::int64_t first = pixel_at(real, end);
    const float rest = std::clamp(real - static_cast<float>(first), 0.f, 1.f);
    axis.index.insert(axis.index.end(), {first, std::min(first + 1, end)});
    axis.weight.insert(axis.weight.end(), {1 - rest, rest});
  }
  return axis;
}

std::int64_t bytes_of_pixel(const ResamplingProblem& p) {
  const std::int64_t lanes = p.format.is_blocked() ? p.format.block : p.src_dims[1];
  return lanes * static_cast<std::int64_t>(c10::elementSize(p.dtype));
}

// A row of dst is a weighted sum of src rows, each of which is first resampled along w. Resampled
// rows are kept for the next rows of dst.
struct Resampling {
  std::array<Axis, 3> axes;           // d, h, w
  std::vector<std::int64_t> offsets;  // of w's taps, in elements
  std::int64_t images;                // of one block each
  bool is_bfloat16;                   // weighted sums of bfloat16, computed in float32
  std::int64_t pixel_bytes, lanes;    // a pixel in numbers, or in floats where it is only copied
  const kernels::Kernels* kernels;

  explicit Resampling(const ResamplingProblem& p)
      : images(p.src_dims[0] * (p.format.is_blocked() ? p.format.blocks(p.src_dims[1]) : 1)),
        is_bfloat16(p.dtype == at::kBFloat16 && !is_nearest(p.interpolation)),
        pixel_bytes(bytes_of_pixel(p)),
        lanes(pixel_bytes / (is_bfloat16 ? 2 : 4)),
        kernels(p.format.is_blocked() && (p.dtype == at::kFloat || is_bfloat16)
                    ? &kernels::kernels_for(p.format.block)
                    : &kernels::kernels()) {
    const std::size_t spatial = p.src_dims.size() - 2;
    for (std::size_t dim = 0; dim < spatial; ++dim) axes[3 - spatial + dim] = axis_of(p, dim);
    for (const std::int64_t index : axes[2].index) offsets.push_back(index * lanes);
  }

  std::int64_t rows() const { return images * axes[0].dst * axes[1].dst; }
  std::int64_t src_row() const { return axes[2].src * lanes; }
  std::int64_t dst_row() const { return axes[2].dst * lanes; }
  // Resamples row `row` of src, counted through all images and planes. `room` is for a row of src.
  void resample_row(const void* src, std::int64_t row, std::vector<float>& room, float* dst) const {
    const float* from = static_cast<const float*>(src) + row * src_row();
    if (is_bfloat16) {
      room.resize(static_cast<std::size_t>(src_row()));
      from = room.data();
      kernels->widen_bfloats(static_cast<const std::uint16_t*>(src) + row * src_row(), room.data(),
                             src_row());
    }
    kernels->resample_row({.offsets = offsets.data(),
                           .weights = axes[2].weight.data(),
                           .taps = axes[2].taps,
                           .pixels = axes[2].dst,
                           .block = lanes},
                          from, dst);
  }
  bool has_whole_words() const { return pixel_bytes == lanes * 4; }
  // Makes rows [begin, end) of dst.
  void run(const void* src, void* dst, std::int64_t begin, std::int64_t end) const;
  void copy_bytes(const std::byte* src, std::byte* dst, std::int64_t begin, std::int64_t end) const;
};

// The resampled rows of src that the taps along d and h need at a time: at most four neighbours in
// at most two planes, each with a place of its own.
class ResampledRows {
 public:
  ResampledRows(const Resampling& r, const void* src)
      : r_(r), src_(src), memory_(static_cast<std::size_t>(kPlaces * r.dst_row())) {
    held_.fill(-1);
  }

  const float* row(std::int64_t plane, std::int64_t row) {
    const auto place = static_cast<std::size_t>(plane % 2 * kRows + row % kRows);
    float* const to = memory_.data() + static_cast<std::int64_t>(place) * r_.dst_row();
    const std::int64_t at = plane * r_.axes[1].src + row;
    if (std::exchange(held_[place], at) != at) r_.resample_row(src_, at, room_, to);
    return to;
  }

 private:
  static constexpr std::int64_t kRows = 4, kPlaces = 2 * kRows;

  const Resampling& r_;
  const void* src_;
  std::vector<float> memory_, room_;
  std::array<std::int64_t, kPlaces> held_;
};

void Resampling::run(const void* src, void* dst, std::int64_t begin, std::int64_t end) const {
  const Axis &planes = axes[0], &lines = axes[1];
  const std::int64_t taps = planes.taps * lines.taps;
  ResampledRows resampled(*this, src);
  std::vector<float> room, made(static_cast<std::size_t>(is_bfloat16 ? dst_row() : 0));
  const auto narrow = [&](std::int64_t at) {
    auto* bits = static_cast<std::uint16_t*>(dst) + at * dst_row();
    if (is_bfloat16) kernels->narrow_floats(made.data(), bits, dst_row());
  };
  std::int64_t last = -1;  // the row of src in the previous row of dst, with one tap
  for (std::int64_t at = begin; at < end; ++at) {
    const std::int64_t line = at % lines.dst, plane = at / lines.dst % planes.dst,
                       image = at / lines.dst / planes.dst;
    float* const to = is_bfloat16 ? made.data() : static_cast<float*>(dst) + at * dst_row();
    const auto of_plane = [&](std::int64_t tap) {
      return static_cast<std::size_t>(plane * planes.taps + tap);
    };
    const auto of_line = [&](std::int64_t tap) {
      return static_cast<std::size_t>(line * lines.taps + tap);
    };
    const auto src_plane = [&](std::int64_t tap) {
      return image * planes.src + planes.index[of_plane(tap)];
    };
    if (taps == 1) {
      const std::int64_t row = src_plane(0) * lines.src + lines.index[of_line(0)];
      if (std::exchange(last, row) != row) {
        resample_row(src, row, room, to);
      } else if (!is_bfloat16) {
        std::copy_n(to - dst_row(), dst_row(), to);
      }
      narrow(at);
      continue;
    }
    kernels::WeighedRows sum{
        .rows = {}, .weights = {}, .count = taps, .length = dst_row(), .dst = to};
    for (std::int64_t i = 0; i < taps; ++i) {
      const std::int64_t d = i / lines.taps, h = i % lines.taps;
      const auto place = static_cast<std::size_t>(i);
      sum.rows[place] = resampled.row(src_plane(d), lines.index[of_line(h)]);
      sum.weights[place] = planes.weight[of_plane(d)] * lines.weight[of_line(h)];
    }
    kernels->weigh_rows(sum);
    narrow(at);
  }
}

// Copies the nearest pixels if their bytes are not whole floats: bytes of few channels in
// channels-last.
void Resampling::copy_bytes(const std::byte* src, std::byte* dst, std::int64_t begin,
                            std::int64_t end) const {
  const Axis &planes = axes[0], &lines = axes[1], &pixels = axes[2];
  const auto size = static_cast<std::size_t>(pixel_bytes);
  std::byte* to = dst + begin * pixels.dst * pixel_bytes;
  for (std::int64_t at = begin; at < end; ++at) {
    const auto line = static_cast<std::size_t>(at % lines.dst),
               plane = static_cast<std::size_t>(at / lines.dst % planes.dst);
    const std::int64_t image = at / lines.dst / planes.dst;
    const std::int64_t row =
        (image * planes.src + planes.index[plane]) * lines.src + lines.index[line];
    for (const std::int64_t pixel : pixels.index) {
      std::memcpy(to, src + (row * pixels.src + pixel) * pixel_bytes, size);
      to += pixel_bytes;
    }
  }
}

}  // namespace

std::function<void(const void* src, void* dst)> plan_resampling(const ResamplingProblem& problem) {
  return [r = std::make_shared<const Resampling>(problem)](const void* src, void* dst) {
    const std::int64_t row_bytes = r->axes[2].dst * r->pixel_bytes;
    parallel_units(r->rows(), row_bytes, [&](std::int64_t begin, std::int64_t end) {
      if (r->is_bfloat16 || r->has_whole_words()) {
        r->run(src, dst, begin, end);
      } else {
        r->copy_bytes(static_cast<const std::byte*>(src), static_cast<std::byte*>(dst), begin, end);
      }
    });
  };
}

at::Tensor resample(const at::Tensor& input, std::int64_t channels, at::IntArrayRef size,
                    std::int64_t interpolation, bool align_corners, at::ArrayRef<double> scales) {
  constexpr const char* kOp = "resample";
  if (interpolation < 0 || interpolation > static_cast<std::int64_t>(Interpolation::kCubic)) {
    fail_value(kOp, "interpolation 0 to 3", text(interpolation), "");
  }
  const auto mode = static_cast<Interpolation>(interpolation);
  const bool any =
      is_nearest(mode) || (input.scalar_type() == at::kBFloat16 && multiplies_bfloats());
  const Blocked src =
      any ? blocked_argument(kOp, input, channels) : float_argument(kOp, input, channels);
  const auto spatial = static_cast<std::size_t>(src.ndims() - 2);
  if (size.size() != spatial || scales.size() != spatial) {
    fail_value(kOp, text("a size and a scale for each of ", spatial, " dims"),
               text(size, " and ", scales), "");
  }
  if (mode == Interpolation::kCubic && spatial > 2) {  // its taps have room in two dims
    fail_value(kOp, "interpolation 0 to 2 for three dims", text(interpolation), "");
  }
  const bool enlarges_nothing = src.pixels() == 0 || channels == 0;
  if (enlarges_nothing || std::ranges::any_of(size, [](std::int64_t each) { return each <= 0; })) {
    fail_value(kOp, "an image with pixels, and a size of some", text(src.dims(), " and ", size),
               "");
  }
  ResamplingProblem problem{.interpolation = mode,
                            .src_dims = src.dims(),
                            .dst_dims = {src.batch(), channels},
                            .format = Format::blocked(src.block()),
                            .align_corners = align_corners,
                            .scales = {},
                            .dtype = input.scalar_type()};
  problem.dst_dims.insert(problem.dst_dims.end(), size.begin(), size.end());
  for (std::size_t dim = 0; dim < spatial; ++dim) problem.scales[dim] = scales[dim];
  Blocked dst = empty_blocked(problem.dst_dims, src.block(), input.options());
  if (dst.physical.numel() == 0) return dst.physical;
  plan_resampling(problem)(src.physical.const_data_ptr(), dst.physical.mutable_data_ptr());
  return dst.physical;
}

}  // namespace torch_blocked
