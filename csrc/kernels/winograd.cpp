// Winograd convolution F(2x2, 3x3) and F(4x4, 3x3): the transforms of src, dst and weights. 3x3x3
// kernels have F(2, 3) along depth besides.
#include "kernels/dot_ends.h"
#include "kernels/winograd_src.h"

namespace torch_blocked::kernels::CPU_CAPABILITY {
namespace winograd {
namespace {

// Flattened: left to itself, GCC calls a function for each row of half-filled vectors (8c on
// AVX-512).
template <typename T, typename Products, int kLanes, typename From>
[[gnu::flatten]] void transform_src(const WinogradShape& shape, WinogradTiles tiles,
                                    const From* src, typename Products::Number* v) {
  const std::int64_t stride = v_stride<Products>(shape.ic, tiles.count),
                     padded_ic = round_up(shape.ic, kWidth);
  const std::int64_t block_size = shape.in[0] * shape.in[1] * shape.in[2] * shape.block;
  const std::int64_t blocks = (shape.ic + shape.block - 1) / shape.block;
  for (std::int64_t channel = 0; channel < shape.ic; channel += kLanes) {
    const From* first = src + channel / shape.block * block_size + channel % shape.block;
    Walk<T> at(shape, tiles.first);
    for_groups(tiles.count, Products::kTiles, [&](std::int64_t begin, std::int64_t count) {
      // [tiles of the group, kWidth]
      auto* to = v + begin * padded_ic + channel / kWidth * count * kWidth + channel % kWidth;
      for (std::int64_t i = 0; i < count; ++i, to += kWidth, at.next()) {
        src_tile<T, kLanes>(shape, first + at.image * blocks * block_size, at, to, stride);
      }
    });
  }
}

// The same of bytes, whose words fill a vector with two tiles.
template <typename T, typename Products>
[[gnu::flatten]] void transform_byte_src(const WinogradShape& shape, WinogradTiles tiles,
                                         const std::uint8_t* src, std::int16_t* v) {
  const std::int64_t stride = v_stride<Products>(shape.ic, tiles.count),
                     padded_ic = round_up(shape.ic, kWidth);
  const std::int64_t block_size = shape.in[0] * shape.in[1] * shape.in[2] * kWidth;
  const std::int64_t image = padded_ic / kWidth * block_size;
  for (std::int64_t vector = 0; vector * kWidth < shape.ic; ++vector, src += block_size) {
    Walk<T> at(shape, tiles.first);
    for_groups(tiles.count, Products::kTiles, [&](std::int64_t begin, std::int64_t count) {
      std::int16_t* to = v + begin * padded_ic + vector * count * kWidth;
      for (; count > 1; count -= 2, to += 2 * kWidth) {
        const Walk<T> first = at;
        at.next();
        src_tiles<T>(shape, {src + first.image * image, src + at.image * image}, {first, at}, to,
                     stride);
        at.next();
      }
      if (count > 0) {
        src_tile<T, kWidth>(shape, src + at.image * image, at, to, stride);
        at.next();
      }
    });
  }
}

// The larger of each lane of `most` and the absolute value of bfloat16 at src, as their bits, whose
// order is that of the values.
template <typename Words>
TORCH_BLOCKED_INLINE inline void take_larger(Words& most, const std::uint16_t* src) {
  Words bits;
  std::memcpy(&bits, src, sizeof bits);
  bits &= std::int16_t{0x7fff};
  most = most > bits ? most : bits;
}

// The same of `pixels` of a row, two at a time, the last but one twice where they are odd.
template <int kPixels>
TORCH_BLOCKED_INLINE inline void take_row(PairWords& most, const std::uint16_t* row) {
  if constexpr (kPixels == 1) {
    PixelWords alone{};
    take_larger(alone, row);
    PairWords both{};
    std::memcpy(&both, &alone, sizeof alone);
    most = most > both ? most : both;
  } else {
    unrolled<(kPixels + 1) / 2>([&]<int i>() TORCH_BLOCKED_INLINE {
      take_larger(most, row + std::min(2 * i, kPixels - 2) * kWidth);
    });
  }
}

// The same of [IC vectors, rows, kPixels, kWidth].
template <int kPixels>
void take_pixels(PairWords& most, const std::uint16_t* src, std::int64_t vectors,
                 std::int64_t vector_step, std::int64_t rows, std::int64_t row_step) {
  for (; vectors > 0; --vectors, src += vector_step) {
    for (std::int64_t i = 0; i < rows; ++i) take_row<kPixels>(most, src + i * row_step);
  }
}

// The largest absolute value in a tile; NaN if one is.
template <typename T>
float largest_value(const WinogradShape& shape, const std::uint16_t* image, const Corner& at) {
  static_assert(T::Plane::kTile == 6);
  static constexpr std::array kTake{take_pixels<1>, take_pixels<2>, take_pixels<3>,
                                    take_pixels<4>, take_pixels<5>, take_pixels<6>};
  const auto inside = [](std::int64_t from) { return std::max<std::int64_t>(from, 0); };
  const std::int64_t h = inside(at.h), w = inside(at.w);
  const std::int64_t rows = std::min(at.h + T::Plane::kTile, shape.in[1]) - h,
                     pixels = std::min(at.w + T::Plane::kTile, shape.in[2]) - w;
  if (at.d < 0 || at.d >= shape.in[0] || pixels <= 0 || rows <= 0) return 0;
  const Steps steps = steps_of(shape);
  PairWords most{};
  kTake[static_cast<std::size_t>(pixels - 1)](
      most, image + at.d * steps.plane + h * steps.row + w * steps.pixel,
      (shape.ic + kWidth - 1) / kWidth, shape.in[0] * steps.plane, rows, steps.row);
  return largest_bfloat(most);
}

// What the products of a tile are multiplied by, where its largest value makes the largest word:
// NaN where values are none or infinite, so that all outputs of the tile are NaN. What is as small
// as almost denormal counts as 0.
inline float tile_scale(float largest, float largest_word) {
  constexpr float kSmall = 1e-33f;
  if (!std::isfinite(largest)) return std::nanf("");
  return largest > kSmall ? largest / largest_word : 0;
}

// The same as transform_src in fixed point: V ends with what the products of each tile are
// multiplied by.
template <typename T, typename Products>
[[gnu::flatten]] void transform_fixed_src(const WinogradShape& shape, WinogradTiles tiles,
                                          const std::uint16_t* src, std::int16_t* v) {
  const std::int64_t stride = v_stride<Products>(shape.ic, tiles.count),
                     padded_ic = round_up(shape.ic, kWidth);
  const std::int64_t block_size = shape.in[0] * shape.in[1] * shape.in[2] * kWidth;
  const std::int64_t image = padded_ic / kWidth * block_size;
  auto* scales = reinterpret_cast<float*>(v + T::kPositions * stride);
  Walk<T> at(shape, tiles.first);
  for (std::int64_t i = 0; i < tiles.count; ++i, at.next()) {
    const float largest = largest_value<T>(shape, src + at.image * image, Corner(shape, at));
    scales[i] = tile_scale(largest, Products::kLargest);
  }
  for (std::int64_t vector = 0; vector * kWidth < shape.ic; ++vector, src += block_size) {
    at = Walk<T>(shape, tiles.first);
    for_groups(tiles.count, Products::kTiles, [&](std::int64_t begin, std::int64_t count) {
      std::int16_t* to = v + begin * padded_ic + vector * count * kWidth;
      for (std::int64_t i = 0; i < count; ++i, to += kWidth, at.next()) {
        const float factor = scales[begin + i] > 0 ? 1 / scales[begin + i] : 0;
        fixed_tile<T>(shape, src + at.image * image, at, factor, to, stride);
      }
    });
  }
}

// What happens to an output on its way to dst, of which it is number `at`. A `Stored` kind of it is
// made for a vector of channels from `channel` on, `count` of which there are.

// Numbers of dst, with a zero tail.
template <typename Number>
struct Stores {
  Vec bias, lanes;  // lanes: all bits of the channels there are, none of the tail
  Number* dst;
  bool stream;

