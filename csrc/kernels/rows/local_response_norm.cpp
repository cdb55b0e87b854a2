// Local response normalization. A pixel's values are first written to a row, in the order of the
// channels, with zeros on both sides. In a row a window is one run of floats, whatever blocks it
// spans, and the windows of neighbouring channels are summed as vectors from neighbouring
// addresses. A tile of pixels runs at a time, so that a row has left the store buffer when it is
// read.
#include "kernels/rows/local_response_norm.h"

#include <algorithm>

#include "kernels/vector/lanes.h"

namespace torch_blocked::kernels::CPU_CAPABILITY {
namespace {

// s^beta. Models use 0.75, which two roots compute in a tenth of the time.
struct ThreeQuarters {
  Vec operator()(const Vec& s) const {
    const Vec root = s.sqrt();
    return root * root.sqrt();
  }
};
struct Half {
  Vec operator()(const Vec& s) const { return s.sqrt(); }
};
struct One {
  Vec operator()(const Vec& s) const { return s; }
};
struct AnyPower {
  Vec beta;
  Vec operator()(const Vec& s) const { return s.pow(beta); }
};

template <typename F>
inline void with_power(float beta, F&& f) {
  if (beta == 0.75f) {
    f(ThreeQuarters());
  } else if (beta == 0.5f) {
    f(Half());
  } else if (beta == 1.f) {
    f(One());
  } else {
    f(AnyPower{Vec(beta)});
  }
}

// One row for each pixel of a tile: `before` zeros, the channels, `after` zeros.
class Rows {
 public:
  Rows(float* memory, const ChannelWindows& windows, std::int64_t before, std::int64_t after)
      : first_(memory + before), size_(windows.row()), before_(before), after_(after) {
    for (std::int64_t pixel = 0; pixel < ChannelWindows::kTile; ++pixel) {
      std::fill_n(at(pixel, -before), before, 0.f);
      std::fill_n(at(pixel, size_ - before - after), after, 0.f);
    }
  }

  float* at(std::int64_t pixel, std::int64_t channel) const {
    return first_ + pixel * size_ + channel;
  }
  // The sums over the windows of `count` channels.
  Vec sum(std::int64_t pixel, std::int64_t channel, std::int64_t count) const {
    const float* row = at(pixel, channel);
    Vec total(0.f);
    for (std::int64_t i = -before_; i <= after_; ++i) total = total + load(row + i, count);
    return total;
  }

 private:
  float* first_;
  std::int64_t size_, before_, after_;
};

// Calls f(pixel of the tile, channel, count of channels, offset in the image) for the vectors of
// the pixels [first, first + pixels), block by block.
template <typename F>
inline void for_tile(const ChannelWindows& w, std::int64_t first, std::int64_t pixels, F&& f) {
  for (std::int64_t channel = 0; channel < w.channels; channel += w.block) {
    const std::int64_t base = channel * w.pixels + first * w.block;
    for (std::int64_t pixel = 0; pixel < pixels; ++pixel) {
      for_lanes(w.block, [&](std::int64_t lane, std::int64_t count) {
        f(pixel, channel + lane, count, base + pixel * w.block + lane);
      });
    }
  }
}

// Writes rows of the squares of src.
inline void square(const ChannelWindows& w, const float* src, std::int64_t first,
                   std::int64_t pixels, const Rows& squares) {
  for_tile(w, first, pixels,
           [&](std::int64_t pixel, std::int64_t channel, std::int64_t count, std::int64_t at) {
             const Vec x = load(src + at, count);
             store(x * x, squares.at(pixel, channel), count);
           });
}

// Calls f(first pixel, pixels) for tiles of [begin, end).
template <typename F>
inline void for_tiles(std::int64_t begin, std::int64_t end, F&& f) {
  for (std::int64_t first = begin; first < end; first += ChannelWindows::kTile) {
    f(first, std::min(ChannelWindows::kTile, end - first));
  }
}

// Zeroes the lanes beyond the `channels` that are left, because s may be 0 there.
inline Vec without_tail(const Vec& value, std::int64_t channels) {
  if (channels >= kWidth) return value;
  return value & lanes_mask(std::max<std::int64_t>(channels, 0));
}

}  // namespace

void local_response_norm(const ChannelWindows& windows, const float* src, float* scratch,
                         float* dst, std::int64_t begin, std::int64_t end) {
  const ChannelWindows w = windows;
  const Rows squares(scratch, w, w.before, w.after);
  const Vec alpha(w.alpha), k(w.k);
  with_power(w.beta, [&](const auto& power) {
    for_tiles(begin, end, [&](std::int64_t first, std::int64_t pixels) {
      square(w, src, first, pixels, squares);
      for_tile(w, first, pixels,
               [&](std::int64_t pixel, std::int64_t channel, std::int64_t count, std::int64_t at) {
                 const Vec s = at::vec::fmadd(squares.sum(pixel, channel, count), alpha, k);
                 const Vec value = load(src + at, count) / power(s);
                 store(without_tail(value, w.channels - channel), dst + at, count);
               });
    });
  });
}

// With p = diff_dst * s^-beta: diff_src = p - 2 * alpha * beta * src * the sum of p * src / s over
// the channels that have this one in their windows.
void local_response_norm_gradient(const ChannelWindows& windows, const float* diff_dst,
                                  const float* src, float* scratch, float* diff_src,
                                  std::int64_t begin, std::int64_t end) {
  const ChannelWindows w = windows;
  const Rows squares(scratch, w, w.before, w.after);
  const Rows products(scratch + w.scratch() / 2, w, w.after, w.before);
  const Vec alpha(w.alpha), k(w.k), factor(2 * w.alpha * w.beta);
  with_power(w.beta, [&](const auto& power) {
    for_tiles(begin, end, [&](std::int64_t first, std::int64_t pixels) {
      square(w, src, first, pixels, squares);
      for_tile(w, first, pixels,
               [&](std::int64_t pixel, std::int64_t channel, std::int64_t count, std::int64_t at) {
                 const Vec s = at::vec::fmadd(squares.sum(pixel, channel, count), alpha, k);
                 const Vec p = load(diff_dst + at, count) / power(s);
                 const Vec product = p * load(src + at, count) / s;
                 const std::int64_t left = w.channels - channel;
                 store(without_tail(product, left), products.at(pixel, channel), count);
                 store(without_tail(p, left), diff_src + at, count);
               });
      for_tile(w, first, pixels,
               [&](std::int64_t pixel, std::int64_t channel, std::int64_t count, std::int64_t at) {
                 const Vec share = load(src + at, count) * products.sum(pixel, channel, count);
                 const Vec diff = load(diff_src + at, count) - factor * share;
                 store(without_tail(diff, w.channels - channel), diff_src + at, count);
               });
    });
  });
}

}  // namespace torch_blocked::kernels::CPU_CAPABILITY
