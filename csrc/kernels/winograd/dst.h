// Transforms the products of a Winograd convolution to dst and applies the epilogue.
#pragma once

#include "kernels/dots/dot_ends.h"
#include "kernels/winograd/src.h"

namespace torch_blocked::kernels::CPU_CAPABILITY::winograd {

// The following `Stored` classes finish and store outputs. One is made for a vector of channels
// from `channel` on, of which `count` exist. An output is stored as number `at` of dst.

// Stores numbers of dst, with a zero tail.
template <typename Number>
struct Stores {
  Vec bias, lanes;  // lanes: a mask without the tail
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
  // Stores pixels that are `step` numbers apart.
  template <int kLanes, int kCount>
  TORCH_BLOCKED_INLINE void store_row(const Vec (&values)[kCount], std::int64_t at,
                                      std::int64_t step) const {
    if constexpr (std::is_same_v<Number, float> && kLanes == kWidth) {
      if (stream) {
        return unrolled<kCount>([&]<int i>() TORCH_BLOCKED_INLINE {
          kernels::CPU_CAPABILITY::stream(values[i] & lanes, dst + at + i * step);
        });
      }
    }
    unrolled<kCount>([&]<int i>() TORCH_BLOCKED_INLINE {
      store_lanes<kLanes>(values[i] & lanes, dst + at + i * step);
    });
  }
};

// An epilogue of at most a residual and bounds, as most are. It calls no functions, so sums stay in
// registers: 64@56 of bfloat16 takes 205 us, and 233 with all kinds of epilogues.
template <typename Number>
struct Bounded {
  static constexpr bool kInTwo = false;
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
    const Vec sums[] = {sum};
    put_row<kLanes>(sums, at, 0);
  }
  // Finishes pixels that are `step` numbers apart. The conditions are tested once for all of
  // them.
  template <int kLanes, int kCount>
  TORCH_BLOCKED_INLINE void put_row(const Vec (&sums)[kCount], std::int64_t at,
                                    std::int64_t step) const {
    Vec values[kCount];
    const auto each = [](auto&& f) TORCH_BLOCKED_INLINE { unrolled<kCount>(f); };
    each([&]<int i>() TORCH_BLOCKED_INLINE { values[i] = sums[i] + stores.bias; });
    if (residual) {
      each([&]<int i>() TORCH_BLOCKED_INLINE {
        values[i] = values[i] + load_lanes<kLanes>(residual + at + i * step);
      });
    }
    if (is_clamped) {
      each([&]<int i>()
               TORCH_BLOCKED_INLINE { values[i] = at::vec::clamp(values[i], least, most); });
    }
    stores.template store_row<kLanes>(values, at, step);
  }
};

// values [outputs, kLanes] = activation(values + bias). Never inlined: each kind of activation is a
// loop.
template <typename Number, int kLanes>
[[gnu::noinline]] void activate_outputs(const Activation& activation, const Vec& bias,
                                        float* values, std::int64_t count) {
  with_finish<Number>({.before = activation, .after = {}, .residual = false}, nullptr, nullptr,
                      [values, end = values + count, bias](const auto& finish) {
                        for (float* at = values; at < end; at += kLanes) {
                          const Vec sum = Vec::loadu(at, kLanes) + bias;
                          finish(sum, static_cast<const Number*>(nullptr)).store(at, kLanes);
                        }
                      });
}

// Any epilogue. Its first activation is applied to all outputs of a tile at once.
template <typename Number>
struct Finished {
  static constexpr bool kInTwo = true;
  Stores<Number> stores;
  const Epilogue& epilogue;
  Rest rest;

  Finished(const WinogradDst& to, std::int64_t channel, std::int64_t count, bool streams)
      : stores(to, channel, count, streams),
        epilogue(to.epilogue),
        rest(to.epilogue, to.residual, to.dst) {}

  template <int kLanes>
  void begin(float* values, std::int64_t count) const {
    activate_outputs<Number, kLanes>(epilogue.before, stores.bias, values, count);
  }
  template <int kLanes>
  void put(const Vec& value, std::int64_t at) const {
    stores.template store<kLanes>(rest(value, stores.dst + at, kLanes), at);
  }
};

// Fixed point: scales the sums first.
template <typename Stored>
struct Scaled {
  static constexpr bool kInTwo = Stored::kInTwo;
  Stored stored;
  Vec scale;

  Scaled(const WinogradDst& to, std::int64_t channel, std::int64_t count, bool streams)
      : stored(to, channel, count, streams), scale(Vec::loadu(to.scales + channel)) {}

