// Channels in another order: any choice of them, and pixel shuffles, which move them to and from
// the spatial dims. 4-byte elements.
#include <ATen/core/LegacyTypeDispatch.h>

#include <algorithm>
#include <vector>

#include "format/errors.h"
#include "kernels/kernels.h"
#include "ops/blocked.h"
#include "ops/registered.h"
#include "runtime/threads.h"

namespace torch_blocked {
namespace {

Blocked shuffled_argument(const char* op, const at::Tensor& input, std::int64_t channels) {
  if (input.itemsize() != sizeof(float)) {
    fail_not_implemented(op, "4-byte elements", text(input.dtype().name()),
                         "convert it with .float()");
  }
  return blocked_argument(op, input, channels);
}

constexpr std::int64_t kMaxFactor = 1 << 15;

Blocked image_argument(const char* op, const at::Tensor& input, std::int64_t channels,
                       std::int64_t factor) {
  const Blocked src = shuffled_argument(op, input, channels);
  if (src.ndims() != 4) fail_value(op, "a tensor [N, C, H, W]", text(src.dims()), "");
  // Its square is a count of channels.
  if (factor < 1 || factor > kMaxFactor) {
    fail_value(op, text("a factor of 1 to ", kMaxFactor), text(factor), "");
  }
  return src;
}

// Elements from the first of an image to that of a channel in its first pixel.
std::int64_t channel_offset(const Blocked& src, std::int64_t channel) {
  return channel / src.block() * src.pixels() * src.block() + channel % src.block();
}

using Offsets = std::vector<std::int64_t>;

const float* data(const Blocked& src) {
  return static_cast<const float*>(src.physical.const_data_ptr());
}

float* mutable_data(const Blocked& dst) {
  return static_cast<float*>(dst.physical.mutable_data_ptr());
}

// Whether offsets are those of a whole block, in its order: a copy then.
bool is_block(const std::int64_t* offsets, std::int64_t block) {
  if (offsets[0] < 0 || offsets[0] % block != 0) return false;
  for (std::int64_t lane = 1; lane < block; ++lane) {
    if (offsets[lane] != offsets[0] + lane) return false;
  }
  return true;
}

}  // namespace

at::Tensor gather_channels(const at::Tensor& input, std::int64_t channels, at::IntArrayRef index) {
  at::AutoDispatchBelowADInplaceOrView below_autograd;
  const Blocked src = shuffled_argument("gather_channels", input, channels);
  const std::int64_t block = src.block(), pixels = src.pixels();
  Dims dims = src.dims();
  dims[1] = static_cast<std::int64_t>(index.size());
  const Blocked dst = empty_blocked(dims, block, input.options());
  Offsets offsets(static_cast<std::size_t>(dst.blocks() * block), -1);
  for (std::size_t i = 0; i < index.size(); ++i) {
    if (index[i] < -1 || index[i] >= channels) {
      fail_value("gather_channels", text("channels of ", channels, ", or -1 for zeros"),
                 text(index[i]), "");
    }
    if (index[i] >= 0) offsets[i] = channel_offset(src, index[i]);
  }
  const float* in = data(src);
  float* out = mutable_data(dst);
  const auto kernel = kernels::kernels_for(block).gather_lanes;
  const std::int64_t row = pixels * block, src_image = src.blocks() * row;
  parallel_units(dst.batch() * dst.blocks(), row, [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t unit = begin; unit < end; ++unit) {
      const float* image = in + unit / dst.blocks() * src_image;
      const std::int64_t* lanes = offsets.data() + unit % dst.blocks() * block;
      if (is_block(lanes, block)) {
        std::copy_n(image + lanes[0], row, out + unit * row);
      } else {
        kernel({image, lanes, out + unit * row, block, pixels, block, block});
      }
    }
  });
  return dst.physical;
}

