// Direct convolution as a product of matrices: [pixels, lanes] x [lanes, output channels], where
// the lanes of a pixel are all the src values under the kernel.
//
// A register tile is kPixels x kVectors sums. Each lane costs kVectors loads of weights, and
// kPixels broadcasts, for kPixels * kVectors FMAs; Zen 4 then runs at 95 to 99 % of its FMA peak.
#include "kernels/direct/direct.h"

#include <algorithm>
#include <array>
#include <utility>

#include "format/sizes.h"
#include "kernels/vector/finish.h"
#include "kernels/vector/register_tile.h"

namespace torch_blocked::kernels::CPU_CAPABILITY {
namespace {

// Most pixels of a tile with 1, 2 and 3 vectors: sums, weights and one broadcast fill 32 registers,
// or 16. More than 14 single vectors would gain nothing, as each needs a broadcast of its own.
//
// The lanes of one part, whose weights serve all pixels: 128 or 36 KB, which L2 holds. Each part
// reads and writes all sums once, which costs 1x1 layers more on Zen 3 than weights that are not in
// L1. The taps of a kernel share their src, and 24 KB in L1 are as good as more, or better where
// weights come from memory.
#if defined(CPU_CAPABILITY_AVX512)
constexpr std::array<int, 3> kTilePixels{14, 14, 9};
constexpr std::int64_t kBestVectors = 2, kPartLanes = 1024, kTapLanes = 1024,
                       kBandBytes = 512 << 10;
#else
#if defined(CPU_CAPABILITY_AVX2)
constexpr std::array<int, 3> kTilePixels{12, 6, 4};
#else
constexpr std::array<int, 3> kTilePixels{2, 2, 2};  // small rather than fast, as in dots.cpp
#endif
constexpr std::int64_t kBestVectors = 3, kPartLanes = 384, kTapLanes = 256, kBandBytes = 256 << 10;
#endif

// Functions that see the sums are always inlined, and their loops are unrolled: otherwise GCC keeps
// the sums in memory.

// f(pixel, vector) for all sums of a tile.
template <int kPixels, int kVectors, typename F>
TORCH_BLOCKED_INLINE inline void for_sums(F&& f) {
  TORCH_BLOCKED_UNROLL
  for (int i = 0; i < kPixels * kVectors; ++i) f(i / kVectors, i % kVectors);
}

// Whether the activation is cheap enough to be compiled into every instance of tiles(), where it is
// applied to the sums in registers. Anything else is left to activate_pixels().
bool in_registers(const Activation& activation) {
  return activation.kind == Activation::Kind::kNone || activation.kind == Activation::Kind::kClamp;
}

// Lanes of vector j that are channels.
inline std::int64_t lanes_of(const DirectTiles& t, std::int64_t j) {
  return std::clamp<std::int64_t>(t.channels - j * kWidth, 0, kWidth);
}

// The activation of tiles whose sums are stored already, and still in L1.
[[gnu::noinline]] void activate_pixels(const DirectTiles& t, float* dst, std::int64_t pixels) {
  with_function(t.activation, [&t, dst, pixels](const auto& function) {
    const std::int64_t step = t.dst_step, vectors = t.vectors;
    for (std::int64_t j = 0; j < vectors; ++j) {
      float* to = dst + t.dst_offsets[static_cast<std::size_t>(j)];
      for (std::int64_t i = 0; i < pixels; ++i, to += step) function(Vec::loadu(to)).store(to);
    }
  });
}

// Sums to blocks narrower than a vector.
[[gnu::noinline]] void store_parts(const DirectTiles& t, const float* sums, float* dst,
                                   std::int64_t pixels) {
  for (std::int64_t i = 0; i < pixels; ++i, dst += t.dst_step, sums += t.vectors * kWidth) {
    for (std::int64_t part = 0; part < t.parts; ++part) {
      std::copy_n(sums + part * t.dst_step, t.dst_step, dst + part * t.part_stride);
    }
  }
}

template <int kPixels, int kVectors>
using FloatSums = Sums<Vec, kPixels, kVectors>;

// Floats from one pixel to the next: kStep, or what the arguments say if that is kAnyStep.
constexpr int kAnyStep = 0;

constexpr int kLine = 16;  // floats of a cache line

// Pixels of a tile or several whose activation is one loop: a tile of 12 vectors by itself takes 10
// cycles a vector for SiLU on Zen 3, where the function takes 6 in a long loop.
constexpr std::int64_t kActivatedPixels = 32;

template <int kStep>
TORCH_BLOCKED_INLINE inline std::int64_t step_of(const DirectTiles& t) {
  return kStep == kAnyStep ? t.src_step : kStep;
}

// The numbers of several lanes at a step that only the arguments know. GCC would work out the
// address of each row and lane before the loops, keep these 32 in memory, and read one for each
// number. So it is not told that the bases and the step of these lanes are those of others.
template <int kPixels>
class StridedRows {
 public:
  TORCH_BLOCKED_INLINE StridedRows(const float* src, std::int64_t step) : step_(step) {
    TORCH_BLOCKED_UNROLL
    for (int i = 0; i < kBases; ++i) {
      bases_[i] = src + i * kRows * step;
      asm volatile("" : "+r"(bases_[i]));
    }
    asm volatile("" : "+r"(step_));
  }

