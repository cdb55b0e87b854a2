// Rearranges channels: gathers any choice of them, and pixel shuffles, which move channels to and
// from the spatial dims. Elements of four or two bytes.
#include "ops/moving/shuffle.h"

#include <algorithm>
#include <vector>

#include "format/errors.h"
#include "kernels/kernels.h"
#include "ops/blocked.h"
#include "ops/registered.h"
#include "torch_blocked/threads.h"

namespace torch_blocked {
namespace {

Blocked shuffled_argument(const char* op, const at::Tensor& input, std::int64_t channels) {
  if (input.itemsize() != 4 && input.itemsize() != 2) {
    fail_not_implemented(op, "elements of 2 or 4 bytes", text(input.dtype().name()),
                         "convert it with .float()");
  }
  return blocked_argument(op, input, channels);
}

constexpr std::int64_t kMaxFactor = 1 << 15;

Blocked image_argument(const char* op, const at::Tensor& input, std::int64_t channels,
                       std::int64_t factor) {
  const Blocked src = shuffled_argument(op, input, channels);
  if (src.ndims() != 4) fail_value(op, "a tensor [N, C, H, W]", text(src.dims()), "");
  // The square of the factor is a number of channels.
  if (factor < 1 || factor > kMaxFactor) {
    fail_value(op, text("a factor of 1 to ", kMaxFactor), text(factor), "");
  }
  return src;
}

// The distance in elements from the start of an image to a channel of its first pixel.
std::int64_t channel_offset(const Blocked& src, std::int64_t channel) {
  return channel / src.block() * src.pixels() * src.block() + channel % src.block();
}

using kernels::GatheredLane;
using GatheredLanes = std::vector<GatheredLane>;
constexpr GatheredLane kZero{-1, 0};

// Elements in memory, of `size` bytes.
struct Elements {
  char* data;
  std::int64_t size;

  explicit Elements(const Blocked& of)
      : data(static_cast<char*>(const_cast<void*>(of.physical.const_data_ptr()))),
        size(static_cast<std::int64_t>(of.physical.itemsize())) {}

