// The kernels of Winograd convolution: transforms of src, dst and weights. 3x3x3 kernels also have
// F(2, 3) along depth.
#include "kernels/winograd/dst.h"
#include "kernels/winograd/short_src.h"

namespace torch_blocked::kernels::CPU_CAPABILITY {
namespace winograd {
namespace {

// Flattened, because otherwise GCC calls a function for each row of half-filled vectors (8c on
// AVX-512).
template <typename T, typename Products, int kLanes, typename From>
[[gnu::flatten]] void transform_src(const WinogradShape& shape, WinogradTiles tiles,
                                    const From* src, typename Products::Number* v) {
  const std::int64_t stride = v_stride<Products>(shape.ic, tiles.count),
                     padded_ic = round_up(shape.ic, kWidth);
  const std::int64_t block_size = block_size_of(shape.in, shape.block);
  const std::int64_t image = shape.groups * ceil_div(shape.src_ic, shape.block) * block_size;
  const std::int64_t of_part = shape.ic / (shape.parts[0] * shape.parts[1] * shape.parts[2]);
  for (std::int64_t channel = 0; channel < shape.ic; channel += kLanes) {
    const std::int64_t part = channel / of_part, own = channel % of_part;
    const From* first = src + own / shape.block * block_size + own % shape.block;
    GroupOf group(tiles.count, Products::kTiles);
    const auto put_of = [&](std::int64_t tile, int depth) {
      group.go_to(tile);  // [tiles of the group, kWidth]
      auto* to = v + group.begin * padded_ic + channel % kWidth +
                 (channel / kWidth * (group.end - group.begin) + tile - group.begin) * kWidth;
      return Positions<T, kLanes, typename Products::Number>{to + depth * T::kPlane * stride,
                                                             stride};
    };
    transform_tiles<T, kLanes>(shape, tiles, first, image, part_offset<T>(shape, part), put_of);
  }
}

// G weights G^T for one input channel and a vector of output channels, at one row of depth's G.
// Results go to put(number, value).
template <typename T, int depth, typename Put>
inline void weights_plane(const float (*taps)[kWidth], Put&& put) {
  using Height = typename T::Height;
  using Width = typename T::Width;
  Vec t[Height::kWeights][Width::kTaps];
  unrolled<Width::kTaps>([&]<int column>() {
    const auto element = [&](int i) {
      return T::Depth::template weights<depth>([&](int plane) {
        return Vec::loadu(taps[(plane * Height::kTaps + i) * Width::kTaps + column]);
      });
    };
    unrolled<Height::kWeights>(
        [&]<int row>() { t[row][column] = Height::template weights<row>(element); });
  });
  unrolled<Height::kWeights>([&]<int row>() {
    unrolled<Width::kWeights>([&]<int column>() {
      put(depth * T::kWeightsPlane + row * Width::kWeights + column,
          Width::template weights<column>([&](int j) { return t[row][j]; }));
    });
  });
}

// The taps of one input channel and a vector of output channels, of which `count` exist.
template <typename T>
struct Taps {
  static constexpr int kRow = T::Width::kTaps, kPlane = T::Height::kTaps * kRow,
                       kTaps = T::Depth::kTaps * kPlane;
  alignas(64) float values[kTaps][kWidth] = {};