  Stores(const WinogradDst& to, std::int64_t channel, std::int64_t count, bool streams)
      : bias(to.bias && count ? Vec::loadu(to.bias + channel, count) : Vec(0.f)),
        lanes(lanes_mask(count)),
        dst(static_cast<Number*>(to.dst)),
        stream(streams) {}

  template <int kLanes>
  void store(const Vec& value, std::int64_t at) const {
    if constexpr (std::is_same_v<Number, float> && kLanes == kWidth) {
      if (stream) return kernels::CPU_CAPABILITY::stream(value & lanes, dst + at);
    }
    store_lanes<kLanes>(value & lanes, dst + at);
  }
};

// A residual and bounds, or less: all that there is of most epilogues. Where functions are called,
// no sum stays in a register: 64@56 of bfloat16 takes 205 us so, 233 with all kinds of epilogues.
template <typename Number>
struct Bounded {
  static constexpr bool kInTwo = false, kWholeRows = false;
  Stores<Number> stores;
  const Number* residual;
  bool is_clamped;
  Vec least, most;

  Bounded(const WinogradDst& to, std::int64_t channel, std::int64_t count, bool streams)
      : stores(to, channel, count, streams),
        residual(to.epilogue.residual ? static_cast<const Number*>(to.residual) : nullptr),
        is_clamped(last(to.epilogue).kind == Activation::Kind::kClamp),
        least(last(to.epilogue).alpha),
        most(last(to.epilogue).beta) {}

