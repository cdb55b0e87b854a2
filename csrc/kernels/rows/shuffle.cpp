// Gathers the lanes of each pixel: by permutations of whole vectors if they come from few vectors,
// else lane by lane. Only bits move. Number: float, or two bytes.
#include "kernels/rows/shuffle.h"

#include <array>

#include "kernels/vector/short_lanes.h"

namespace torch_blocked::kernels::CPU_CAPABILITY {
namespace {

Vec load_bits(const float* src) { return Vec::loadu(src); }
Vec load_bits(const std::uint16_t* src) { return load_bfloats(src); }

// The lanes of one vector of dst that lie in one vector of src.
template <typename Number>
struct Source {
  const Number* src;
  alignas(64) std::array<std::int32_t, kWidth> lanes;  // -1: not here
};

// With more vectors than this, loads of single lanes are as fast.
constexpr int kMostSources = 8;

// Finds the sources of lanes [first, first + kWidth) of dst. Stops beyond kMostSources.
template <typename Number>
int find_sources(const LaneGather& g, std::int64_t first, Source<Number>* sources) {
  int count = 0;
  for (std::int64_t lane = 0; lane < kWidth; ++lane) {
    const auto& [src, offset] = g.lanes[first + lane];
    if (src < 0) continue;
    const auto* vector = static_cast<const Number*>(g.srcs[src]) + offset / kWidth * kWidth;
    int i = 0;
    while (i < count && sources[i].src != vector) ++i;
    if (i == kMostSources) return kMostSources + 1;
    if (i == count) {
      sources[count].src = vector;
      sources[count++].lanes.fill(-1);
    }
    sources[i].lanes[static_cast<std::size_t>(lane)] = static_cast<std::int32_t>(offset % kWidth);
  }
  return count;
}

// kCount 0 takes any `count`.
template <typename Number, int kCount>
void permute_pixels(const LaneGather& g, const Source<Number>* sources, int count, Number* dst) {
  if constexpr (kCount > 0) count = kCount;
  std::int64_t at = 0;
  for (std::int64_t pixel = 0; pixel < g.pixels; ++pixel, at += g.src_stride, dst += g.dst_stride) {
    Vec value(0.f);
    for (int i = 0; i < count; ++i) {
      const Index lanes = Index::loadu(sources[i].lanes.data());
      value = permute(load_bits(sources[i].src + at), lanes, value);
    }
    store_bits(value, dst);
  }
}

template <typename Number>
constexpr std::array kPermute{permute_pixels<Number, 0>, permute_pixels<Number, 1>,
                              permute_pixels<Number, 2>, permute_pixels<Number, 3>,
                              permute_pixels<Number, 4>};

// Gathers lane by lane, from many vectors or to blocks that are not whole vectors.
template <typename Number>
void gather_pixels(const LaneGather& g, std::int64_t first, std::int64_t count) {
  for (std::int64_t pixel = 0; pixel < g.pixels; ++pixel) {
    const std::int64_t at = pixel * g.src_stride;
    Number* dst = static_cast<Number*>(g.dst) + pixel * g.dst_stride;
    for (std::int64_t lane = first; lane < first + count; ++lane) {
      const auto& [src, offset] = g.lanes[lane];
      dst[lane] = src < 0 ? Number{0} : static_cast<const Number*>(g.srcs[src])[at + offset];
    }
  }
}

template <typename Number>
void gather(const LaneGather& g) {
  if (g.block % kWidth != 0) return gather_pixels<Number>(g, 0, g.block);
  for (std::int64_t first = 0; first < g.block; first += kWidth) {
    std::array<Source<Number>, kMostSources> sources;
    const int count = find_sources(g, first, sources.data());
    if (count > kMostSources) {
      gather_pixels<Number>(g, first, kWidth);
    } else {
      const auto row = static_cast<std::size_t>(count);
      const auto& permute = kPermute<Number>[row < kPermute<Number>.size() ? row : 0];
      permute(g, sources.data(), count, static_cast<Number*>(g.dst) + first);
    }
  }
}

}  // namespace

void gather_lanes(const LaneGather& g) { gather<float>(g); }
void gather_short_lanes(const LaneGather& g) { gather<std::uint16_t>(g); }

}  // namespace torch_blocked::kernels::CPU_CAPABILITY
