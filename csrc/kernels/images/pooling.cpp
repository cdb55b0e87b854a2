// Pooling. The maximum of a window with a NaN is NaN, as in ATen but not in oneDNN.
#include "kernels/images/pooling.h"

#include <algorithm>
#include <cstring>
#include <limits>
#include <vector>

#include "kernels/vector/short_lanes.h"
#include "kernels/vector/unrolled.h"

namespace torch_blocked::kernels::CPU_CAPABILITY {
namespace {

// The taps of one window along one dim that lie in src: offsets of pixels, `step` apart.
struct Taps {
  std::int64_t begin, end, step;

  Taps(const PoolingWindows& w, std::size_t dim, std::int64_t position)
      : begin(position * w.stride[dim] - w.padding[dim]),
        end(std::min(begin + (w.kernel[dim] - 1) * w.dilation[dim] + 1, w.in[dim])),
        step(w.dilation[dim]) {
    if (begin < 0) begin += (-begin + step - 1) / step * step;
  }
};

// The taps along d and h of a row of dst, and their image.
template <typename Number>
struct Rows {
  const Number* image;
  Taps d, h;

  Rows(const PoolingWindows& w, std::int64_t row)
      : image(static_cast<const Number*>(w.src) +
              row / w.out[1] / w.out[0] * w.in[0] * w.in[1] * w.in[2] * w.lanes),
        d(w, 0, row / w.out[1] % w.out[0]),
        h(w, 1, row % w.out[1]) {}

  // Calls f(the first pixel of a line along w) for all taps along d and h.
  template <typename F>
  TORCH_BLOCKED_INLINE void for_lines(const PoolingWindows& w, F&& f) const {
    for (std::int64_t z = d.begin; z < d.end; z += d.step) {
      for (std::int64_t y = h.begin; y < h.end; y += h.step) {
        f(image + (z * w.in[1] + y) * w.in[2] * w.lanes);
      }
    }
  }
};

// Maps short numbers to integers of the same order, and back.
struct ByteOrder {
  using Number = std::uint8_t;
  static constexpr Number kLeast = 0;
  template <typename Lanes>
  static void to_integers(Lanes&) {}
  template <typename Lanes>
  static void to_numbers(Lanes&) {}
};

// The bits of bfloat16 are a sign and a magnitude. NaN of either sign becomes the greatest integer,
// which maps back to a NaN.
struct BfloatOrder {
  using Number = std::int16_t;
  static constexpr Number kMagnitude = 0x7fff, kInfinity = 0x7f80, kLeast = -kInfinity - 1;
  template <typename Lanes>
  static void to_numbers(Lanes& lanes) {
    lanes ^= (lanes >> 15) & kMagnitude;
  }
  template <typename Lanes>
  static void to_integers(Lanes& lanes) {
    const Lanes nan = (lanes & kMagnitude) > kInfinity;
    lanes = (lanes & ~nan) | (nan & kMagnitude);
    to_numbers(lanes);
  }
};

// Finds the greatest integer of each of `count` lanes over `addresses`, in vectors of kBytes, and
// calls f(vector, first lane, bytes of the lanes).
template <typename Order, std::size_t kBytes, typename Addresses, typename F>
TORCH_BLOCKED_INLINE inline void greatest_lanes(const Addresses& addresses, std::int64_t count,
                                                bool are_numbers, F&& f) {
  using Number = typename Order::Number;
  typedef Number Lanes __attribute__((vector_size(kBytes)));  // GCC ignores it in `using`
  constexpr std::int64_t kLanes = kBytes / sizeof(Number);
  const auto part = [&](std::int64_t lane, std::size_t bytes) TORCH_BLOCKED_INLINE {
    Lanes values = Lanes{} + Order::kLeast;
    addresses([&](const Number* src) TORCH_BLOCKED_INLINE {
      Lanes next{};
      std::memcpy(&next, src + lane, bytes);
      if (are_numbers) Order::to_integers(next);
      values = next > values ? next : values;
    });
    f(values, lane, bytes);
  };
  std::int64_t lane = 0;
  for (; lane + kLanes <= count; lane += kLanes) part(lane, sizeof(Lanes));
  if (lane < count) {
    part(lane, static_cast<std::size_t>(count - lane) * sizeof(Number));
  }
}

// How many of a window's taps along one dim lie in src.
std::int64_t count_of(const Taps& taps) {
  return std::max<std::int64_t>(0, (taps.end - taps.begin + taps.step - 1) / taps.step);
}

// How many taps lie in src or its padding. Windows that ceil_mode adds reach beyond both.
std::int64_t size_of(const PoolingWindows& w, std::size_t dim, std::int64_t position) {
  const std::int64_t begin = position * w.stride[dim] - w.padding[dim];
  return std::min(begin + w.kernel[dim], w.in[dim] + w.padding[dim]) - begin;
}

// The divisors of a row of windows: the number of taps in src along d and h, and the size along d
// and h. Source: AvgPoolKernel.cpp of ATen.
struct Divisors {
  const Averages& averages;
  std::int64_t taken, size;