  static const Activation& last(const Epilogue& e) { return e.residual ? e.after : e.before; }
  static bool takes(const Epilogue& e) {
    const auto is_clamp = [](const Activation& a) {
      return a.kind == Activation::Kind::kNone || a.kind == Activation::Kind::kClamp;
    };
    return is_clamp(last(e)) && (!e.residual || e.before.kind == Activation::Kind::kNone);
  }

  template <int kLanes>
  void put(const Vec& sum, std::int64_t at) const {
    Vec value = sum + stores.bias;
    if (residual) value = value + load_lanes<kLanes>(residual + at);
    if (is_clamped) value = at::vec::minimum(at::vec::maximum(value, least), most);
    stores.template store<kLanes>(value, at);
  }
};

// Any epilogue.
template <typename Number>
struct Finished {
  static constexpr bool kInTwo = true, kWholeRows = false;
  Stores<Number> stores;
  Finish finish;

  Finished(const WinogradDst& to, std::int64_t channel, std::int64_t count, bool streams)
      : stores(to, channel, count, streams), finish(to.epilogue, to.residual, to.dst) {}

  template <int kLanes>
  void put(const Vec& sum, std::int64_t at) const {
    stores.template store<kLanes>(finish(sum + stores.bias, stores.dst + at, kLanes), at);
  }
};

// Of fixed point.
template <typename Stored>
struct Scaled {
  static constexpr bool kInTwo = Stored::kInTwo, kWholeRows = false;
  Stored stored;
  Vec scale;

  Scaled(const WinogradDst& to, std::int64_t channel, std::int64_t count, bool streams)
      : stored(to, channel, count, streams), scale(Vec::loadu(to.scales + channel)) {}

  template <int kLanes>
  void put(const Vec& sum, std::int64_t at) const {
    stored.template put<kLanes>(sum * scale, at);
  }
};

// Bytes that bounds make of sums.
struct BoundedBytes {
  static constexpr bool kInTwo = false, kWholeRows = true;
  const DotChannels& channels;
  const std::uint8_t* residual;
  Vec residual_scale;
  std::uint8_t* dst;

