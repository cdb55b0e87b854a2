// Reductions over the channels of every pixel: over the blocks in vectors of lanes, then over the
// lanes. A reduction over another dim keeps the lanes separate. Pixels run in tiles, so that a pass
// over the blocks, which are `pixels` apart, stays in L2.
#include "kernels/rows/softmax.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "kernels/vector/finish.h"
#include "kernels/vector/lanes.h"

namespace torch_blocked::kernels::CPU_CAPABILITY {
namespace {

constexpr std::int64_t kTile = 16;
constexpr std::int64_t kMaxBlock = 32;

// One value per lane of every pixel of a tile: [pixels, block].
struct Tile {
  alignas(64) float values[kTile * kMaxBlock];
};

// `value` in the first `lanes` lanes, `fill` in the others.
inline Vec only(const Vec& value, std::int64_t lanes, float fill) {
  if (lanes >= kWidth) return value;
  return Vec::set(Vec(fill), value, std::max<std::int64_t>(lanes, 0));
}

// The two reductions, for vectors and for single values. The maximum keeps NaN.
struct Max {
  static constexpr float initial = -std::numeric_limits<float>::infinity();
  Vec operator()(const Vec& a, const Vec& b) const { return at::vec::maximum(a, b); }
  float operator()(float a, float b) const { return a > b || a != a ? a : b; }
};
struct Sum {
  static constexpr float initial = 0.f;
  Vec operator()(const Vec& a, const Vec& b) const { return a + b; }
  float operator()(float a, float b) const { return a + b; }
};

// Calls f(offset in the image, offset in the tile, width, channels left from there) for the vectors
// of the pixels [first, first + pixels), block by block.
template <typename F>
inline void for_tile(const ChannelRows& rows, std::int64_t first, std::int64_t pixels, F&& f) {
  for (std::int64_t channel = 0; channel < rows.channels; channel += rows.block) {
    const std::int64_t base = channel * rows.pixels + first * rows.block;
    for (std::int64_t pixel = 0; pixel < pixels; ++pixel) {
      for_lanes(rows.block, [&](std::int64_t lane, std::int64_t width) {
        const std::int64_t offset = pixel * rows.block + lane;
        f(base + offset, offset, width, rows.channels - channel - lane);
      });
    }
  }
}

// acc = op over the channels of f(offset in the image, offset in the tile, width). It has one value
// per pixel, in all of its lanes, or one per lane.
template <typename Op, typename F>
inline void reduce(const ChannelRows& rows, std::int64_t first, std::int64_t pixels, Tile& acc,
                   Op op, F&& f) {
  std::fill_n(acc.values, pixels * rows.block, Op::initial);
  for_tile(rows, first, pixels,
           [&](std::int64_t at, std::int64_t in_tile, std::int64_t width, std::int64_t channels) {
             const Vec value = only(f(at, in_tile, width), channels, Op::initial);
             store(op(load(acc.values + in_tile, width), value), acc.values + in_tile, width);
           });
  for (std::int64_t pixel = 0; rows.lanes && pixel < pixels; ++pixel) {
    float* lanes = acc.values + pixel * rows.block;
    for (std::int64_t half = rows.block / 2; half > 0; half /= 2) {
      for (std::int64_t lane = 0; lane < half; ++lane) {
        lanes[lane] = op(lanes[lane], lanes[lane + half]);
      }
    }
    std::fill_n(lanes, rows.block, lanes[0]);
  }
}

// Calls f(first, count) for tiles of [begin, end).
template <typename F>
inline void for_tiles(std::int64_t begin, std::int64_t end, F&& f) {
  for (std::int64_t first = begin; first < end; first += kTile) {
    f(first, std::min(kTile, end - first));
  }
}

// maxima = the greatest of src, sums = the sum of exp(src - maxima), over the channels. Each power
// goes to keep(value, offset in the image, width).
template <typename F>
inline void reduce_exponentials(const ChannelRows& rows, const float* src, std::int64_t first,
                                std::int64_t pixels, Tile& maxima, Tile& sums, F&& keep) {
  reduce(rows, first, pixels, maxima, Max(),
         [&](std::int64_t at, std::int64_t, std::int64_t width) { return load(src + at, width); });
  reduce(rows, first, pixels, sums, Sum(),
         [&](std::int64_t at, std::int64_t in_tile, std::int64_t width) {
           const Vec value = (load(src + at, width) - load(maxima.values + in_tile, width)).exp();
           keep(value, at, width);
           return value;
         });
}

// The greatest value of one lane and its channel, as float (exact below 2^24).
struct Best {
  float value, channel;