  template <typename Number>
  Divisors(const Averages& a, const Rows<Number>& rows, std::int64_t row)
      : averages(a), taken(count_of(rows.d) * count_of(rows.h)) {
    const PoolingWindows& w = a.windows;
    size = size_of(w, 0, row / w.out[1] % w.out[0]) * size_of(w, 1, row % w.out[1]);
  }
  float of(const Taps& taps, std::int64_t pixel) const {
    if (averages.divisor != 0) return static_cast<float>(averages.divisor);
    const std::int64_t pixels =
        averages.of_window ? size * size_of(averages.windows, 2, pixel) : taken * count_of(taps);
    return static_cast<float>(std::max<std::int64_t>(pixels, 1));  // a window without pixels is 0
  }
};

// Calls f.operator()<kPixels>(pixel) for the pixels [first, last) of a row: for kMost pixels at a
// time if all of their taps along w lie in src, else for one.
template <std::int64_t kMost, typename F>
inline void for_pixels(const PoolingWindows& w, std::int64_t first, std::int64_t last, F&& f) {
  const std::int64_t span = (w.kernel[2] - 1) * w.dilation[2] + 1,
                     room = w.in[2] + w.padding[2] - span;
  const std::int64_t inner = (w.padding[2] + w.stride[2] - 1) / w.stride[2];
  const std::int64_t outer = room < 0 ? 0 : std::min(last, room / w.stride[2] + 1);
  for (std::int64_t pixel = first; pixel < last;) {
    if (pixel >= inner && pixel + kMost <= outer) {
      f.template operator()<kMost>(pixel);
      pixel += kMost;
    } else {
      f.template operator()<1>(pixel);
      ++pixel;
    }
  }
}

// Calls end(sum, lane, count, i) for the sums of kPixels windows along w, vector by vector. Pixels
// are one stride apart; the first one has these taps.
template <std::int64_t kPixels, typename End>
TORCH_BLOCKED_INLINE inline void sum_windows(const PoolingWindows& w, const float* line,
                                             const Taps& taps, End&& end_sum) {
  const std::int64_t apart = w.stride[2] * w.lanes, step = taps.step * w.lanes;
  for_lanes(w.lanes, [&](std::int64_t lane, std::int64_t count) {
    Vec sums[kPixels];
    unrolled<kPixels>([&]<int i>() TORCH_BLOCKED_INLINE { sums[i] = Vec(0.f); });
    const float* end = line + taps.end * w.lanes + lane;
    for (const float* src = line + taps.begin * w.lanes + lane; src < end; src += step) {
      unrolled<kPixels>([&]<int i>()
                            TORCH_BLOCKED_INLINE { sums[i] += load(src + i * apart, count); });
    }
    unrolled<kPixels>([&]<int i>() TORCH_BLOCKED_INLINE { end_sum(sums[i], lane, count, i); });
  });
}

// Bytes lie in blocks, whose lanes are whole vectors.
inline Vec load_numbers(const std::uint8_t* src, std::int64_t) { return load_bytes(src); }
inline Vec load_numbers(const float* src, std::int64_t count) { return load(src, count); }

// dst [count] = the sums of `rows`.
template <typename Number>
inline void sum_rows(const std::vector<const Number*>& rows, std::int64_t count, float* dst) {
  constexpr int kVectors = 4;
  std::int64_t i = 0;
  for (; i + kVectors * kWidth <= count; i += kVectors * kWidth) {
    Vec sums[kVectors]{Vec(0.f), Vec(0.f), Vec(0.f), Vec(0.f)};
    for (const Number* row : rows) {
      unrolled<kVectors>([&]<int j>() TORCH_BLOCKED_INLINE {
        sums[j] += load_numbers(row + i + j * kWidth, kWidth);
      });
    }
    unrolled<kVectors>([&]<int j>() TORCH_BLOCKED_INLINE { sums[j].store(dst + i + j * kWidth); });
  }
  for (; i < count; i += kWidth) {
    const std::int64_t lanes = std::min(kWidth, count - i);
    Vec sum(0.f);
    for (const Number* row : rows) sum = sum + load_numbers(row + i, lanes);
    store(sum, dst + i, lanes);
  }
}

// Columns of src, each reduced along d and h, for some outputs of a row at a time.
template <typename Number>
class Columns {
 public:
  explicit Columns(const PoolingWindows& w)
      : w_(w), window_((w.kernel[2] - 1) * w.dilation[2] + 1) {
    constexpr std::int64_t kNumbers = (16 << 10) / sizeof(Number);  // half of L1
    outputs_ = std::max<std::int64_t>(1, (kNumbers / w.lanes - window_) / w.stride[2] + 1);
    outputs_ = std::min(outputs_, w.out[2]);
    values_.resize(static_cast<std::size_t>(((outputs_ - 1) * w.stride[2] + window_) * w.lanes));
  }
  // The columns of outputs [first, last): the first src pixel, and the end. With a dilation the
  // first output may begin further on than others, because it skips its taps in the padding.
  std::int64_t begin(std::int64_t first) const {
    return std::max<std::int64_t>(0, first * w_.stride[2] - w_.padding[2]);
  }
  std::int64_t end(std::int64_t last) const { return Taps(w_, 2, last - 1).end; }
  // Calls f(first, last) for all outputs.
  template <typename F>
  void for_parts(F&& f) const {
    for (std::int64_t first = 0; first < w_.out[2]; first += outputs_) {
      f(first, std::min(first + outputs_, w_.out[2]));
    }
  }
  Number* data() { return values_.data(); }