  BoundedBytes(const WinogradDst& to, std::int64_t channel, std::int64_t, bool)
      : channels(to.channels[channel / kWidth]),
        residual(static_cast<const std::uint8_t*>(to.residual)),
        residual_scale(to.residual_scale),
        dst(static_cast<std::uint8_t*>(to.dst)) {}

  Vec value(const Vec& sum, std::int64_t at) const {
    const Vec real = scaled(channels, sum);
    return residual ? at::vec::fmadd(load_bytes(residual + at), residual_scale, real) : real;
  }
  template <int kLanes>
  void put(const Vec& sum, std::int64_t at) const {
    store_bytes(bounded(channels, value(sum, at)), dst + at);
  }
  // Four pixels that follow each other.
  void put_row(const Vec (&sums)[4], std::int64_t at) const {
    if (!channels.is_small) {
      unrolled<4>([&]<int i>() { put<kWidth>(sums[i], at + i * kWidth); });
      return;
    }
    const auto whole = [&](int i) { return nearest(value(sums[i], at + i * kWidth)); };
    store_quad(whole(0), whole(1), whole(2), whole(3), Index::loadu(channels.least_bytes.data()),
               Index::loadu(channels.most_bytes.data()), dst + at);
  }
};

// Bytes or float32 that a general end makes of sums.
struct EndedBytes {
  static constexpr bool kInTwo = true, kWholeRows = false;
  const WinogradDst& to;
  const DotChannels& channels;

  EndedBytes(const WinogradDst& dst, std::int64_t channel, std::int64_t, bool)
      : to(dst), channels(dst.channels[channel / kWidth]) {}

  template <int kLanes>
  void put(const Vec& sum, std::int64_t at) const {
    const auto* residual = static_cast<const std::uint8_t*>(to.residual);
    finish_vector(*to.end, channels, scaled(channels, sum), residual ? residual + at : nullptr,
                  to.is_float32 ? static_cast<void*>(static_cast<float*>(to.dst) + at)
                                : static_cast<std::uint8_t*>(to.dst) + at,
                  to.is_float32);
  }
};

// Where one tile's outputs go: planes x rows x columns of them are inside dst, from `at` on.
template <typename T, int kLanes, typename Stored>
struct DstTile {
  static constexpr bool kWholeRows = Stored::kWholeRows;
  std::int64_t at;
  Steps steps;
  std::int64_t planes, rows, columns;
  const Stored& stored;

  bool takes(int plane, int row) const {
    return (T::Depth::kM == 1 || plane < planes) && row < rows;
  }
  void put(int plane, int row, int column, const Vec& value) const {
    if (column >= columns) return;
    stored.template put<kLanes>(value,
                                at + plane * steps.plane + row * steps.row + column * steps.pixel);
  }
  void put_row(int plane, int row, const Vec (&values)[T::Plane::kM]) const {
    if (columns >= T::Plane::kM) {
      return stored.put_row(values, at + plane * steps.plane + row * steps.row);
    }
    for (int column = 0; column < T::Plane::kM; ++column) put(plane, row, column, values[column]);
  }
};

// The outputs of a tile on their own.
template <typename T, int kLanes>
struct Outputs {
  static constexpr bool kWholeRows = false;
  alignas(64) float values[T::Depth::kM][T::Plane::kM][T::Plane::kM][kLanes];