  // The first NaN wins, then the greatest, then the least channel.
  bool loses_to(const Best& other) const {
    const bool nan = value != value, other_nan = other.value != other.value;
    if (nan || other_nan) return other_nan && (!nan || other.channel < channel);
    return other.value > value || (other.value == value && other.channel < channel);
  }
};

}  // namespace

void softmax(const ChannelRows& rows, const float* src, float* dst, std::int64_t begin,
             std::int64_t end) {
  for_tiles(begin, end, [&](std::int64_t first, std::int64_t pixels) {
    Tile maxima, sums;
    reduce_exponentials(rows, src, first, pixels, maxima, sums,
                        [&](const Vec& value, std::int64_t at, std::int64_t width) {
                          store(value, dst + at, width);
                        });
    for_tile(rows, first, pixels,
             [&](std::int64_t at, std::int64_t in_tile, std::int64_t width, std::int64_t channels) {
               const Vec value = load(dst + at, width) / load(sums.values + in_tile, width);
               store(only(value, channels, 0.f), dst + at, width);
             });
  });
}

void log_softmax(const ChannelRows& rows, const float* src, float* dst, std::int64_t begin,
                 std::int64_t end) {
  for_tiles(begin, end, [&](std::int64_t first, std::int64_t pixels) {
    Tile maxima, sums;
    reduce_exponentials(rows, src, first, pixels, maxima, sums,
                        [](const Vec&, std::int64_t, std::int64_t) {});
    for (std::int64_t i = 0; i < pixels * rows.block; i += rows.lanes ? rows.block : 1) {
      std::fill_n(sums.values + i, rows.lanes ? rows.block : 1, std::log(sums.values[i]));
    }
    for_tile(rows, first, pixels,
             [&](std::int64_t at, std::int64_t in_tile, std::int64_t width, std::int64_t channels) {
               const Vec value = load(src + at, width) - load(maxima.values + in_tile, width) -
                                 load(sums.values + in_tile, width);
               store(only(value, channels, 0.f), dst + at, width);
             });
  });
}

void softmax_gradient(const ChannelRows& rows, const float* diff_dst, const float* dst,
                      float* diff_src, std::int64_t begin, std::int64_t end) {
  for_tiles(begin, end, [&](std::int64_t first, std::int64_t pixels) {
    Tile dots;
    reduce(rows, first, pixels, dots, Sum(),
           [&](std::int64_t at, std::int64_t, std::int64_t width) {
             return load(diff_dst + at, width) * load(dst + at, width);
           });
    for_tile(rows, first, pixels,
             [&](std::int64_t at, std::int64_t in_tile, std::int64_t width, std::int64_t channels) {
               const Vec diff = load(diff_dst + at, width) - load(dots.values + in_tile, width);
               store(only(diff * load(dst + at, width), channels, 0.f), diff_src + at, width);
             });
  });
}

void log_softmax_gradient(const ChannelRows& rows, const float* diff_dst, const float* dst,
                          float* diff_src, std::int64_t begin, std::int64_t end) {
  for_tiles(begin, end, [&](std::int64_t first, std::int64_t pixels) {
    Tile sums;
    reduce(rows, first, pixels, sums, Sum(),
           [&](std::int64_t at, std::int64_t, std::int64_t width) {
             return load(diff_dst + at, width);
           });
    for_tile(rows, first, pixels,
             [&](std::int64_t at, std::int64_t in_tile, std::int64_t width, std::int64_t channels) {
               const Vec share = load(dst + at, width).exp() * load(sums.values + in_tile, width);
               store(only(load(diff_dst + at, width) - share, channels, 0.f), diff_src + at, width);
             });
  });
}

void channel_sum(const ChannelRows& rows, const float* src, float* sums, std::int64_t begin,
                 std::int64_t end) {
  for_tiles(begin, end, [&](std::int64_t first, std::int64_t pixels) {
    Tile acc;
    reduce(rows, first, pixels, acc, Sum(), [&](std::int64_t at, std::int64_t, std::int64_t width) {
      return load(src + at, width);
    });
    for (std::int64_t pixel = 0; pixel < pixels; ++pixel) {
      sums[first + pixel] = acc.values[pixel * rows.block];
    }
  });
}

void channel_argmax(const ChannelRows& rows, const float* src, float sign, std::int64_t* indices,
                    std::int64_t begin, std::int64_t end) {
  for_tiles(begin, end, [&](std::int64_t first, std::int64_t pixels) {
    Tile values, channels;  // of the greatest sign * src so far
    std::fill_n(values.values, pixels * rows.block, Max::initial);
    std::fill_n(channels.values, pixels * rows.block, static_cast<float>(rows.channels));
    for (std::int64_t pixel = 0; pixel < pixels; ++pixel) {
      for (std::int64_t lane = 0; lane < std::min(rows.block, rows.channels); ++lane) {
        channels.values[pixel * rows.block + lane] = static_cast<float>(lane);
      }
    }
    for_tile(rows, first, pixels,
             [&](std::int64_t at, std::int64_t in_tile, std::int64_t width, std::int64_t left) {
               const Vec value = only(load(src + at, width) * Vec(sign), left, Max::initial);
               const Vec best = load(values.values + in_tile, width);
               // A NaN is greater than any number, and nothing is greater than a
               // NaN.
               const Vec greater = ((value > best) | (value != value)) & (best == best);
               const Vec channel = Vec::arange(static_cast<float>(rows.channels - left), 1);
               store(Vec::blendv(best, value, greater), values.values + in_tile, width);
               store(Vec::blendv(load(channels.values + in_tile, width), channel, greater),
                     channels.values + in_tile, width);
             });
    for (std::int64_t pixel = 0; pixel < pixels; ++pixel) {
      const std::int64_t row = pixel * rows.block;
      Best best{values.values[row], channels.values[row]};
      for (std::int64_t lane = 1; lane < std::min(rows.block, rows.channels); ++lane) {
        const Best other{values.values[row + lane], channels.values[row + lane]};
        if (best.loses_to(other)) best = other;
      }
      indices[first + pixel] = static_cast<std::int64_t>(best.channel);
    }
  });
}

// Softmax of plain rows, by powers of two of differences, which are exact for near values, and with
// one division a row. A NaN or an infinity reaches the whole row through its sum.
void softmax_rows(const SoftmaxRows& rows, std::int64_t begin, std::int64_t end) {
  const auto reduced = [](const Vec& lanes, auto op) {
    return at::vec::vec_reduce_all<float>([&](const Vec& a, const Vec& b) { return op(a, b); },
                                          lanes);
  };
  for (std::int64_t row = begin; row < end; ++row) {
    const float* src = rows.src + row * rows.columns;
    float* dst = rows.dst + row * rows.columns;
    Vec greatest(Max::initial), sums(0.f);
    for_lanes(rows.columns, [&](std::int64_t i, std::int64_t count) {
      greatest = Max()(greatest, only(load(src + i, count), count, Max::initial));
    });
    const Vec most(reduced(greatest, Max()));
    for_lanes(rows.columns, [&](std::int64_t i, std::int64_t count) {
      const Vec power = power_of_two(load(src + i, count) - most, kLog2E);
      store(power, dst + i, count);
      sums = sums + only(power, count, 0.f);
    });
    const Vec factor(1 / reduced(sums, Sum()));
    for_lanes(rows.columns, [&](std::int64_t i, std::int64_t count) {
      store(load(dst + i, count) * factor, dst + i, count);
    });
  }
}

}  // namespace torch_blocked::kernels::CPU_CAPABILITY
