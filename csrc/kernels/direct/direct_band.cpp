// Copies the src of a direct convolution to slots, padded and in the order in which it is read.
#include <algorithm>
#include <cstring>

#include "format/sizes.h"
#include "kernels/direct/direct.h"
#include "kernels/vector/lanes.h"

namespace torch_blocked::kernels::CPU_CAPABILITY {
namespace {

// Fills one run of one row: copy(i, position) for slots whose position is inside src, zeros for the
// others. A slot has kStep floats in each of kPlanes planes.
template <std::int64_t kStep, int kPlanes, typename Copy>
inline void fill_run(const DirectBand& band, const DirectRun& run, float* slots,
                     std::int64_t plane_size, Copy&& copy) {
  const std::int64_t stride = band.w_stride;
  const std::int64_t begin = std::clamp<std::int64_t>(
      ceil_div(std::max<std::int64_t>(-run.first, 0), stride), 0, run.count);
  const std::int64_t inside = std::max<std::int64_t>(band.in[2] - run.first, 0);
  const std::int64_t end = std::clamp(ceil_div(inside, stride), begin, run.count);
  const auto zero = [&](std::int64_t first, std::int64_t last) {
    for (int plane = 0; plane < kPlanes; ++plane) {
      std::memset(slots + plane * plane_size + first * kStep, 0,
                  sizeof(float) * static_cast<std::size_t>((last - first) * kStep));
    }
  };
  zero(0, begin);
  for (std::int64_t i = begin; i < end; ++i) copy(slots + i * kStep, run.first + i * stride);
  zero(end, run.count);
}

// Fills all rows of slots of one vector or one channel. row(offset of the src row, to) fills one
// row.
template <std::int64_t kStep, typename Row>
inline void fill_rows(const DirectBand& band, float*& to, Row&& row) {
  const std::int64_t size = band.w_slots * kStep;
  for (std::int64_t d = 0; d < band.d_slots; ++d) {
    for (std::int64_t h = 0; h < band.h_slots; ++h, to += size) {
      const std::int64_t id = band.d[d], ih = band.h[h];
      if (id < 0 || id >= band.in[0] || ih < 0 || ih >= band.in[1]) continue;  // nobody reads it
      row((id * band.in[1] + ih) * band.in[2] * band.block, to);
    }
  }
}

template <std::int64_t kStep, int kPlanes = 1, typename Copy>
inline void fill_runs(const DirectBand& band, float* to, std::int64_t plane_size, Copy&& copy) {
  for (std::int64_t i = 0; i < band.run_count; ++i) {
    const DirectRun& run = band.runs[i];
    fill_run<kStep, kPlanes>(band, run, to + run.slot * kStep, plane_size, copy);
  }
}

}  // namespace

void direct_band(const DirectBand& band) {
  float* to = band.slots;
  for (std::int64_t channel = 0; channel < band.channels; channel += kWidth) {
    const float* first = band.src + channel / band.block * band.block_stride + channel % band.block;
    fill_rows<kWidth>(band, to, [&](std::int64_t offset, float* slots) {
      const float* row = first + offset;
      if (band.block < kWidth) {
        fill_runs<kWidth>(band, slots, 0, [&](float* slot, std::int64_t position) {
          const std::int64_t lanes = std::min(kWidth, band.channels - channel);
          for (std::int64_t lane = 0; lane < lanes; ++lane) {
            slot[lane] = row[lane / band.block * band.block_stride + position * band.block +
                             lane % band.block];
          }
        });
      } else if (band.block % kWidth != 0 && band.channels - channel < kWidth) {
        const std::int64_t lanes = band.channels - channel;
        fill_runs<kWidth>(band, slots, 0, [&](float* slot, std::int64_t position) {
          Vec::loadu(row + position * band.block, lanes).store(slot);
        });
      } else {
        fill_runs<kWidth>(band, slots, 0, [&](float* slot, std::int64_t position) {
          const float* pixel = row + position * band.block;
          __builtin_prefetch(pixel + band.block_stride);
          Vec::loadu(pixel).store(slot);
        });
      }
    });
  }
}

namespace {

// Fills the planes of kLanes channels of one block from `channel` on. Each pixel is read once.
template <int kLanes>
void fill_planes(const DirectBand& band, std::int64_t channel) {
  const std::int64_t size = band.d_slots * band.h_slots * band.w_slots;
  const float* first = band.src + channel / band.block * band.block_stride + channel % band.block;
  float* to = band.slots + channel * size;
  fill_rows<1>(band, to, [&](std::int64_t offset, float* slots) {
    const float* row = first + offset;
    fill_runs<1, kLanes>(band, slots, size, [&](float* slot, std::int64_t position) {
      const float* pixel = row + position * band.block;
      __builtin_prefetch(pixel + 16 * band.block);
      for (int lane = 0; lane < kLanes; ++lane) slot[lane * size] = pixel[lane];
    });
  });
}

}  // namespace

void direct_plane_band(const DirectBand& band) {
  std::int64_t channel = 0;
  if (band.block > 1) {
    for (; channel + 3 <= band.channels && channel % band.block + 3 <= band.block; channel += 3) {
      fill_planes<3>(band, channel);
    }
  }
  for (; channel < band.channels; ++channel) fill_planes<1>(band, channel);
}

}  // namespace torch_blocked::kernels::CPU_CAPABILITY