  bool takes(int, int) const { return true; }
  void put(int plane, int row, int column, const Vec& value) {
    value.store(values[plane][row][column], kLanes);
  }
};

template <typename T, int kLanes, int plane, int... rows, typename To>
inline void dst_pass(Rows<rows...>, const float* m, std::int64_t stride, To& to) {
  using Plane = typename T::Plane;
  constexpr int kRows[] = {rows...};
  Vec t[sizeof...(rows)][Plane::kTile];
  unrolled<Plane::kTile>([&]<int column>() {
    const auto element = [&](int i) {
      return T::Depth::template dst<plane>([&](int depth) {
        return Vec::loadu(m + (depth * T::kPlane + i * Plane::kTile + column) * stride, kLanes);
      });
    };
    unrolled<sizeof...(rows)>(
        [&]<int i>() { t[i][column] = Plane::template dst<kRows[i]>(element); });
  });
  unrolled<sizeof...(rows)>([&]<int i>() {
    if (!to.takes(plane, kRows[i])) return;
    const auto value = [&]<int column>() {
      return Plane::template dst<column>([&](int j) { return t[i][j]; });
    };
    if constexpr (To::kWholeRows) {
      Vec values[Plane::kM];
      unrolled<Plane::kM>(
          [&]<int column>() { values[column] = value.template operator()<column>(); });
      to.put_row(plane, kRows[i], values);
    } else {
      unrolled<Plane::kM>([&]<int column>() {
        to.put(plane, kRows[i], column, value.template operator()<column>());
      });
    }
  });
}

template <typename T, int kLanes, int plane, typename... passes, typename To>
inline void dst_plane(Passes<passes...>, const float* m, std::int64_t stride, To& to) {
  (dst_pass<T, kLanes, plane>(passes(), m, stride, to), ...);
}

// A^T M A of kLanes channels of one tile.
template <typename T, int kLanes, typename To>
inline void dst_tile(const float* m, std::int64_t stride, To& to) {
  unrolled<T::Depth::kM>([&]<int plane>() {
    dst_plane<T, kLanes, plane>(typename T::Plane::DstPasses(), m, stride, to);
  });
}

// The same by way of an array. With an epilogue for each of the 32 outputs of a 3-D tile the code
// would be 70 KB, more than L1 holds, and take twice as long.
template <typename T, int kLanes, typename Stored>
inline void dst_tile_in_two(const float* m, std::int64_t stride,
                            const DstTile<T, kLanes, Stored>& to) {
  Outputs<T, kLanes> outputs;
  dst_tile<T, kLanes>(m, stride, outputs);
  for (int plane = 0; plane < T::Depth::kM; ++plane) {
    for (int row = 0; row < T::Plane::kM && to.takes(plane, row); ++row) {
      for (int column = 0; column < T::Plane::kM; ++column) {
        to.put(plane, row, column, Vec::loadu(outputs.values[plane][row][column], kLanes));
      }
    }
  }
}

template <typename T, int kLanes, typename Stored>
[[gnu::flatten]] void transform_dst(const WinogradShape& shape, WinogradTiles tiles,
                                    std::int64_t group, const float* m, const WinogradDst& to) {
  const Steps steps{shape.out[1] * shape.out[2] * shape.block, shape.out[2] * shape.block,
                    shape.block};
  const std::int64_t block_size = shape.out[0] * steps.plane;
  const std::int64_t blocks = (shape.oc + shape.block - 1) / shape.block;
  const std::int64_t first = group * kGroupChannels;
  const std::int64_t end = std::min(first + kGroupChannels, blocks * shape.block);
  for (std::int64_t channel = first; channel < end; channel += kLanes, m += kLanes) {
    const std::int64_t count = std::clamp<std::int64_t>(shape.oc - channel, 0, kLanes);
    const Stored stored(to, channel, count, shape.stream);
    const std::int64_t block = channel / shape.block * block_size + channel % shape.block;
    Walk<T> at(shape, tiles.first);
    for (std::int64_t i = 0; i < tiles.count; ++i, at.next()) {
      const DstTile<T, kLanes, Stored> tile{.at = block + at.image * blocks * block_size +
                                                  at.d * steps.plane + at.h * steps.row +
                                                  at.w * steps.pixel,
                                            .steps = steps,
                                            .planes = shape.out[0] - at.d,
                                            .rows = shape.out[1] - at.h,
                                            .columns = shape.out[2] - at.w,
                                            .stored = stored};
      const float* from = m + i * kGroupChannels;
      if constexpr (Stored::kInTwo || T::Depth::kM * T::Plane::kM * T::Plane::kM > 16) {
        dst_tile_in_two(from, m_stride(tiles.count), tile);
      } else {
        dst_tile<T, kLanes>(from, m_stride(tiles.count), tile);
      }
    }
  }
}

// G weights G^T of one input channel and a vector of output channels at one position of depth:
// put(position, value).
template <typename T, int depth, typename Put>
inline void weights_plane(const float (*taps)[kWidth], Put&& put) {
  using Plane = typename T::Plane;
  constexpr int kTaps = Plane::kTaps;
  Vec t[Plane::kTile][kTaps];
  unrolled<kTaps>([&]<int column>() {
    const auto element = [&](int i) {
      return T::Depth::template weights<depth>(
          [&](int plane) { return Vec::loadu(taps[(plane * kTaps + i) * kTaps + column]); });
    };
    unrolled<Plane::kTile>(
        [&]<int row>() { t[row][column] = Plane::template weights<row>(element); });
  });
  unrolled<Plane::kTile>([&]<int row>() {
    unrolled<Plane::kTile>([&]<int column>() {
      put(depth * T::kPlane + row * Plane::kTile + column,
          Plane::template weights<column>([&](int j) { return t[row][j]; }));
    });
  });
}

// The taps of one input channel and a vector of output channels, `count` of which there are.
template <typename T>
struct Taps {
  static constexpr int kSide = T::Plane::kTaps, kTaps = T::Depth::kTaps * kSide * kSide;
  alignas(64) float values[kTaps][kWidth] = {};