  TORCH_BLOCKED_INLINE const float* operator()(int i, int lane) const {
    return bases_[i / kRows] + i % kRows * step_ + lane;
  }

 private:
  // Rows of a base, of which an address has the step zero times, once and twice.
  static constexpr int kRows = 3, kBases = ceil_div(kPixels, kRows);
  const float* bases_[kBases];
  std::int64_t step_;
};

// What the tiles of a call have in common as they go through its segments.
struct Walk {
  // The weights that come next, of which each tile prefetches a share, some floats further on with
  // each lane. Were it the first tiles alone, they would wait for memory, which then idles: 512@7
  // 3x3, weights from memory, takes 2.87 ms on Zen 3, and 3.13 so.
  const float *ahead, *end;
  std::int64_t step = 0;  // of a lane

  Walk(const DirectTiles& t, std::int64_t row_tiles) : ahead(t.weights + t.ahead), end(ahead) {
    if (t.count == 0) return;  // outputs that see padding only
    const DirectSegment &first = t.segments[0], &last = t.segments[t.count - 1];
    const std::int64_t wide = t.vectors * kWidth, lanes = last.weights + last.lanes - first.weights;
    step = ceil_div(wide, t.rows * row_tiles);
    ahead += first.weights * wide;
    end = ahead + lanes * wide;
    ahead += t.row * row_tiles * lanes * step;
  }
};

// sums += [kPixels, lanes of all segments] x weights, kLanes at a time, of which each segment has a
// multiple.
template <int kStep, int kLanes, int kPixels, int kVectors>
TORCH_BLOCKED_INLINE inline void add_segments(const DirectTiles& t, const float* first, Walk& walk,
                                              FloatSums<kPixels, kVectors>& sums) {
  constexpr int kRow = kVectors * kWidth;
  const std::int64_t step = step_of<kStep>(t);
  const float* ahead = walk.ahead;
  const std::int64_t ahead_step = ahead < walk.end ? walk.step : 0;
  const DirectSegment* end = t.segments + t.count;
  for (const DirectSegment* segment = t.segments; segment < end; ++segment) {
    const float* src = first + segment->offset;
    const float* weights = t.weights + segment->weights * kRow;
    // Pixels of the next segment, a channel block away, where no hardware looks ahead. Without it
    // AVX2 loses up to 15 %.
    const float* next = first + segment[1].offset;
    // Of blocks a segment has no more.
    const std::int64_t lanes = kLanes == kWidth && kStep == kWidth ? kLanes : segment->lanes;
    for (const float* src_end = src + lanes; src < src_end; src += kLanes) {
      // Rows are one stream.
      if constexpr (kStep != kAnyStep) {
        for (int i = 0; i < (kLanes > 1 ? kPixels : 1); i += std::max(1, kLine / kStep)) {
          __builtin_prefetch(next + i * step);
        }
      }
      prefetch_share<kLanes>(ahead, ahead_step);
      ahead += kLanes * ahead_step;
      next += kLanes * step;
      const auto add_lanes = [&](const auto& row) TORCH_BLOCKED_INLINE {
        TORCH_BLOCKED_UNROLL
        for (int lane = 0; lane < kLanes; ++lane) {
          add_lane<Floats, kPixels, kVectors>([&](int i)
                                                  TORCH_BLOCKED_INLINE { return row(i, lane); },
                                              weights + lane * kRow, sums.values);
        }
      };
      if constexpr (kStep == kAnyStep && kLanes > 1) {
        add_lanes(StridedRows<kPixels>(src, step));
      } else {
        add_lanes([&](int i, int lane) TORCH_BLOCKED_INLINE { return src + i * step + lane; });
      }
      weights += kLanes * kRow;
    }
  }
  walk.ahead = ahead;
}

// What the sums of a call begin with: the bias, or zeros.
template <int kVectors>
struct Start {
  Vec vectors[kVectors];