 private:
  const PoolingWindows& w_;
  std::int64_t window_, outputs_;
  std::vector<Number> values_;
};

// Makes outputs [first, last) of a row: first the maxima along d and h of all columns under them,
// then the maxima along w.
template <typename Order, typename Number = Order::Number>
void maximum_of_columns(const PoolingWindows& w, const Rows<Number>& rows, std::int64_t first,
                        std::int64_t last, Columns<Number>& all, Number* dst) {
  const std::int64_t begin = all.begin(first), end = all.end(last);
  Number* columns = all.data();
  const auto of_rows = [&](auto&& take) TORCH_BLOCKED_INLINE {
    rows.for_lines(w,
                   [&](const Number* line) TORCH_BLOCKED_INLINE { take(line + begin * w.lanes); });
  };
  const auto to_columns = [&](const auto& values, std::int64_t lane, std::size_t bytes)
                              TORCH_BLOCKED_INLINE { std::memcpy(columns + lane, &values, bytes); };
  greatest_lanes<Order, sizeof(Vec)>(of_rows, (end - begin) * w.lanes, true, to_columns);
  for (std::int64_t pixel = first; pixel < last; ++pixel, dst += w.lanes) {
    const Taps taps(w, 2, pixel);
    const auto of_taps = [&](auto&& take) TORCH_BLOCKED_INLINE {
      for (std::int64_t x = taps.begin; x < taps.end; x += taps.step) {
        take(columns + (x - begin) * w.lanes);
      }
    };
    const auto to_dst = [&](auto& values, std::int64_t lane, std::size_t bytes)
                            TORCH_BLOCKED_INLINE {
                              Order::to_numbers(values);
                              std::memcpy(dst + lane, &values, bytes);
                            };
    // A pixel of a block fills a vector of 16 bytes. With 8c of bytes it fills half of one.
    constexpr std::size_t kPixel = 16;
    if (w.lanes * sizeof(Number) == kPixel / 2) {
      greatest_lanes<Order, kPixel / 2>(of_taps, w.lanes, false, to_dst);
    } else {
      greatest_lanes<Order, kPixel>(of_taps, w.lanes, false, to_dst);
    }
  }
}

template <typename Order, typename Number = Order::Number>
void maximum_shorts(const PoolingWindows& w, std::int64_t begin, std::int64_t end) {
  Columns<Number> columns(w);
  auto* dst = static_cast<Number*>(w.dst) + begin * w.out[2] * w.lanes;
  for (std::int64_t row = begin; row < end; ++row, dst += w.out[2] * w.lanes) {
    const Rows<Number> rows(w, row);
    columns.for_parts([&](std::int64_t first, std::int64_t last) {
      maximum_of_columns<Order>(w, rows, first, last, columns, dst + first * w.lanes);
    });
  }
}

// The greater value of each lane. x86's instruction loses NaN; keeping it takes 4 instructions.
struct Greater {
  static Vec of(const Vec& a, const Vec& b) { return at::vec::clamp_min(a, b); }
};
struct GreaterOrNan {
  static Vec of(const Vec& a, const Vec& b) { return at::vec::maximum(a, b); }
};

constexpr float kLeast = -std::numeric_limits<float>::infinity();

// dst [count] = the greatest of `rows`. Returns whether all are finite, by multiplying them by 0.
template <typename Max>
bool greatest_of_rows(const std::vector<const float*>& rows, std::int64_t count, float* dst) {
  constexpr int kVectors = 4;
  const Vec zero(0.f);
  Vec checks[kVectors]{zero, zero, zero, zero};
  std::int64_t i = 0;
  for (; i + kVectors * kWidth <= count; i += kVectors * kWidth) {
    Vec values[kVectors]{Vec(kLeast), Vec(kLeast), Vec(kLeast), Vec(kLeast)};
    for (const float* row : rows) {
      unrolled<kVectors>([&]<int j>() TORCH_BLOCKED_INLINE {
        const Vec next = Vec::loadu(row + i + j * kWidth);
        values[j] = Max::of(values[j], next);
        checks[j] = at::vec::fmadd(next, zero, checks[j]);
      });
    }
    unrolled<kVectors>([&]<int j>()
                           TORCH_BLOCKED_INLINE { values[j].store(dst + i + j * kWidth); });
  }
  for (; i < count; i += kWidth) {
    const std::int64_t lanes = std::min(kWidth, count - i);
    Vec value(kLeast);
    for (const float* row : rows) {
      const Vec next = load(row + i, lanes);
      value = Max::of(value, next);
      checks[0] = at::vec::fmadd(next, zero, checks[0]);
    }
    store(value, dst + i, lanes);
  }
  return !((checks[0] + checks[1]) + (checks[2] + checks[3])).has_inf_nan();
}

// dst [kPixels, lanes] = the maxima of windows along w. Pixels are one stride apart; the first one
// has these taps.
template <typename Max, std::int64_t kPixels>
inline void greatest(const PoolingWindows& w, const float* line, const Taps& taps, float* dst) {
  const std::int64_t apart = w.stride[2] * w.lanes, step = taps.step * w.lanes;
  for_lanes(w.lanes, [&](std::int64_t lane, std::int64_t count) {
    Vec values[kPixels];
    unrolled<kPixels>([&]<int i>() TORCH_BLOCKED_INLINE { values[i] = Vec(kLeast); });
    const float* end = line + taps.end * w.lanes + lane;
    for (const float* src = line + taps.begin * w.lanes + lane; src < end; src += step) {
      unrolled<kPixels>([&]<int i>() TORCH_BLOCKED_INLINE {
        values[i] = Max::of(values[i], load(src + i * apart, count));
      });
    }
    unrolled<kPixels>(
        [&]<int i>() TORCH_BLOCKED_INLINE { store(values[i], dst + lane + i * w.lanes, count); });
  });
}

// Makes outputs [first, last) of a row from columns that begin at pixel `left`.
template <typename Max>
void greatest_of_columns(const PoolingWindows& w, std::int64_t first, std::int64_t last,
                         std::int64_t left, const float* columns, float* dst) {
  const float* line = columns - left * w.lanes;
  for_pixels<4>(w, first, last, [&]<std::int64_t kPixels>(std::int64_t pixel) {
    greatest<Max, kPixels>(w, line, Taps(w, 2, pixel), dst + pixel * w.lanes);
  });
}

// Quantizes kWidth numbers.
inline void store_quantized(const Quantizer& q, const Vec& x, std::uint8_t* dst) {
  const Vec byte = (x * Vec(q.inverse_scale)).round() + Vec(q.zero);
  store_bytes(at::vec::minimum(at::vec::maximum(byte, Vec(q.least)), Vec(q.most)), dst);
}

}  // namespace

// Sums along d and h first: 3 + 3 additions for a window of 3x3 at stride 1 instead of 9.
void average(const Averages& averages, std::int64_t begin, std::int64_t end) {
  const PoolingWindows w = averages.windows;
  Columns<float> columns(w);
  std::vector<const float*> lines;  // src under the columns
  float* dst = static_cast<float*>(w.dst) + begin * w.out[2] * w.lanes;
  for (std::int64_t row = begin; row < end; ++row) {
    const Rows<float> rows(w, row);
    const Divisors divisors(averages, rows, row);
    columns.for_parts([&](std::int64_t first, std::int64_t last) {
      const std::int64_t left = columns.begin(first), right = columns.end(last);
      lines.clear();
      rows.for_lines(w, [&](const float* line) { lines.push_back(line + left * w.lanes); });
      sum_rows(lines, (right - left) * w.lanes, columns.data());
      const float* from = columns.data() - left * w.lanes;
      for_pixels<4>(w, first, last, [&]<std::int64_t kPixels>(std::int64_t pixel) {
        const Taps taps(w, 2, pixel);
        const Vec scale(1 / divisors.of(taps, pixel));
        sum_windows<kPixels>(w, from, taps, [&](const Vec& sum, auto lane, auto count, int i) {
          store(sum * scale, dst + lane + i * w.lanes, count);
        });
        dst += kPixels * w.lanes;
      });
    });
  }
}

// Sums of up to 2^16 bytes are exact in float32.
void average_bytes(const AveragesOfBytes& of_bytes, std::int64_t begin, std::int64_t end) {
  const PoolingWindows w = of_bytes.averages.windows;
  Columns<float> columns(w);
  std::vector<const std::uint8_t*> lines;  // src under the columns
  std::int64_t at = begin * w.out[2] * w.lanes;
  for (std::int64_t row = begin; row < end; ++row) {
    const Rows<std::uint8_t> rows(w, row);
    const Divisors divisors(of_bytes.averages, rows, row);
    columns.for_parts([&](std::int64_t first, std::int64_t last) {
      const std::int64_t left = columns.begin(first), right = columns.end(last);
      lines.clear();
      rows.for_lines(w, [&](const std::uint8_t* line) { lines.push_back(line + left * w.lanes); });
      sum_rows(lines, (right - left) * w.lanes, columns.data());
      const float* from = columns.data() - left * w.lanes;
      for_pixels<4>(w, first, last, [&]<std::int64_t kPixels>(std::int64_t pixel) {
        const Taps taps(w, 2, pixel);
        const auto taken = static_cast<float>(divisors.taken * count_of(taps));
        const Vec zeros(taken * of_bytes.src.zero),
            scale(of_bytes.src.scale / divisors.of(taps, pixel));
        sum_windows<kPixels>(w, from, taps, [&](const Vec& sum, auto lane, auto, int i) {
          const Vec mean = (sum - zeros) * scale;
          const std::int64_t to = at + lane + i * w.lanes;
          if (of_bytes.dst) {
            store_quantized(*of_bytes.dst, mean, static_cast<std::uint8_t*>(w.dst) + to);
          } else {
            mean.store(static_cast<float*>(w.dst) + to);
          }
        });
        at += kPixels * w.lanes;
      });
    });
  }
}

void maximum_bytes(const PoolingWindows& w, std::int64_t begin, std::int64_t end) {
  maximum_shorts<ByteOrder>(w, begin, end);
}

void maximum_bfloats(const PoolingWindows& w, std::int64_t begin, std::int64_t end) {
  maximum_shorts<BfloatOrder>(w, begin, end);
}

// Takes the maxima along d and h first, of columns that lie one after the other: 3 + 3 comparisons
// for a window of 3x3 at stride 1 instead of 9.
void maximum(const PoolingWindows& windows, std::int64_t begin, std::int64_t end) {
  const PoolingWindows w = windows;
  Columns<float> columns(w);
  std::vector<const float*> lines;  // src under the columns
  float* dst = static_cast<float*>(w.dst) + begin * w.out[2] * w.lanes;
  for (std::int64_t row = begin; row < end; ++row, dst += w.out[2] * w.lanes) {
    const Rows<float> rows(w, row);
    columns.for_parts([&](std::int64_t first, std::int64_t last) {
      const std::int64_t left = columns.begin(first), count = (columns.end(last) - left) * w.lanes;
      lines.clear();
      rows.for_lines(w, [&](const float* line) { lines.push_back(line + left * w.lanes); });
      if (greatest_of_rows<Greater>(lines, count, columns.data())) {
        greatest_of_columns<Greater>(w, first, last, left, columns.data(), dst);
      } else {
        greatest_of_rows<GreaterOrNan>(lines, count, columns.data());
        greatest_of_columns<GreaterOrNan>(w, first, last, left, columns.data(), dst);
      }
    });
  }
}

}  // namespace torch_blocked::kernels::CPU_CAPABILITY