  void load(const WinogradWeights& w, std::int64_t channel, std::int64_t count, std::int64_t ic) {
    for (std::int64_t lane = 0; lane < count; ++lane) {
      const float* from = w.data + (channel + lane) * w.oc_stride + ic * w.ic_stride;
      for (int i = 0; i < kTaps; ++i) {
        values[i][lane] = from[i / (kSide * kSide) * w.d_stride + i / kSide % kSide * w.h_stride +
                               i % kSide * w.w_stride];
      }
    }
  }
};

// One input channel, `stride` numbers between positions. U is often larger than the caches, and a
// whole cache line need not be read to be written.
template <typename T>
void put_weights(const Taps<T>* taps, std::int64_t stride, float* u) {
  unrolled<T::Depth::kTile>([&]<int depth>() {
    weights_plane<T, depth>(taps->values, [&](int position, const Vec& value) {
      float* to = u + position * stride;
      sizeof(Vec) == 64 ? stream(value, to) : value.store(to);
    });
  });
}

inline void store_short(const Vec& x, std::uint16_t* dst) { store_bfloats(x, dst); }
inline void store_short(const Vec& x, std::int16_t* dst) { store_words(x, dst); }

// Two input channels beside each other.
template <typename T, typename Short>
void put_weights(const Taps<T>* taps, std::int64_t stride, Short* u) {
  Short values[2][T::kPositions][kWidth];
  for (int i = 0; i < 2; ++i) {
    unrolled<T::Depth::kTile>([&]<int depth>() {
      weights_plane<T, depth>(taps[i].values, [&](int position, const Vec& value) {
        store_short(value, values[i][position]);
      });
    });
  }
  for (int position = 0; position < T::kPositions; ++position, u += stride) {
    for (int lane = 0; lane < kWidth; ++lane) {
      u[2 * lane] = values[0][position][lane];
      u[2 * lane + 1] = values[1][position][lane];
    }
  }
}

// The largest sum of absolute values over the positions, for each channel of a vector; at least
// twice the largest value.
template <typename T>
Vec largest_sum(const WinogradWeights& w, std::int64_t channel, std::int64_t count,
                std::int64_t begin, std::int64_t end) {
  Taps<T> taps;
  alignas(64) float sums[T::kPositions][kWidth] = {};
  Vec most(0.f);
  for (std::int64_t ic = begin; ic < end; ++ic) {
    taps.load(w, channel, count, ic);
    unrolled<T::Depth::kTile>([&]<int depth>() {
      weights_plane<T, depth>(taps.values, [&](int position, const Vec& value) {
        const Vec absolute = value.abs();
        (Vec::loadu(sums[position]) + absolute).store(sums[position]);
        most = at::vec::maximum(most, absolute + absolute);
      });
    });
  }
  for (const auto& sum : sums) most = at::vec::maximum(most, Vec::loadu(sum));
  return most;
}

// NaN where a weight is one, or infinite.
template <typename T, typename Products>
void transform_weight_scales(const WinogradWeights& w, std::int64_t channel, float* scales) {
  const std::int64_t count = std::clamp<std::int64_t>(w.oc - channel, 0, kWidth);
  Vec most(0.f);
  for (std::int64_t ic = 0; ic < w.ic; ic += Products::kMostInputs) {
    most = at::vec::maximum(
        most, largest_sum<T>(w, channel, count, ic, std::min(w.ic, ic + Products::kMostInputs)));
  }
  alignas(64) float all[kWidth];
  most.store(all);
  for (std::int64_t i = 0; i < kWidth; ++i) {
    const bool is_usual = all[i] > 0 && std::isfinite(all[i]);
    scales[i] = is_usual ? Products::kLargestSum / all[i] : all[i] - all[i] + 1;
  }
}

template <typename T, typename Products>
void transform_weights(const WinogradWeights& w, std::int64_t channel, std::int64_t begin,
                       std::int64_t end, std::int64_t padded_oc, void* packed) {
  const std::int64_t first = channel / kGroupChannels * kGroupChannels;  // of the group
  const std::int64_t channels = std::min(kGroupChannels, padded_oc - first);
  const std::int64_t padded_ic = round_up(w.ic, Products::kChannels);
  auto* u = static_cast<typename Products::Number*>(packed) + first * T::kPositions * padded_ic +
            (channel - first) * Products::kChannels;
  const std::int64_t count = std::clamp<std::int64_t>(w.oc - channel, 0, kWidth);
  for (std::int64_t ic = begin; ic < end; ic += Products::kChannels) {
    Taps<T> taps[Products::kChannels];
    for (std::int64_t i = 0; i < Products::kChannels && ic + i < end; ++i) {
      taps[i].load(w, channel, count, ic + i);
    }
    put_weights<T>(taps, padded_ic * channels, u + ic * channels);
  }
  stream_fence();
}

// What a kernel is made of: the transforms of a tile, the products, and the numbers of src and dst.
// Those of less than 32 bits have blocks of whole vectors only.
template <typename T, typename Products, typename Number>
struct KernelOf {
  using Multiplied = typename Products::Number;
  static constexpr bool kHalves = sizeof(Number) == sizeof(float);