  explicit Start(const DirectTiles& t) {
    for (int j = 0; j < kVectors; ++j) {
      vectors[j] = t.first && t.bias ? Vec::loadu(t.bias + j * kWidth, lanes_of(t, j)) : Vec(0.f);
    }
  }
};

// Clamp, and zeros in the lanes that are no channels.
template <int kPixels, int kVectors>
TORCH_BLOCKED_INLINE inline void finish_sums(const DirectTiles& t,
                                             FloatSums<kPixels, kVectors>& sums) {
  if (t.activation.kind == Activation::Kind::kClamp) {
    const Vec least(t.activation.alpha), most(t.activation.beta);
    for_sums<kPixels, kVectors>([&](int i, int j) TORCH_BLOCKED_INLINE {
      sums(i, j) = at::vec::clamp(sums(i, j), least, most);
    });
  }
  // 0 weights times an infinite src is not 0.
  if (t.channels < kVectors * kWidth) {
    Vec lanes[kVectors];
    TORCH_BLOCKED_UNROLL
    for (int j = 0; j < kVectors; ++j) lanes[j] = lanes_mask(lanes_of(t, j));
    for_sums<kPixels, kVectors>([&](int i, int j)
                                    TORCH_BLOCKED_INLINE { sums(i, j) = sums(i, j) & lanes[j]; });
  }
}

template <int kStep, int kLanes, int kPixels, int kVectors>
void tiles(const DirectTiles& t, const float* src, float* dst, Walk& walk, std::int64_t count) {
  // Read once: a store may change the arguments, for all that GCC knows, and it would read and add
  // them up again for each vector.
  const std::int64_t step = step_of<kStep>(t), dst_step = t.dst_step;
  const std::array<std::int64_t, 3> offsets = t.dst_offsets;
  const Start<kVectors> start(t);
  std::int64_t stored = 0;  // pixels that wait for their activation
  for (; count > 0; --count, src += kPixels * step, dst += kPixels * dst_step) {
    const auto place = [&](auto* of, int i, int j) TORCH_BLOCKED_INLINE {
      return of + offsets[static_cast<std::size_t>(j)] + i * dst_step;
    };
    // What is stored at the end is on its way by then: [3136, 96] -> 384 otherwise waits for a
    // fifth of its time.
    if constexpr (kStep == kAnyStep) {
      for_sums<kPixels, kVectors>(
          [&](int i, int j) TORCH_BLOCKED_INLINE { __builtin_prefetch(place(dst, i, j), 1); });
    }
    FloatSums<kPixels, kVectors> sums(start.vectors);
    add_segments<kStep, kLanes>(t, src, walk, sums);
    // What the sums are added to: the residual, which may be dst itself, or the parts before this.
    const float* begun = !t.first ? dst : t.residual ? t.residual + (dst - t.dst) : nullptr;
    if (begun) {
      for_sums<kPixels, kVectors>([&](int i, int j) TORCH_BLOCKED_INLINE {
        sums(i, j) = sums(i, j) + Vec::loadu(place(begun, i, j));
      });
    }
    if constexpr (kVectors == 1) {
      if (t.first_lane > 0 || t.end_lane < kWidth) {
        const Vec lanes = lanes_mask(std::min(t.end_lane, kWidth)) ^ lanes_mask(t.first_lane);
        for_sums<kPixels, 1>([&](int i, int j) TORCH_BLOCKED_INLINE {
          sums(i, j) = Vec::blendv(Vec::loadu(place(dst, i, j)), sums(i, j), lanes);
        });
      }
    }
    if (t.last) finish_sums<kPixels, kVectors>(t, sums);
    if (t.parts > 0) {
      alignas(64) float lanes[kPixels * kVectors * kWidth];
      for_sums<kPixels, kVectors>([&](int i, int j) TORCH_BLOCKED_INLINE {
        sums(i, j).store(lanes + (i * kVectors + j) * kWidth);
      });
      store_parts(t, lanes, dst, kPixels);
      continue;
    }
    if (t.stream) {
      for_sums<kPixels, kVectors>(
          [&](int i, int j) TORCH_BLOCKED_INLINE { stream(sums(i, j), place(dst, i, j)); });
    } else {
      for_sums<kPixels, kVectors>([&](int i, int j)
                                      TORCH_BLOCKED_INLINE { sums(i, j).store(place(dst, i, j)); });
    }
    if (!t.last || in_registers(t.activation)) continue;
    if ((stored += kPixels) >= kActivatedPixels || count == 1) {
      activate_pixels(t, dst - (stored - kPixels) * dst_step, stored);
      stored = 0;
    }
  }
}

using Tiles = void (*)(const DirectTiles&, const float*, float*, Walk&, std::int64_t);
constexpr std::size_t kMostPixels = *std::ranges::max_element(kTilePixels);

template <int kStep, int kLanes, int kVectors, int... i>
constexpr std::array<Tiles, kMostPixels> tiles_of(std::integer_sequence<int, i...>) {
  return {tiles<kStep, kLanes, i + 1, kVectors>...};
}

// [vectors - 1][pixels - 1]
template <int kStep, int kLanes>
constexpr std::array<std::array<Tiles, kMostPixels>, 3> kTiles{
    tiles_of<kStep, kLanes, 1>(std::make_integer_sequence<int, kTilePixels[0]>()),
    tiles_of<kStep, kLanes, 2>(std::make_integer_sequence<int, kTilePixels[1]>()),
    tiles_of<kStep, kLanes, 3>(std::make_integer_sequence<int, kTilePixels[2]>())};

// The pixels in tiles that differ by one pixel at most, so that no small one is left over.
template <int kStep, int kLanes>
void run(const DirectTiles& t) {
  const auto vectors = static_cast<std::size_t>(t.vectors - 1);
  const std::int64_t most = kTilePixels[vectors];
  const std::int64_t count = (t.pixels + most - 1) / most;
  const std::int64_t least = t.pixels / count, larger = t.pixels % count;
  const auto& row = kTiles<kStep, kLanes>[vectors];
  Walk walk(t, count);
  if (larger > 0) row[static_cast<std::size_t>(least)](t, t.src, t.dst, walk, larger);
  const std::int64_t done = larger * (least + 1);
  row[static_cast<std::size_t>(least - 1)](t, t.src + done * step_of<kStep>(t),
                                           t.dst + done * t.dst_step, walk, count - larger);
}

// With the first of kLanes of which all segments have multiples.
template <int kStep, int kLanes, int... kOthers>
void run_unrolled(const DirectTiles& t) {
  if constexpr (sizeof...(kOthers) > 0) {
    const auto has_multiple = [](const DirectSegment& each) { return each.lanes % kLanes == 0; };
    if (!std::all_of(t.segments, t.segments + t.count, has_multiple)) {
      return run_unrolled<kStep, kOthers...>(t);
    }
  }
  run<kStep, kLanes>(t);
}

}  // namespace

extern const DirectSizes direct_sizes;
constinit const DirectSizes direct_sizes{.width = kWidth,
                                         .vectors = kBestVectors,
                                         .pixels = {kTilePixels[0], kTilePixels[1], kTilePixels[2]},
                                         .lanes = kPartLanes,
                                         .tap_lanes = kTapLanes,
                                         .band_bytes = kBandBytes};

// Unrolled where that saves instructions: blocks, those that channels fill half, and rows; the taps
// of first layers, of which planes have a segment for each row.
#if defined(CPU_CAPABILITY_AVX2)
void direct_tiles(const DirectTiles& t) { run_unrolled<kWidth, 8, 4, 1>(t); }

void direct_plane_tiles(const DirectTiles& t) { run_unrolled<1, 3, 7, 1>(t); }

void direct_row_tiles(const DirectTiles& t) { run_unrolled<kAnyStep, 8, 4, 3, 7, 1>(t); }
#else
void direct_tiles(const DirectTiles& t) { run<kWidth, 1>(t); }

void direct_plane_tiles(const DirectTiles& t) { run<1, 1>(t); }

void direct_row_tiles(const DirectTiles& t) { run<kAnyStep, 1>(t); }
#endif

}  // namespace torch_blocked::kernels::CPU_CAPABILITY