at::Tensor pixel_shuffle(const at::Tensor& input, std::int64_t channels, std::int64_t factor) {
  at::AutoDispatchBelowADInplaceOrView below_autograd;
  const Blocked src = image_argument("pixel_shuffle", input, channels, factor);
  const std::int64_t r = factor, block = src.block();
  if (channels % (r * r) != 0) {
    fail_value("pixel_shuffle", text("channels in multiples of ", r * r), text(channels), "");
  }
  const std::int64_t height = src.physical.size(2), width = src.physical.size(3);
  const Blocked dst = empty_blocked({src.batch(), channels / (r * r), height * r, width * r}, block,
                                    input.options());
  // dst[c, h * r + i, w * r + j] = src[c * r * r + i * r + j, h, w]: [blocks, r, r, block]
  Offsets offsets(static_cast<std::size_t>(dst.blocks() * r * r * block), -1);
  for (std::int64_t c = 0; c < dst.channels; ++c) {
    for (std::int64_t ij = 0; ij < r * r; ++ij) {
      offsets[static_cast<std::size_t>((c / block * r * r + ij) * block + c % block)] =
          channel_offset(src, c * r * r + ij);
    }
  }
  const float* in = data(src);
  float* out = mutable_data(dst);
  const auto kernel = kernels::kernels_for(block).gather_lanes;
  const std::int64_t rows = height * r, src_image = src.blocks() * src.pixels() * block;
  const auto run = [&](std::int64_t unit) {  // one row of dst
    const std::int64_t y = unit % rows, dst_block = unit / rows % dst.blocks();
    const float* src_row = in + unit / rows / dst.blocks() * src_image + y / r * width * block;
    float* dst_row = out + unit * width * r * block;
    for (std::int64_t j = 0; j < r; ++j) {
      const std::int64_t table = (dst_block * r + y % r) * r + j;
      kernel({src_row, offsets.data() + table * block, dst_row + j * block, block, width, block,
              r * block});
    }
  };
  parallel_units(dst.batch() * dst.blocks() * rows, width * r * block,
                 [&](std::int64_t begin, std::int64_t end) {
                   for (std::int64_t unit = begin; unit < end; ++unit) run(unit);
                 });
  return dst.physical;
}

at::Tensor pixel_unshuffle(const at::Tensor& input, std::int64_t channels, std::int64_t factor) {
  at::AutoDispatchBelowADInplaceOrView below_autograd;
  const Blocked src = image_argument("pixel_unshuffle", input, channels, factor);
  const std::int64_t r = factor, block = src.block();
  const std::int64_t height = src.physical.size(2) / r, width = src.physical.size(3) / r;
  if (src.physical.size(2) % r != 0 || src.physical.size(3) % r != 0) {
    fail_value("pixel_unshuffle", text("height and width in multiples of ", r), text(src.dims()),
               "");
  }
  const Blocked dst =
      empty_blocked({src.batch(), channels * r * r, height, width}, block, input.options());
  // dst[c * r * r + i * r + j, h, w] = src[c, h * r + i, w * r + j]: [blocks, block]
  Offsets offsets(static_cast<std::size_t>(dst.blocks() * block), -1);
  for (std::int64_t c = 0; c < dst.channels; ++c) {
    const std::int64_t i = c / r % r, j = c % r;
    offsets[static_cast<std::size_t>(c)] =
        channel_offset(src, c / (r * r)) + (i * width * r + j) * block;
  }
  const float* in = data(src);
  float* out = mutable_data(dst);
  const auto kernel = kernels::kernels_for(block).gather_lanes;
  const std::int64_t src_image = src.blocks() * src.pixels() * block;
  parallel_units(dst.batch() * dst.blocks() * height, width * block,
                 [&](std::int64_t begin, std::int64_t end) {
                   for (std::int64_t unit = begin; unit < end; ++unit) {
                     const std::int64_t y = unit % height, dst_block = unit / height % dst.blocks();
                     const float* image = in + unit / height / dst.blocks() * src_image;
                     kernel({image + y * r * width * r * block, offsets.data() + dst_block * block,
                             out + unit * width * block, block, width, r * block, block});
                   }
                 });
  return dst.physical;
}

}  // namespace torch_blocked