  void load(const WinogradWeights& w, std::int64_t channel, std::int64_t count, std::int64_t ic) {
    for (std::int64_t lane = 0; lane < count; ++lane) {
      const float* from = w.data + (channel + lane) * w.oc_stride + ic * w.ic_stride;
      for (int i = 0; i < kTaps; ++i) {
        values[i][lane] =
            from[i / kPlane * w.d_stride + i % kPlane / kRow * w.h_stride + i % kRow * w.w_stride];
      }
    }
  }
};

// Writes one input channel; T's weights lie `stride` numbers apart. U is often larger than the
// caches, so this writes whole cache lines, which need not be read first.
template <typename T>
void put_weights(const Taps<T>* taps, std::int64_t stride, float* u) {
  unrolled<T::Depth::kWeights>([&]<int depth>() {
    weights_plane<T, depth>(taps->values, [&](int number, const Vec& value) {
      float* to = u + number * stride;
      sizeof(Vec) == 64 ? stream(value, to) : value.store(to);
    });
  });
}

inline void store_short(const Vec& x, std::uint16_t* dst) { store_bfloats(x, dst); }
inline void store_short(const Vec& x, std::int16_t* dst) { store_words(x, dst); }

// Writes two input channels, interleaved.
template <typename T, typename Short>
void put_weights(const Taps<T>* taps, std::int64_t stride, Short* u) {
  Short values[2][T::kWeights][kWidth];
  for (int i = 0; i < 2; ++i) {
    unrolled<T::Depth::kWeights>([&]<int depth>() {
      weights_plane<T, depth>(taps[i].values, [&](int number, const Vec& value) {
        store_short(value, values[i][number]);
      });
    });
  }
  for (int number = 0; number < T::kWeights; ++number, u += stride) {
    for (int lane = 0; lane < kWidth; ++lane) {
      u[2 * lane] = values[0][number][lane];
      u[2 * lane + 1] = values[1][number][lane];
    }
  }
}

// For each channel of a vector, the largest sum of absolute values over T's weights; at least twice
// the largest value.
template <typename T>
Vec largest_sum(const WinogradWeights& w, std::int64_t channel, std::int64_t count,
                std::int64_t begin, std::int64_t end) {
  Taps<T> taps;
  alignas(64) float sums[T::kWeights][kWidth] = {};
  Vec most(0.f);
  for (std::int64_t ic = begin; ic < end; ++ic) {
    taps.load(w, channel, count, ic);
    unrolled<T::Depth::kWeights>([&]<int depth>() {
      weights_plane<T, depth>(taps.values, [&](int number, const Vec& value) {
        const Vec absolute = value.abs();
        (Vec::loadu(sums[number]) + absolute).store(sums[number]);
        most = at::vec::maximum(most, absolute + absolute);
      });
    });
  }
  for (const auto& sum : sums) most = at::vec::maximum(most, Vec::loadu(sum));
  return most;
}

// A scale is NaN if a weight is NaN or infinite.
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
  auto* u = static_cast<typename Products::Number*>(packed) + first * T::kWeights * padded_ic +
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

// Builds a kernel from the transforms of a tile, the products, and the type of src and dst. Types
// of less than 32 bits need blocks of whole vectors.
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
    return tiles * m_stride(T::kPositions);
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
    winograd_multiply<Products>(shape, {T::kWeightsOf, T::kWeights}, tiles, group,
                                static_cast<const Multiplied*>(v),
                                static_cast<const Multiplied*>(u), m);
  }

  static constexpr Winograd kTable{.tile = {T::Depth::kM, T::Height::kM, T::Width::kM},
                                   .taps = {T::Depth::kTaps, T::Height::kTaps, T::Width::kTaps},
                                   .positions = T::kPositions,
                                   .position_weights = T::kWeights,
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
constexpr const Winograd& kKernel = KernelOf<Tile<Along, Across, Across>, Products, Number>::kTable;

extern const Winograd winograd2, winograd4, winograd4_1d, winograd2_3d, winograd4_3d, winograd3,
    winograd3_1d, winograd4_2taps, winograd4_2taps_1d, winograd2_stride2, winograd4_stride2,
    winograd4_stride2_4taps, winograd4_stride2_5taps, winograd4_stride2_6taps, winograd2_bfloats,
    winograd4_bfloats, winograd4_words, winograd4_words_vnni, winograd4_fixed, winograd4_fixed_vnni;
constinit const Winograd winograd2 = kKernel<F1, F2>, winograd4 = kKernel<F1, F4>,
                         winograd2_3d = kKernel<F2, F2>, winograd4_3d = kKernel<F2, F4>,
                         winograd3 = kKernel<F1, F3>,
                         winograd4_1d = KernelOf<Tile<F1, F1, F4>, WinogradFloats, float>::kTable,
                         winograd3_1d = KernelOf<Tile<F1, F1, F3>, WinogradFloats, float>::kTable,
                         winograd4_2taps = kKernel<F1, F4Of2>,
                         winograd4_2taps_1d =
                             KernelOf<Tile<F1, F1, F4Of2>, WinogradFloats, float>::kTable,
                         winograd2_stride2 = kKernel<F1, AtStride2<F2Of2, OneTap<2>>>,
                         winograd4_stride2 = kKernel<F1, AtStride2<F4Of2, OneTap<4>>>,
                         winograd4_stride2_4taps = kKernel<F1, AtStride2<F4Of2, F4Of2>>,
                         winograd4_stride2_5taps = kKernel<F1, AtStride2<F4, F4Of2>>,
                         winograd4_stride2_6taps = kKernel<F1, AtStride2<F4, F4>>,
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
