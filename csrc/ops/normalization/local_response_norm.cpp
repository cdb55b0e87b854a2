// Local response normalization over the channels, and its gradient. float32.
#include "kernels/rows/local_response_norm.h"

#include <algorithm>

#include "format/errors.h"
#include "kernels/kernels.h"
#include "ops/blocked.h"
#include "ops/registered.h"
#include "runtime/memory/workspace.h"
#include "torch_blocked/threads.h"

namespace torch_blocked {
namespace {

kernels::ChannelWindows windows_of(const char* op, const Blocked& src, std::int64_t size,
                                   double alpha, double beta, double k) {
  if (size < 1) fail_value(op, "a window of 1 channel or more", text(size), "");
  const std::int64_t most = std::max<std::int64_t>(src.channels - 1, 0);
  return {.channels = src.channels,
          .block = src.block(),
          .pixels = src.pixels(),
          .before = std::min(size / 2, most),
          .after = std::min((size - 1) / 2, most),
          .alpha = static_cast<float>(alpha / static_cast<double>(size)),
          .beta = static_cast<float>(beta),
          .k = static_cast<float>(k)};
}

// Calls f(offset of an image, its pixels [first, last)) for all pixels of all images.
template <typename F>
void for_images(const Blocked& src, F&& f) {
  const std::int64_t pixels = src.pixels(), image = src.blocks() * pixels * src.block();
  parallel_units(src.batch() * pixels, src.channels, [&](std::int64_t begin, std::int64_t end) {
    while (begin < end) {
      const std::int64_t first = begin % pixels, last = std::min(pixels, first + end - begin);
      f(begin / pixels * image, first, last);
      begin += last - first;
    }
  });
}

}  // namespace

at::Tensor local_response_norm(const at::Tensor& input, std::int64_t channels, std::int64_t size,
                               double alpha, double beta, double k) {
  constexpr const char* kOp = "local_response_norm";
  const Blocked src = float_argument(kOp, input, channels);
  const auto windows = windows_of(kOp, src, size, alpha, beta, k);
  const Blocked dst = empty_blocked(src.dims(), src.block(), input.options());
  if (dst.physical.numel() == 0) return dst.physical;
  const auto kernel = kernels::kernels_for(src.block()).local_response_norm;
  const auto* in = src.physical.const_data_ptr<float>();
  auto* out = dst.physical.mutable_data_ptr<float>();
  for_images(src, [&](std::int64_t at, std::int64_t first, std::int64_t last) {
    kernel(windows, in + at, workspace(windows.scratch()), out + at, first, last);
  });
  return dst.physical;
}

at::Tensor local_response_norm_backward(const at::Tensor& grad_output, const at::Tensor& input,
                                        std::int64_t channels, std::int64_t size, double alpha,
                                        double beta, double k) {
  constexpr const char* kOp = "local_response_norm_backward";
  const Blocked src = float_argument(kOp, input, channels);
  const Blocked diff_dst = float_argument(kOp, grad_output, channels);
  if (grad_output.sizes() != input.sizes()) {
    fail_value(kOp, text("a gradient of shape ", input.sizes()), text(grad_output.sizes()), "");
  }
  const auto windows = windows_of(kOp, src, size, alpha, beta, k);
  const Blocked diff_src = empty_blocked(src.dims(), src.block(), input.options());
  if (diff_src.physical.numel() == 0) return diff_src.physical;
  const auto kernel = kernels::kernels_for(src.block()).local_response_norm_gradient;
  const auto *diff = diff_dst.physical.const_data_ptr<float>(),
             *in = src.physical.const_data_ptr<float>();
  auto* out = diff_src.physical.mutable_data_ptr<float>();
  for_images(src, [&](std::int64_t at, std::int64_t first, std::int64_t last) {
    kernel(windows, diff + at, in + at, workspace(windows.scratch()), out + at, first, last);
  });
  return diff_src.physical;
}

}  // namespace torch_blocked
