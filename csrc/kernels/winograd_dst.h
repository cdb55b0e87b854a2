// The transform of the products of a Winograd convolution to dst, and what happens to an output
// then.
#pragma once

#include "kernels/dot_ends.h"
#include "kernels/winograd_src.h"

namespace torch_blocked::kernels::CPU_CAPABILITY::winograd {

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
    if (is_clamped) value = at::vec::clamp(value, least, most);
    stores.template store<kLanes>(value, at);
  }
};

// values [outputs, kLanes] = activation(values + bias). Never inlined: each kind is a loop.
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

// Any epilogue, whose first activation is that of all outputs of a tile at once.
template <typename Number>
struct Finished {
  static constexpr bool kInTwo = true, kWholeRows = false;
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

// Of fixed point.
template <typename Stored>
struct Scaled {
  static constexpr bool kInTwo = Stored::kInTwo, kWholeRows = false;
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
  void put_row(int plane, int row, const Vec (&values)[T::Width::kM]) const {
    if (columns >= T::Width::kM) {
      return stored.put_row(values, at + plane * steps.plane + row * steps.row);
    }
    for (int column = 0; column < T::Width::kM; ++column) put(plane, row, column, values[column]);
  }
};

// The outputs of a tile on their own.
template <typename T, int kLanes>
struct Outputs {
  static constexpr bool kWholeRows = false;
  alignas(64) float values[T::Depth::kM][T::Height::kM][T::Width::kM][kLanes];

  bool takes(int, int) const { return true; }
  void put(int plane, int row, int column, const Vec& value) {
    value.store(values[plane][row][column], kLanes);
  }
};

template <typename T, int kLanes, int plane, int... rows, typename To>
inline void dst_pass(Rows<rows...>, const float* m, To& to) {
  using Height = typename T::Height;
  using Width = typename T::Width;
  constexpr int kRows[] = {rows...};
  Vec t[sizeof...(rows)][Width::kTile];
  unrolled<Width::kTile>([&]<int column>() {
    const auto element = [&](int i) {
      return T::Depth::template dst<plane>([&](int depth) {
        return Vec::loadu(m + (depth * T::kPlane + i * Width::kTile + column) * kGroupChannels,
                          kLanes);
      });
    };
    unrolled<sizeof...(rows)>(
        [&]<int i>() { t[i][column] = Height::template dst<kRows[i]>(element); });
  });
  unrolled<sizeof...(rows)>([&]<int i>() {
    if (!to.takes(plane, kRows[i])) return;
    const auto value = [&]<int column>() {
      return Width::template dst<column>([&](int j) { return t[i][j]; });
    };
    if constexpr (To::kWholeRows) {
      Vec values[Width::kM];
      unrolled<Width::kM>(
          [&]<int column>() { values[column] = value.template operator()<column>(); });
      to.put_row(plane, kRows[i], values);
    } else {
      unrolled<Width::kM>([&]<int column>() {
        to.put(plane, kRows[i], column, value.template operator()<column>());
      });
    }
  });
}

template <typename T, int kLanes, int plane, typename... passes, typename To>
inline void dst_plane(Passes<passes...>, const float* m, To& to) {
  (dst_pass<T, kLanes, plane>(passes(), m, to), ...);
}

// A^T M A of kLanes channels of one tile.
template <typename T, int kLanes, typename To>
inline void dst_tile(const float* m, To& to) {
  unrolled<T::Depth::kM>(
      [&]<int plane>() { dst_plane<T, kLanes, plane>(typename T::Height::DstPasses(), m, to); });
}

// The same by way of an array. With an epilogue for each of the 32 outputs of a 3-D tile the code
// would be 70 KB, more than L1 holds, and take twice as long.
template <typename T, int kLanes, typename Stored>
inline void dst_tile_in_two(const float* m, const DstTile<T, kLanes, Stored>& to) {
  Outputs<T, kLanes> outputs;
  dst_tile<T, kLanes>(m, outputs);
  if constexpr (Stored::kInTwo) {
    to.stored.template begin<kLanes>(&outputs.values[0][0][0][0], sizeof outputs / sizeof(float));
  }
  for (int plane = 0; plane < T::Depth::kM; ++plane) {
    for (int row = 0; row < T::Height::kM && to.takes(plane, row); ++row) {
      for (int column = 0; column < T::Width::kM; ++column) {
        to.put(plane, row, column, Vec::loadu(outputs.values[plane][row][column], kLanes));
      }
    }
  }
}

template <typename T, int kLanes, typename Stored>
[[gnu::flatten]] void transform_dst(const WinogradShape& shape, WinogradTiles tiles,
                                    std::int64_t group, const float* m, const WinogradDst& to) {
  const Steps steps{shape.out_steps[0], shape.out_steps[1], shape.out_steps[2]};
  const std::int64_t block_size = shape.out_block;
  const std::int64_t blocks = (shape.oc + shape.block - 1) / shape.block;
  const std::int64_t first = group * kGroupChannels;
  const std::int64_t end = std::min(first + kGroupChannels, blocks * shape.block);
  const std::int64_t image = shape.groups * blocks * block_size;
  for (std::int64_t channel = first; channel < end; channel += kLanes, m += kLanes) {
    const std::int64_t count = std::clamp<std::int64_t>(shape.oc - channel, 0, kLanes);
    const Stored stored(to, channel, count, shape.stream);
    const std::int64_t block = channel / shape.block * block_size + channel % shape.block;
    Walk<T> at(shape, tiles.first);
    for (std::int64_t i = 0; i < tiles.count; ++i, at.next()) {
      const auto left = [&](std::size_t dim, std::int64_t first) {
        const std::int64_t step = shape.dilation[dim];
        return step == 1 ? shape.out[dim] - first : (shape.out[dim] - first + step - 1) / step;
      };
      const DstTile<T, kLanes, Stored> tile{.at = block + at.image * image + at.d() * steps.plane +
                                                  at.h() * steps.row + at.w() * steps.pixel,
                                            .steps = steps.times(shape.dilation),
                                            .planes = left(0, at.d()),
                                            .rows = left(1, at.h()),
                                            .columns = left(2, at.w()),
                                            .stored = stored};
      const float* from = m + i * m_stride(T::kPositions);
      if constexpr (Stored::kInTwo || T::kOutputs > 16) {
        dst_tile_in_two(from, tile);
      } else {
        dst_tile<T, kLanes>(from, tile);
      }
    }
  }
}

}  // namespace torch_blocked::kernels::CPU_CAPABILITY::winograd
