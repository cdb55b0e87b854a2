// Winograd convolution F(2x2, 3x3) and F(4x4, 3x3): the transforms of src, dst and weights. 3x3x3
// kernels have F(2, 3) along depth besides.
#include "kernels/finish.h"
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
  template <int kLanes>
  void operator()(const Vec& sum, std::uint16_t* dst) const {
    store_lanes<kLanes>(finish(sum + bias, dst, kLanes) & lanes, dst);
  }
};

// Where one tile's outputs go: planes x rows x columns of them are inside dst.
template <typename T, int kLanes, typename Number>
struct DstTile {
  Number* dst;
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
template <typename T, int kLanes, typename Number>
inline void dst_tile_in_two(const float* m, std::int64_t stride,
                            const DstTile<T, kLanes, Number>& to) {
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

template <typename T, int kLanes, typename Number>
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
    Number* block =
        static_cast<Number*>(to.dst) + channel / shape.block * block_size + channel % shape.block;
    Walk<T> at(shape, tiles.first);
    for (std::int64_t i = 0; i < tiles.count; ++i, at.next()) {
      const DstTile<T, kLanes, Number> tile{.dst = block + at.image * blocks * block_size +
                                                   at.d * steps.plane + at.h * steps.row +
                                                   at.w * steps.pixel,
                                            .steps = steps,
                                            .planes = shape.out[0] - at.d,
                                            .rows = shape.out[1] - at.h,
                                            .columns = shape.out[2] - at.w,
                                            .store = store};
      const float* from = m + i * kGroupChannels;
      if constexpr (T::Depth::kM * T::Plane::kM * T::Plane::kM > 16) {
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

// Two input channels beside each other.
template <typename T>
void put_weights(const Taps<T>* taps, std::int64_t stride, std::uint16_t* u) {
  std::uint16_t values[2][T::kPositions][kWidth];
  for (int i = 0; i < 2; ++i) {
    unrolled<T::Depth::kTile>([&]<int depth>() {
      weights_plane<T, depth>(taps[i].values, [&](int position, const Vec& value) {
        store_bfloats(value, values[i][position]);
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
// Those of 16 bits have blocks of whole vectors only.
template <typename T, typename Products, typename Number>
struct KernelOf {
  using Multiplied = typename Products::Number;
  static constexpr bool kHalves = sizeof(Number) == sizeof(float);

  static std::int64_t v_size(const WinogradShape& shape, std::int64_t tiles) {
    return T::kPositions * v_stride<Products>(shape.ic, tiles) / Products::kChannels;
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
    run.template operator()<kWidth>();
  }

  static void dst(const WinogradShape& shape, WinogradTiles tiles, std::int64_t group,
                  const float* m, const WinogradDst& to) {
    if constexpr (kHalves && kWidth > 8) {
      if (shape.block % kWidth != 0) {
        return transform_dst<T, 8, Number>(shape, tiles, group, m, to);
      }
    }
    transform_dst<T, kWidth, Number>(shape, tiles, group, m, to);
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
    winograd2_bfloats, winograd4_bfloats;
constinit const Winograd winograd2 = kKernel<F1, F2>, winograd4 = kKernel<F1, F4>,
                         winograd2_3d = kKernel<F2, F2>, winograd4_3d = kKernel<F2, F4>,
                         winograd3 = kKernel<F1, F3>,
                         winograd2_bfloats = kKernel<F1, F2, WinogradBfloats, std::uint16_t>,
                         winograd4_bfloats = kKernel<F1, F4, WinogradFloats, std::uint16_t>;

}  // namespace torch_blocked::kernels::CPU_CAPABILITY
