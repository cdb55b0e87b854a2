// Direct convolution as a matrix product: [pixels, lanes] x [lanes, output channels], where the
// lanes of a pixel are all src values under the kernel.
//
// A register tile has kPixels x kVectors sums. Each lane costs kVectors loads of weights and
// kPixels broadcasts for kPixels * kVectors FMAs. A Zen 4 then runs at 95 to 99 % of its FMA peak.
#include "kernels/direct/direct.h"

#include <algorithm>
#include <array>
#include <utility>

#include "format/sizes.h"
#include "kernels/vector/finish.h"
#include "kernels/vector/register_tile.h"

namespace torch_blocked::kernels::CPU_CAPABILITY {
namespace {

// The most pixels of a tile with 1, 2 and 3 vectors: sums, weights and one broadcast fill 32 or 16
// registers. More than 14 single vectors would gain nothing, because each needs its own broadcast.
//
// The lanes of one part. Its weights serve all pixels and take 128 or 36 KB, which L2 holds. Each
// part reads and writes all sums once. On a Zen 3 this costs 1x1 layers more than weights that are
// not in L1. The taps of a kernel share their src, and 24 KB in L1 are as good as more, or better
// if weights come from memory.
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

// Calls f(pixel, vector) for all sums of a tile.
template <int kPixels, int kVectors, typename F>
TORCH_BLOCKED_INLINE inline void for_sums(F&& f) {
  TORCH_BLOCKED_UNROLL
  for (int i = 0; i < kPixels * kVectors; ++i) f(i / kVectors, i % kVectors);
}

// Whether the activation is cheap enough to be compiled into every instance of tiles(), which
// applies it to sums in registers. activate_pixels() does the others.
bool in_registers(const Activation& activation) {
  return activation.kind == Activation::Kind::kNone || activation.kind == Activation::Kind::kClamp;
}

// The lanes of vector j that are channels.
inline std::int64_t lanes_of(const DirectTiles& t, std::int64_t j) {
  return std::clamp<std::int64_t>(t.channels - j * kWidth, 0, kWidth);
}

// Applies the activation to tiles whose sums are stored and still in L1.
[[gnu::noinline]] void activate_pixels(const DirectTiles& t, float* dst, std::int64_t pixels) {
  with_function(t.activation, [&t, dst, pixels](const auto& function) {
    const std::int64_t step = t.dst_step, vectors = t.vectors;
    for (std::int64_t j = 0; j < vectors; ++j) {
      float* to = dst + t.dst_offsets[static_cast<std::size_t>(j)];
      for (std::int64_t i = 0; i < pixels; ++i, to += step) function(Vec::loadu(to)).store(to);
    }
  });
}

// Stores sums to blocks narrower than a vector.
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

// Floats from one pixel to the next: kStep, or the arguments' step if kStep is kAnyStep.
constexpr int kAnyStep = 0;

constexpr int kLine = 16;  // floats of a cache line

// The pixels, of one or more tiles, to which one loop applies the activation. On a Zen 3 SiLU takes
// 10 cycles a vector for a single tile of 12 vectors, and 6 in a long loop.
constexpr std::int64_t kActivatedPixels = 32;

template <int kStep>
TORCH_BLOCKED_INLINE inline std::int64_t step_of(const DirectTiles& t) {
  return kStep == kAnyStep ? t.src_step : kStep;
}

// The rows of several lanes at a step that is only known at run time. GCC would compute the 32
// addresses of rows and lanes before the loops, keep them in memory, and read one for each number.
// So we hide from it that these lanes share bases and step with others.
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
  // Rows of a base: an address can have the step zero times, once and twice.
  static constexpr int kRows = 3, kBases = ceil_div(kPixels, kRows);
  const float* bases_[kBases];
  std::int64_t step_;
};

// State that the tiles of a call share as they go through its segments.
struct Walk {
  // The next weights. Each tile prefetches a share of them, some floats with each lane. If only
  // the first tiles prefetched, they would wait for memory, which would then idle: 512@7 3x3 with
  // weights from memory takes 2.87 ms on a Zen 3, and would take 3.13.
  const float *ahead, *end;
  std::int64_t step = 0;  // for each lane

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

// sums += [kPixels, lanes of all segments] x weights, kLanes at a time. Each segment has a multiple
// of kLanes.
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
    // Prefetches pixels of the next segment. It is a channel block away, which the hardware
    // prefetcher does not reach. Without this AVX2 loses up to 15 %.
    const float* next = first + segment[1].offset;
    // With blocks a segment has exactly kLanes lanes.
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

// The start of a call's sums: the bias, or zeros.
template <int kVectors>
struct Start {
  Vec vectors[kVectors];

  explicit Start(const DirectTiles& t) {
    for (int j = 0; j < kVectors; ++j) {
      vectors[j] = t.first && t.bias ? Vec::loadu(t.bias + j * kWidth, lanes_of(t, j)) : Vec(0.f);
    }
  }
};

// Applies a clamp, and zeroes the lanes beyond the channels.
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
  // Copies, because GCC assumes that a store may change the arguments, and would read and add
  // them again for each vector.
  const std::int64_t step = step_of<kStep>(t), dst_step = t.dst_step;
  const std::array<std::int64_t, 3> offsets = t.dst_offsets;
  const Start<kVectors> start(t);
  std::int64_t stored = 0;  // pixels that wait for their activation
  for (; count > 0; --count, src += kPixels * step, dst += kPixels * dst_step) {
    const auto place = [&](auto* of, int i, int j) TORCH_BLOCKED_INLINE {
      return of + offsets[static_cast<std::size_t>(j)] + i * dst_step;
    };
    // Prefetches the lines that are stored at the end. Without this [3136, 96] -> 384 waits for
    // a fifth of its time.
    if constexpr (kStep == kAnyStep) {
      for_sums<kPixels, kVectors>(
          [&](int i, int j) TORCH_BLOCKED_INLINE { __builtin_prefetch(place(dst, i, j), 1); });
    }
    FloatSums<kPixels, kVectors> sums(start.vectors);
    add_segments<kStep, kLanes>(t, src, walk, sums);
    // The sums are added to the parts before this one, or to the residual, which may be dst
    // itself.
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

// Runs the pixels in tiles that differ by at most one pixel, so that no small tile is left over.
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

// Runs with the first of kLanes and kOthers that divides all segments.
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

// Unrolled where that saves instructions: for blocks, also half-filled ones, for rows, and for the
// taps of first layers, whose planes have a segment for each row.
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
