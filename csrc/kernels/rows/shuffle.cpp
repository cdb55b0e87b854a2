// Gathers the lanes of each pixel: by permutations of whole vectors if they come from few vectors,
// else lane by lane.
#include "kernels/rows/shuffle.h"

#include <array>

#include "kernels/vector/lanes.h"

namespace torch_blocked::kernels::CPU_CAPABILITY {
namespace {

// The lanes of one vector of dst that lie in one vector of src.
struct Source {
  const float* src;
  alignas(64) std::array<std::int32_t, kWidth> lanes;  // -1: not here
};

// With more vectors than this, loads of single lanes are as fast.
constexpr int kMostSources = 8;

// Finds the sources of lanes [first, first + kWidth) of dst. Stops beyond kMostSources.
int find_sources(const LaneGather& g, std::int64_t first, Source* sources) {
  int count = 0;
  for (std::int64_t lane = 0; lane < kWidth; ++lane) {
    const auto& [src, offset] = g.lanes[first + lane];
    if (src < 0) continue;
    const float* vector = g.srcs[src] + offset / kWidth * kWidth;
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
template <int kCount>
void permute_pixels(const LaneGather& g, const Source* sources, int count, float* dst) {
  if constexpr (kCount > 0) count = kCount;
  std::int64_t at = 0;
  for (std::int64_t pixel = 0; pixel < g.pixels; ++pixel, at += g.src_stride, dst += g.dst_stride) {
    Vec value(0.f);
    for (int i = 0; i < count; ++i) {
      const Index lanes = Index::loadu(sources[i].lanes.data());
      value = permute(Vec::loadu(sources[i].src + at), lanes, value);
    }
    value.store(dst);
  }
}

constexpr std::array kPermute{permute_pixels<0>, permute_pixels<1>, permute_pixels<2>,
                              permute_pixels<3>, permute_pixels<4>};

// Gathers lane by lane, from many vectors or to blocks that are not whole vectors.
void gather_pixels(const LaneGather& g, std::int64_t first, std::int64_t count) {
  for (std::int64_t pixel = 0; pixel < g.pixels; ++pixel) {
    const std::int64_t at = pixel * g.src_stride;
    float* dst = g.dst + pixel * g.dst_stride;
    for (std::int64_t lane = first; lane < first + count; ++lane) {
      const auto& [src, offset] = g.lanes[lane];
      dst[lane] = src < 0 ? 0.f : g.srcs[src][at + offset];
    }
  }
}

}  // namespace

void gather_lanes(const LaneGather& g) {
  if (g.block % kWidth != 0) return gather_pixels(g, 0, g.block);
  for (std::int64_t first = 0; first < g.block; first += kWidth) {
    std::array<Source, kMostSources> sources;
    const int count = find_sources(g, first, sources.data());
    if (count > kMostSources) {
      gather_pixels(g, first, kWidth);
    } else {
      const auto row = static_cast<std::size_t>(count);
      kPermute[row < kPermute.size() ? row : 0](g, sources.data(), count, g.dst + first);
    }
  }
}

}  // namespace torch_blocked::kernels::CPU_CAPABILITY