  template <int kLanes>
  void begin(float* values, std::int64_t count) const {
    for (std::int64_t i = 0; i < count; i += kLanes) {
      (Vec::loadu(values + i, kLanes) * scale).store(values + i, kLanes);
    }
    stored.template begin<kLanes>(values, count);
  }
  template <int kLanes>
  void put(const Vec& sum, std::int64_t at) const {
    stored.template put<kLanes>(Stored::kInTwo ? sum : sum * scale, at);
  }
  template <int kLanes, int kCount>
  TORCH_BLOCKED_INLINE void put_row(const Vec (&sums)[kCount], std::int64_t at,
                                    std::int64_t step) const {
    Vec scaled[kCount];
    unrolled<kCount>([&]<int i>() TORCH_BLOCKED_INLINE { scaled[i] = sums[i] * scale; });
    stored.template put_row<kLanes>(scaled, at, step);
  }
};

// Converts sums to bytes by bounds alone.
struct BoundedBytes {
  static constexpr bool kInTwo = false;
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
  // Stores four adjacent pixels.
  template <int kLanes>
  void put_row(const Vec (&sums)[4], std::int64_t at, std::int64_t) const {
    if (!channels.is_small) {
      unrolled<4>([&]<int i>() { put<kWidth>(sums[i], at + i * kWidth); });
      return;
    }
    const auto whole = [&](int i) { return nearest(value(sums[i], at + i * kWidth)); };
    store_quad(whole(0), whole(1), whole(2), whole(3), Index::loadu(channels.least_bytes.data()),
               Index::loadu(channels.most_bytes.data()), dst + at);
  }
};

// Converts sums to bytes or float32 by a general end.
struct EndedBytes {
  static constexpr bool kInTwo = true;
  const WinogradDst& to;
  const DotChannels& channels;

  EndedBytes(const WinogradDst& dst, std::int64_t channel, std::int64_t, bool)
      : to(dst), channels(dst.channels[channel / kWidth]) {}

  template <int kLanes>
  void begin(float*, std::int64_t) const {}

  template <int kLanes>
  void put(const Vec& sum, std::int64_t at) const {
    const auto* residual = static_cast<const std::uint8_t*>(to.residual);
    finish_vector(*to.end, channels, scaled(channels, sum), residual ? residual + at : nullptr,
                  to.is_float32 ? static_cast<void*>(static_cast<float*>(to.dst) + at)
                                : static_cast<std::uint8_t*>(to.dst) + at,
                  to.is_float32);
  }
};

// Where one tile's outputs go: planes x rows x columns of them lie inside dst, from `at` on.
template <typename T, int kLanes, typename Stored>
struct DstTile {
  std::int64_t at;
  Steps steps;
  std::int64_t planes, rows, columns;
  const Stored& stored;

  bool takes(int plane, int row) const {
    return (T::Depth::kM == 1 || plane < planes) && row < rows;
  }
  std::int64_t begin_of(int plane, int row) const {
    return at + plane * steps.plane + row * steps.row;
  }
  TORCH_BLOCKED_INLINE void put_row(int plane, int row, const Vec (&values)[T::Width::kM]) const {
    const std::int64_t begin = begin_of(plane, row);
    if (columns >= T::Width::kM) {
      return stored.template put_row<kLanes>(values, begin, steps.pixel);
    }
    // Constant indices keep the values in registers.
    unrolled<T::Width::kM>([&]<int i>() {
      if (i < columns) stored.template put<kLanes>(values[i], begin + i * steps.pixel);
    });
  }
};

// The outputs of a tile in memory of their own.
template <typename T, int kLanes>
struct Outputs {
  alignas(64) float values[T::Depth::kM][T::Height::kM][T::Width::kM][kLanes];

  bool takes(int, int) const { return true; }
  TORCH_BLOCKED_INLINE void put_row(int plane, int row, const Vec (&row_values)[T::Width::kM]) {
    unrolled<T::Width::kM>(
        [&]<int i>() TORCH_BLOCKED_INLINE { row_values[i].store(values[plane][row][i], kLanes); });
  }
};

// Transforms the columns first and keeps their results in memory, 24 vectors for F(4, 3). So M is
// read once (in 3-D once for each plane), and whole rows are stored. It uses inlined, unrolled
// loops: with a function for each index GCC keeps fewer vectors in registers.
template <typename T, int kLanes, int plane, typename To>
TORCH_BLOCKED_INLINE inline void dst_plane(const float* m, To& to) {
  using Height = typename T::Height;
  using Width = typename T::Width;
  alignas(64) float t[Height::kM][Width::kTile][kLanes];
  TORCH_BLOCKED_UNROLL
  for (int column = 0; column < Width::kTile; ++column) {
    Vec sums[Height::kTile], values[Height::kM];
    unrolled<Height::kTile>([&]<int i>() TORCH_BLOCKED_INLINE {
      sums[i] = T::Depth::template dst<plane>([&](int depth) {
        return Vec::loadu(m + (depth * T::kPlane + i * Width::kTile + column) * kGroupChannels,
                          kLanes);
      });
    });
    unrolled<Height::kM>([&]<int row>() TORCH_BLOCKED_INLINE {
      values[row] = Height::template dst<row>([&](int i) { return sums[i]; });
    });
    unrolled<Height::kM>([&]<int row>()
                             TORCH_BLOCKED_INLINE { values[row].store(t[row][column], kLanes); });
  }
  TORCH_BLOCKED_UNROLL
  for (int row = 0; row < Height::kM; ++row) {
    if (!to.takes(plane, row)) break;
    Vec sums[Width::kTile], values[Width::kM];
    unrolled<Width::kTile>([&]<int j>()
                               TORCH_BLOCKED_INLINE { sums[j] = Vec::loadu(t[row][j], kLanes); });
    unrolled<Width::kM>([&]<int column>() TORCH_BLOCKED_INLINE {
      values[column] = Width::template dst<column>([&](int j) { return sums[j]; });
    });
    to.put_row(plane, row, values);
  }
}