  char* at(std::int64_t element) const { return data + element * size; }
};

// The kernel for elements of `size` bytes in blocks of that size.
auto gather_kernel(std::int64_t size, std::int64_t block) {
  const kernels::Kernels& table = kernels::kernels_for(block);
  return size == 2 ? table.gather_short_lanes : table.gather_lanes;
}

}  // namespace

ChannelGather::ChannelGather(const std::vector<ChannelOf>& channels,
                             const std::vector<std::int64_t>& src_channels, std::int64_t batch,
                             std::int64_t pixels, std::int64_t block, std::int64_t element_bytes)
    : batch_(batch), block_(block), pixels_(pixels), element_(element_bytes) {
  for (const std::int64_t count : src_channels) {
    src_images_.push_back(ceil_div(count, block) * pixels * block);
  }
  lanes_.resize(static_cast<std::size_t>(ceil_div(std::ssize(channels), block) * block), kZero);
  for (std::size_t i = 0; i < channels.size(); ++i) {
    const auto& [src, channel] = channels[i];
    lanes_[i] = {src, channel / block * pixels * block + channel % block};
  }
}

void ChannelGather::run(const std::vector<const void*>& srcs, void* dst,
                        std::int64_t first_block) const {
  // A thread takes pixels with all of their blocks, like the layers before and after. If threads
  // shared blocks, one block would leave a thread without work, and three would give it twice the
  // work.
  constexpr std::int64_t kStrip = 512;
  const auto kernel = gather_kernel(element_, block_);
  const auto moved = [size = element_](const void* data, std::int64_t elements) {
    return static_cast<const char*>(data) + elements * size;
  };
  const std::int64_t all = std::ssize(lanes_) / block_, blocks = all - first_block;
  const std::int64_t strips = std::max<std::int64_t>(ceil_div(pixels_, kStrip), 1),
                     strip = ceil_div(pixels_, strips);
  parallel_units(
      batch_ * strips * blocks, strip * block_, [&](std::int64_t begin, std::int64_t end) {
        std::vector<const void*> places(srcs);
        for (std::int64_t unit = begin; unit < end; ++unit) {
          const std::int64_t block = first_block + unit % blocks, image = unit / blocks / strips;
          const std::int64_t pixel = unit / blocks % strips * strip;
          for (std::size_t i = 0; i < srcs.size(); ++i) {
            places[i] = moved(srcs[i], image * src_images_[i] + pixel * block_);
          }
          const void* to = moved(dst, ((image * all + block) * pixels_ + pixel) * block_);
          kernel({places.data(), lanes_.data() + block * block_, const_cast<void*>(to), block_,
                  std::min(strip, pixels_ - pixel), block_, block_});
        }
      });
}

at::Tensor gathered(const std::vector<Blocked>& srcs, const std::vector<ChannelOf>& channels) {
  const Blocked& first = srcs[0];
  Dims dims = first.dims();
  dims[1] = std::ssize(channels);
  const Blocked dst = empty_blocked(dims, first.block(), first.physical.options());
  if (dst.physical.numel() == 0) return dst.physical;
  std::vector<std::int64_t> counts;
  std::vector<const void*> places;
  for (const Blocked& src : srcs) {
    counts.push_back(src.channels);
    places.push_back(src.physical.const_data_ptr());
  }
  const Elements to(dst);
  ChannelGather(channels, counts, dst.batch(), dst.pixels(), dst.block(), to.size)
      .run(places, to.data);
  return dst.physical;
}

at::Tensor gather_channels(const at::Tensor& input, std::int64_t channels, at::IntArrayRef index) {
  const Blocked src = shuffled_argument("gather_channels", input, channels);
  std::vector<ChannelOf> from;
  for (const std::int64_t channel : index) {
    if (channel < -1 || channel >= channels) {
      fail_value("gather_channels", text("channels of ", channels, ", or -1 for zeros"),
                 text(channel), "");
    }
    from.push_back(channel < 0 ? ChannelOf{-1, 0} : ChannelOf{0, channel});
  }
  return gathered({src}, from);
}

at::Tensor pixel_shuffle(const at::Tensor& input, std::int64_t channels, std::int64_t factor) {
  const Blocked src = image_argument("pixel_shuffle", input, channels, factor);
  const std::int64_t r = factor, block = src.block();
  if (channels % (r * r) != 0) {
    fail_value("pixel_shuffle", text("channels in multiples of ", r * r), text(channels), "");
  }
  const std::int64_t height = src.physical.size(2), width = src.physical.size(3);
  const Blocked dst = empty_blocked({src.batch(), channels / (r * r), height * r, width * r}, block,
                                    input.options());
  if (dst.physical.numel() == 0) return dst.physical;
  // dst[c, h * r + i, w * r + j] = src[c * r * r + i * r + j, h, w]: [blocks, r, r, block]
  GatheredLanes lanes(static_cast<std::size_t>(dst.blocks() * r * r * block), kZero);
  for (std::int64_t c = 0; c < dst.channels; ++c) {
    for (std::int64_t ij = 0; ij < r * r; ++ij) {
      lanes[static_cast<std::size_t>((c / block * r * r + ij) * block + c % block)] = {
          0, channel_offset(src, c * r * r + ij)};
    }
  }
  const Elements in(src), out(dst);
  const auto kernel = gather_kernel(in.size, block);
  const std::int64_t rows = height * r, src_image = src.blocks() * src.pixels() * block;
  const auto run = [&](std::int64_t unit) {  // one row of dst
    const std::int64_t y = unit % rows, dst_block = unit / rows % dst.blocks();
    const void* src_row = in.at(unit / rows / dst.blocks() * src_image + y / r * width * block);
    for (std::int64_t j = 0; j < r; ++j) {
      const std::int64_t table = (dst_block * r + y % r) * r + j;
      kernel({&src_row, lanes.data() + table * block, out.at((unit * width * r + j) * block), block,
              width, block, r * block});
    }
  };
  parallel_units(dst.batch() * dst.blocks() * rows, width * r * block,
                 [&](std::int64_t begin, std::int64_t end) {
                   for (std::int64_t unit = begin; unit < end; ++unit) run(unit);
                 });
  return dst.physical;
}

at::Tensor pixel_unshuffle(const at::Tensor& input, std::int64_t channels, std::int64_t factor) {
  const Blocked src = image_argument("pixel_unshuffle", input, channels, factor);
  const std::int64_t r = factor, block = src.block();
  const std::int64_t height = src.physical.size(2) / r, width = src.physical.size(3) / r;
  if (src.physical.size(2) % r != 0 || src.physical.size(3) % r != 0) {
    fail_value("pixel_unshuffle", text("height and width in multiples of ", r), text(src.dims()),
               "");
  }
  const Blocked dst =
      empty_blocked({src.batch(), channels * r * r, height, width}, block, input.options());
  if (dst.physical.numel() == 0) return dst.physical;
  // dst[c * r * r + i * r + j, h, w] = src[c, h * r + i, w * r + j]: [blocks, block]
  GatheredLanes lanes(static_cast<std::size_t>(dst.blocks() * block), kZero);
  for (std::int64_t c = 0; c < dst.channels; ++c) {
    const std::int64_t i = c / r % r, j = c % r;
    lanes[static_cast<std::size_t>(c)] = {
        0, channel_offset(src, c / (r * r)) + (i * width * r + j) * block};
  }
  const Elements in(src), out(dst);
  const auto kernel = gather_kernel(in.size, block);
  const std::int64_t src_image = src.blocks() * src.pixels() * block;
  parallel_units(dst.batch() * dst.blocks() * height, width * block,
                 [&](std::int64_t begin, std::int64_t end) {
                   for (std::int64_t unit = begin; unit < end; ++unit) {
                     const std::int64_t y = unit % height, dst_block = unit / height % dst.blocks();
                     const void* src_row = in.at(unit / height / dst.blocks() * src_image +
                                                 y * r * width * r * block);
                     kernel({&src_row, lanes.data() + dst_block * block,
                             out.at(unit * width * block), block, width, r * block, block});
                   }
                 });
  return dst.physical;
}

}  // namespace torch_blocked
