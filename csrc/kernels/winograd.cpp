// Winograd convolution F(2x2, 3x3) and F(4x4, 3x3): the transforms of src, dst and weights. 3x3x3
// kernels have F(2, 3) along depth besides.
#include "kernels/finish.h"
#include "kernels/winograd_src.h"

namespace torch_blocked::kernels::CPU_CAPABILITY {
namespace winograd {
namespace {

// Flattened: left to itself, GCC calls a function for each row of half-filled vectors (8c on
// AVX-512).
template <typename T, int kLanes>
[[gnu::flatten]] void transform_src(const WinogradShape& shape, WinogradTiles tiles,
                                    const float* src, float* v) {
  const std::int64_t stride = v_stride(shape.ic, tiles.count),
                     padded_ic = round_up(shape.ic, kWidth);
  const std::int64_t block_size = shape.in[0] * shape.in[1] * shape.in[2] * shape.block;
  const std::int64_t blocks = (shape.ic + shape.block - 1) / shape.block;
  for (std::int64_t channel = 0; channel < shape.ic; channel += kLanes) {
    const float* first = src + channel / shape.block * block_size + channel % shape.block;
    Walk<T> at(shape, tiles.first);
    for_groups(tiles.count, [&](std::int64_t begin, std::int64_t count) {
      // [tiles of the group, kWidth]
      float* to = v + begin * padded_ic + channel / kWidth * count * kWidth + channel % kWidth;
      for (std::int64_t i = 0; i < count; ++i, to += kWidth, at.next()) {
        src_tile<T, kLanes>(shape, first + at.image * blocks * block_size, at, to, stride);
      }
    });
  }
}

// What happens to an output on its way to memory.
struct Store {
  Vec bias, lanes;  // lanes: all bits of the channels there are, none of the tail
  Finish finish;
  bool stream;

  template <int kLanes>
  void operator()(const Vec& sum, float* dst) const {
    const Vec value = finish(sum + bias, dst, kLanes) & lanes;
    kLanes == kWidth&& stream ? kernels::CPU_CAPABILITY::stream(value, dst)
                              : value.store(dst, kLanes);
  }
};

// Where one tile's outputs go: planes x rows x columns of them are inside dst.
template <typename T, int kLanes>
struct DstTile {
  float* dst;
  Steps steps;
  std::int64_t planes, rows, columns;
  const Store& store;

  bool takes(int plane, int row) const {
    return (T::Depth::kM == 1 || plane < planes) && row < rows;
  }
  void put(int plane, int row, int column, const Vec& value) const {
    if (column >= columns) return;
    store.template operator()<kLanes>(
        value, dst + plane * steps.plane + row * steps.row + column * steps.pixel);
  }
};

// The outputs of a tile on their own.
template <typename T, int kLanes>
struct Outputs {
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
    unrolled<Plane::kM>([&]<int column>() {
      to.put(plane, kRows[i], column, Plane::template dst<column>([&](int j) { return t[i][j]; }));
    });
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
template <typename T, int kLanes>
inline void dst_tile_in_two(const float* m, std::int64_t stride, const DstTile<T, kLanes>& to) {
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

template <typename T, int kLanes>
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
    const Store store{to.bias && count ? Vec::loadu(to.bias + channel, count) : Vec(0.f),
                      lanes_mask(count), Finish(to.epilogue, to.residual, to.dst), shape.stream};
    float* block = to.dst + channel / shape.block * block_size + channel % shape.block;
    Walk<T> at(shape, tiles.first);
    for (std::int64_t i = 0; i < tiles.count; ++i, at.next()) {
      const DstTile<T, kLanes> tile{block + at.image * blocks * block_size + at.d * steps.plane +
                                        at.h * steps.row + at.w * steps.pixel,
                                    steps,
                                    shape.out[0] - at.d,
                                    shape.out[1] - at.h,
                                    shape.out[2] - at.w,
                                    store};
      const float* from = m + i * kGroupChannels;
      if constexpr (T::Depth::kM * T::Plane::kM * T::Plane::kM > 16) {
        dst_tile_in_two(from, m_stride(tiles.count), tile);
      } else {
        dst_tile<T, kLanes>(from, m_stride(tiles.count), tile);
      }
    }
  }
}

// G weights G^T of one input channel and a vector of output channels at one position of depth;
// position p to u + p * stride.
template <typename T, int depth>
inline void weights_plane(const float (*taps)[kWidth], float* u, std::int64_t stride) {
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
      const Vec value = Plane::template weights<column>([&](int j) { return t[row][j]; });
      float* to = u + (row * Plane::kTile + column) * stride;
      // U is often larger than the caches. A whole cache line need not be read to be written.
      sizeof(Vec) == 64 ? stream(value, to) : value.store(to);
    });
  });
}