  static constexpr bool kIsFixed = requires { Products::kLargest; };

  static std::int64_t v_size(const WinogradShape& shape, std::int64_t tiles) {
    const std::int64_t scales = kIsFixed ? round_up(tiles, kLine<float>) : 0;
    return T::kPositions * v_stride<Products>(shape.ic, tiles) / Products::kChannels + scales;
  }

  static std::int64_t m_size(const WinogradShape&, std::int64_t tiles) {
    return T::kPositions * m_stride(tiles);
  }

  static void src(const WinogradShape& shape, WinogradTiles tiles, const void* from, void* v) {
    const auto run = [&]<int kLanes>() {
      transform_src<T, Products, kLanes>(shape, tiles, static_cast<const Number*>(from),
                                         static_cast<Multiplied*>(v));
    };
    if constexpr (kHalves && kWidth > 8) {
      if (shape.block % kWidth != 0) return run.template operator()<8>();
    }
    if constexpr (kIsFixed) {
      transform_fixed_src<T, Products>(shape, tiles, static_cast<const Number*>(from),
                                       static_cast<Multiplied*>(v));
    } else if constexpr (std::is_same_v<Number, std::uint8_t>) {
      transform_byte_src<T, Products>(shape, tiles, static_cast<const Number*>(from),
                                      static_cast<Multiplied*>(v));
    } else {
      run.template operator()<kWidth>();
    }
  }

