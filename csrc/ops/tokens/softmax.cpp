// Computes softmax and its logarithm over any dim, and the sum and the index of the greatest or
// least value over the channels of every pixel. float32.
#include "kernels/rows/softmax.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>
#include <c10/util/accumulate.h>

#include <algorithm>

#include "format/errors.h"
#include "kernels/kernels.h"
#include "ops/blocked.h"
#include "ops/registered.h"
#include "torch_blocked/threads.h"

namespace torch_blocked {
namespace {

// The images and rows that a reduction over `dim` goes through. Over C they are those of the
// physical tensor. For another dim the physical tensor is seen as [before, size of the dim, after].
struct Walk {
  std::int64_t images;
  kernels::ChannelRows rows;

  Walk(const Blocked& src, std::int64_t dim) {
    const std::int64_t block = src.block();
    if (dim == 1) {
      images = src.batch();
      rows = {src.channels, block, src.pixels(), true};
      return;
    }
    const at::IntArrayRef sizes = src.physical.sizes();
    const auto product = [&](std::int64_t from, std::int64_t to) {
      return c10::multiply_integers(sizes.begin() + from, sizes.begin() + to);
    };
    images = product(0, dim);
    rows = {sizes[static_cast<std::size_t>(dim)] * block, block, product(dim + 1, src.ndims()),
            false};
  }

  std::int64_t image_size() const {
    return (rows.channels + rows.block - 1) / rows.block * rows.pixels * rows.block;
  }
};

// Calls f(image, its first element, pixels [first, last)) for all pixels of all images.
template <typename F>
void for_images(const Walk& walk, F&& f) {
  const std::int64_t pixels = walk.rows.pixels;
  const auto run = [&](std::int64_t begin, std::int64_t end) {
    while (begin < end) {
      const std::int64_t image = begin / pixels, first = begin % pixels;
      const std::int64_t last = std::min(pixels, first + end - begin);
      f(image, image * walk.image_size(), first, last);
      begin += last - first;
    }
  };
  parallel_units(walk.images * pixels, walk.rows.channels, run);
}

void check_dim(const char* op, const Blocked& src, std::int64_t dim) {
  if (dim < 0 || dim >= src.ndims()) {
    fail_value(op, text("a dim below ", src.ndims()), text(dim), "");
  }
}

// [N, *spatial].
Dims pixel_dims(const Blocked& src) {
  Dims dims = src.dims();
  dims.erase(dims.begin() + 1);
  return dims;
}

void clear_tail_of(const Blocked& dst) {
  if (dst.tail()) {
    dst.physical.select(1, -1).narrow(-1, dst.tail(), dst.block() - dst.tail()).zero_();
  }
}

}  // namespace

at::Tensor softmax(const at::Tensor& input, std::int64_t channels, std::int64_t dim, bool log) {
  const Blocked src = float_argument("softmax", input, channels);
  check_dim("softmax", src, dim);
  const Blocked dst = empty_blocked(src.dims(), src.block(), input.options());
  if (dst.physical.numel() == 0) return dst.physical;
  const auto& table = kernels::kernels_for(src.block());
  const auto kernel = log ? table.log_softmax : table.softmax;
  const auto* in = src.physical.const_data_ptr<float>();
  auto* out = dst.physical.mutable_data_ptr<float>();
  const Walk walk(src, dim);
  for_images(walk, [&](std::int64_t, std::int64_t at, std::int64_t first, std::int64_t last) {
    kernel(walk.rows, in + at, out + at, first, last);
  });
  if (dim != 1) clear_tail_of(dst);  // the softmax of the tail's zeros is not 0
  return dst.physical;
}

at::Tensor softmax_backward(const at::Tensor& grad_output, const at::Tensor& output,
                            std::int64_t channels, std::int64_t dim, bool log) {
  constexpr const char* kOp = "softmax_backward";
  const Blocked dst = float_argument(kOp, output, channels);
  const Blocked diff_dst = float_argument(kOp, grad_output, channels);
  check_dim(kOp, dst, dim);
  if (grad_output.sizes() != output.sizes()) {
    fail_value(kOp, text("a gradient of shape ", output.sizes()), text(grad_output.sizes()), "");
  }
  const Blocked diff_src = empty_blocked(dst.dims(), dst.block(), output.options());
  if (diff_src.physical.numel() == 0) return diff_src.physical;
  const auto& table = kernels::kernels_for(dst.block());
  const auto kernel = log ? table.log_softmax_gradient : table.softmax_gradient;
  const auto *diff = diff_dst.physical.const_data_ptr<float>(),
             *values = dst.physical.const_data_ptr<float>();
  auto* out = diff_src.physical.mutable_data_ptr<float>();
  const Walk walk(dst, dim);
  for_images(walk, [&](std::int64_t, std::int64_t at, std::int64_t first, std::int64_t last) {
    kernel(walk.rows, diff + at, values + at, out + at, first, last);
  });
  return diff_src.physical;  // the gradient's tail is zero, and so is its product with dst
}

at::Tensor sum_channels(const at::Tensor& input, std::int64_t channels) {
  const Blocked src = float_argument("sum_channels", input, channels);
  if (src.physical.numel() == 0) return at::zeros(pixel_dims(src), input.options());
  const at::Tensor sums = at::empty(pixel_dims(src), input.options());
  const auto kernel = kernels::kernels_for(src.block()).channel_sum;
  const auto* in = src.physical.const_data_ptr<float>();
  auto* out = sums.mutable_data_ptr<float>();
  const Walk walk(src, 1);
  for_images(walk, [&](std::int64_t image, std::int64_t at, std::int64_t first, std::int64_t last) {
    kernel(walk.rows, in + at, out + image * walk.rows.pixels, first, last);
  });
  return sums;
}

at::Tensor argmax_channels(const at::Tensor& input, std::int64_t channels, bool least) {
  const Blocked src = float_argument("argmax_channels", input, channels);
  if (channels < 1 || channels > (1 << 24)) {
    fail_not_implemented("argmax_channels", "1 to 2^24 channels", text(channels), "");
  }
  const at::Tensor indices = at::empty(pixel_dims(src), input.options().dtype(at::kLong));
  if (indices.numel() == 0) return indices;
  const auto kernel = kernels::kernels_for(src.block()).channel_argmax;
  const auto* in = src.physical.const_data_ptr<float>();
  auto* out = indices.mutable_data_ptr<std::int64_t>();
  const Walk walk(src, 1);
  for_images(walk, [&](std::int64_t image, std::int64_t at, std::int64_t first, std::int64_t last) {
    kernel(walk.rows, in + at, least ? -1.f : 1.f, out + image * walk.rows.pixels, first, last);
  });
  return indices;
}

}  // namespace torch_blocked