template <typename T>
void transform_weights(const WinogradWeights& w, std::int64_t channel, std::int64_t begin,
                       std::int64_t end, std::int64_t padded_oc, float* u) {
  const std::int64_t first = channel / kGroupChannels * kGroupChannels;  // of the group
  const std::int64_t channels = std::min(kGroupChannels, padded_oc - first);
  const std::int64_t stride = w.ic * channels;
  u += first * T::kPositions * w.ic + channel - first;
  const std::int64_t count = std::clamp<std::int64_t>(w.oc - channel, 0, kWidth);
  constexpr int kSide = T::Plane::kTaps, kTaps = T::Depth::kTaps * kSide * kSide;
  alignas(64) float taps[kTaps][kWidth] = {};
  for (std::int64_t ic = begin; ic < end; ++ic) {
    for (std::int64_t lane = 0; lane < count; ++lane) {
      const float* from = w.data + (channel + lane) * w.oc_stride + ic * w.ic_stride;
      for (int i = 0; i < kTaps; ++i) {
        taps[i][lane] = from[i / (kSide * kSide) * w.d_stride + i / kSide % kSide * w.h_stride +
                             i % kSide * w.w_stride];
      }
    }
    unrolled<T::Depth::kTile>([&]<int depth>() {
      weights_plane<T, depth>(taps, u + depth * T::kPlane * stride + ic * channels, stride);
    });
  }
  stream_fence();
}

template <typename T>
std::int64_t v_size(const WinogradShape& shape, std::int64_t tiles) {
  return T::kPositions * v_stride(shape.ic, tiles);
}

template <typename T>
std::int64_t m_size(const WinogradShape&, std::int64_t tiles) {
  return T::kPositions * m_stride(tiles);
}

template <typename T>
void src_of(const WinogradShape& shape, WinogradTiles tiles, const float* src, float* v) {
  const bool whole = shape.block % kWidth == 0;
  (whole ? transform_src<T, kWidth> : transform_src<T, 8>)(shape, tiles, src, v);
}

template <typename T>
void dst_of(const WinogradShape& shape, WinogradTiles tiles, std::int64_t group, const float* m,
            const WinogradDst& dst) {
  const bool whole = shape.block % kWidth == 0;
  (whole ? transform_dst<T, kWidth> : transform_dst<T, 8>)(shape, tiles, group, m, dst);
}

template <typename T>
void multiply_of(const WinogradShape& shape, std::int64_t tiles, std::int64_t group, const float* v,
                 const float* u, float* m) {
  winograd_multiply(shape, T::kPositions, tiles, group, v, u, m);
}

template <typename T>
constexpr Winograd winograd_of() {
  return {.tile = {T::Depth::kM, T::Plane::kM, T::Plane::kM},
          .positions = T::kPositions,
          .src = src_of<T>,
          .multiply = multiply_of<T>,
          .dst = dst_of<T>,
          .weights = transform_weights<T>,
          .channels = kGroupChannels,
          .group_tiles = kGroupTiles,
          .v_size = v_size<T>,
          .m_size = m_size<T>};
}

}  // namespace
}  // namespace winograd

using namespace winograd;

extern const Winograd winograd2, winograd4, winograd2_3d, winograd4_3d, winograd3;
constinit const Winograd winograd2 = winograd_of<Tile<F1, F2>>(),
                         winograd4 = winograd_of<Tile<F1, F4>>(),
                         winograd2_3d = winograd_of<Tile<F2, F2>>(),
                         winograd4_3d = winograd_of<Tile<F2, F4>>(),
                         winograd3 = winograd_of<Tile<F1, F3>>();

}  // namespace torch_blocked::kernels::CPU_CAPABILITY