  template <typename Stored>
  static void store(const WinogradShape& shape, WinogradTiles tiles, std::int64_t group,
                    const float* m, const WinogradDst& to) {
    if constexpr (kHalves && kWidth > 8) {
      if (shape.block % kWidth != 0) {
        return transform_dst<T, 8, Stored>(shape, tiles, group, m, to);
      }
    }
    transform_dst<T, kWidth, Stored>(shape, tiles, group, m, to);
  }

  static void dst(const WinogradShape& shape, WinogradTiles tiles, std::int64_t group,
                  const float* m, const WinogradDst& to) {
    if constexpr (std::is_same_v<Number, std::uint8_t>) {
      (to.end ? store<EndedBytes> : store<BoundedBytes>)(shape, tiles, group, m, to);
    } else {
      using Usual = std::conditional_t<kIsFixed, Scaled<Bounded<Number>>, Bounded<Number>>;
      using Any = std::conditional_t<kIsFixed, Scaled<Finished<Number>>, Finished<Number>>;
      const bool is_usual = Bounded<Number>::takes(to.epilogue);
      (is_usual ? store<Usual> : store<Any>)(shape, tiles, group, m, to);
    }
  }

  static constexpr auto weight_scales() -> decltype(Winograd::weight_scales) {
    if constexpr (kIsFixed) return transform_weight_scales<T, Products>;
    return nullptr;
  }

  static void multiply(const WinogradShape& shape, std::int64_t tiles, std::int64_t group,
                       const void* v, const void* u, float* m) {
    winograd_multiply<Products>(shape, T::kPositions, tiles, group,
                                static_cast<const Multiplied*>(v),
                                static_cast<const Multiplied*>(u), m);
  }

  static constexpr Winograd kTable{.tile = {T::Depth::kM, T::Plane::kM, T::Plane::kM},
                                   .positions = T::kPositions,
                                   .src = src,
                                   .multiply = multiply,
                                   .dst = dst,
                                   .weights = transform_weights<T, Products>,
                                   .weight_scales = weight_scales(),
                                   .channels = kGroupChannels,
                                   .input_channels = Products::kChannels,
                                   .group_tiles = Products::kTiles,
                                   .v_size = v_size,
                                   .m_size = m_size};
};

}  // namespace
}  // namespace winograd

using namespace winograd;

template <typename Along, typename Across, typename Products = WinogradFloats,
          typename Number = float>
constexpr const Winograd& kKernel = KernelOf<Tile<Along, Across>, Products, Number>::kTable;

extern const Winograd winograd2, winograd4, winograd2_3d, winograd4_3d, winograd3,
    winograd2_bfloats, winograd4_bfloats, winograd4_words, winograd4_words_vnni, winograd4_fixed,
    winograd4_fixed_vnni;
constinit const Winograd winograd2 = kKernel<F1, F2>, winograd4 = kKernel<F1, F4>,
                         winograd2_3d = kKernel<F2, F2>, winograd4_3d = kKernel<F2, F4>,
                         winograd3 = kKernel<F1, F3>,
                         winograd2_bfloats = kKernel<F1, F2, WinogradBfloats, std::uint16_t>,
                         winograd4_bfloats = kKernel<F1, F4, WinogradFloats, std::uint16_t>,
                         winograd4_words =
                             kKernel<F1, WholeF4, WinogradWords<WordPairs>, std::uint8_t>,
                         winograd4_words_vnni =
                             kKernel<F1, WholeF4, WinogradWords<VnniWordPairs>, std::uint8_t>,
                         winograd4_fixed =
                             kKernel<F1, FixedF4, WinogradFixed<WordPairs>, std::uint16_t>,
                         winograd4_fixed_vnni =
                             kKernel<F1, FixedF4, WinogradFixed<VnniWordPairs>, std::uint16_t>;

}  // namespace torch_blocked::kernels::CPU_CAPABILITY
