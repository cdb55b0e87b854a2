#include "kernels/entries.h"
#include "kernels/lanes.h"

namespace torch_blocked::kernels::CPU_CAPABILITY {
namespace {

// A block of known width, so that the loop over the lanes unrolls: half the time of a plain loop.
template <std::int64_t block>
void gather(const LaneGather& g) {
  std::int64_t offsets[block];
  for (std::int64_t lane = 0; lane < block; ++lane) offsets[lane] = g.offsets[lane];
  const float* src = g.src;
  float* dst = g.dst;
  for (std::int64_t pixel = 0; pixel < g.pixels; ++pixel) {
    float values[block];
    for (std::int64_t lane = 0; lane < block; ++lane) values[lane] = src[offsets[lane]];
    for (std::int64_t lane = 0; lane < block; ++lane) dst[lane] = values[lane];
    src += g.src_stride, dst += g.dst_stride;
  }
}

void gather_some(const LaneGather& g) {
  for (std::int64_t pixel = 0; pixel < g.pixels; ++pixel) {
    const float* src = g.src + pixel * g.src_stride;
    float* dst = g.dst + pixel * g.dst_stride;
    for (std::int64_t lane = 0; lane < g.block; ++lane) {
      dst[lane] = g.offsets[lane] < 0 ? 0.f : src[g.offsets[lane]];
    }
  }
}

}  // namespace

void gather_lanes(const LaneGather& g) {
  bool all = true;
  for (std::int64_t lane = 0; lane < g.block; ++lane) all = all && g.offsets[lane] >= 0;
  if (all && g.block == 16) return gather<16>(g);
  if (all && g.block == 8) return gather<8>(g);
  gather_some(g);
}

}  // namespace torch_blocked::kernels::CPU_CAPABILITY