// A^T M A for kLanes channels of one tile.
template <typename T, int kLanes, typename To>
TORCH_BLOCKED_INLINE inline void dst_tile(const float* m, To& to) {
  unrolled<T::Depth::kM>([&]<int plane>()
                             TORCH_BLOCKED_INLINE { dst_plane<T, kLanes, plane>(m, to); });
}

// The same through an array. With an inlined epilogue for each of the 32 outputs of a 3-D tile the
// code would be 70 KB, which is more than L1 holds, and take twice as long.
template <typename T, int kLanes, typename Stored>
inline void dst_tile_in_two(const float* m, const DstTile<T, kLanes, Stored>& to) {
  Outputs<T, kLanes> outputs;
  dst_tile<T, kLanes>(m, outputs);
  if constexpr (Stored::kInTwo) {
    to.stored.template begin<kLanes>(&outputs.values[0][0][0][0], sizeof outputs / sizeof(float));
  }
  const std::int64_t columns = std::min<std::int64_t>(to.columns, T::Width::kM);
  for (int plane = 0; plane < T::Depth::kM; ++plane) {
    for (int row = 0; row < T::Height::kM && to.takes(plane, row); ++row) {
      for (int i = 0; i < columns; ++i) {
        to.stored.template put<kLanes>(Vec::loadu(outputs.values[plane][row][i], kLanes),
                                       to.begin_of(plane, row) + i * to.steps.pixel);
      }
    }
  }
}

// The `Stored` objects of a group's vectors of output channels.
template <typename Stored, int kLanes>
auto stored_of(const WinogradShape& shape, const WinogradDst& to, std::int64_t first) {
  const auto of = [&](std::int64_t channel) {
    const auto count = std::clamp<std::int64_t>(shape.oc - channel, 0, kLanes);
    return Stored(to, count > 0 ? channel : first, count, shape.stream);
  };
  return [&]<int... i>(std::integer_sequence<int, i...>) {
    return std::array{of(first + i * kLanes)...};
  }(std::make_integer_sequence<int, kGroupChannels / kLanes>());
}

// Transforms all vectors of a tile before the next tile, because they share the cache lines of M,
// which is in L2.
template <typename T, int kLanes, typename Stored>
[[gnu::flatten]] void transform_dst(const WinogradShape& shape, WinogradTiles tiles,
                                    std::int64_t group, const float* m, const WinogradDst& to) {
  const Steps steps{shape.out_steps[0], shape.out_steps[1], shape.out_steps[2]},
      tile_steps = steps.times(shape.dilation);
  const std::int64_t blocks = ceil_div(shape.oc, shape.block);
  const std::int64_t first = group * kGroupChannels,
                     end = std::min(first + kGroupChannels, blocks * shape.block);
  const std::int64_t image = shape.groups * blocks * shape.out_block;
  const auto stored = stored_of<Stored, kLanes>(shape, to, first);
  const auto left = [&](std::size_t dim, std::int64_t begin) {
    const std::int64_t step = shape.dilation[dim];
    return step == 1 ? shape.out[dim] - begin : (shape.out[dim] - begin + step - 1) / step;
  };
  Walk<T> at(shape, tiles.first);
  for (std::int64_t i = 0; i < tiles.count; ++i, at.next(), m += m_stride(T::kPositions)) {
    const std::int64_t pixel =
        at.image * image + at.d() * steps.plane + at.h() * steps.row + at.w() * steps.pixel;
    const std::array<std::int64_t, 3> inside{left(0, at.d()), left(1, at.h()), left(2, at.w())};
    for (std::int64_t channel = first; channel < end; channel += kLanes) {
      const DstTile<T, kLanes, Stored> tile{
          .at = channel / shape.block * shape.out_block + channel % shape.block + pixel,
          .steps = tile_steps,
          .planes = inside[0],
          .rows = inside[1],
          .columns = inside[2],
          .stored = stored[static_cast<std::size_t>((channel - first) / kLanes)]};
      const float* from = m + (channel - first);
      if constexpr (Stored::kInTwo || T::kOutputs > 16) {
        dst_tile_in_two(from, tile);
      } else {
        dst_tile<T, kLanes>(from, tile);
      }
    }
  }
}

}  // namespace torch_blocked::kernels::CPU_CAPABILITY::winograd
