// Picks one channel of every pixel by an index per pixel, and places values the same way. A loss
// over classes needs both. 4-byte elements.
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>

#include "format/errors.h"
#include "ops/blocked.h"
#include "ops/registered.h"
#include "torch_blocked/threads.h"

namespace torch_blocked {
namespace {

constexpr std::int64_t kMaxChannels = std::int64_t{1} << 31;

// The index of every pixel, [N, *spatial]; -1 stands for none.
at::Tensor check_index(const char* op, const at::Tensor& index, at::IntArrayRef dims) {
  Dims expected = dims.vec();
  expected.erase(expected.begin() + 1);
  if (index.scalar_type() != at::kLong || index.sizes() != expected) {
    fail_value(op, text("an int64 index ", expected),
               text(index.dtype().name(), " ", index.sizes()), "");
  }
  const at::Tensor contiguous = index.contiguous();
  const auto* values = contiguous.const_data_ptr<std::int64_t>();
  for (std::int64_t i = 0; i < contiguous.numel(); ++i) {
    if (values[i] < -1 || values[i] >= dims[1]) {
      fail_value(op, text("channels of ", dims[1], ", or -1 for none"), text(values[i]), "");
    }
  }
  return contiguous;
}

void check_4_bytes(const char* op, const at::Tensor& input) {
  if (input.itemsize() != sizeof(float)) {
    fail_not_implemented(op, "4-byte elements", text(input.dtype().name()), "");
  }
}

// Calls f(pixel of all images, element of the physical tensor) for every pixel that has a channel.
template <typename F>
void for_chosen(const Blocked& blocked, const at::Tensor& index, F&& f) {
  const std::int64_t block = blocked.block(), pixels = blocked.pixels();
  const auto* channels = index.const_data_ptr<std::int64_t>();
  parallel_units(index.numel(), 1, [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t i = begin; i < end; ++i) {
      const std::int64_t channel = channels[i], image = i / pixels, pixel = i % pixels;
      if (channel < 0) continue;
      const std::int64_t row = image * blocked.blocks() + channel / block;
      f(i, (row * pixels + pixel) * block + channel % block);
    }
  });
}

}  // namespace

at::Tensor pick_channels(const at::Tensor& input, std::int64_t channels, const at::Tensor& index) {
  const Blocked src = blocked_argument("pick_channels", input, channels);
  check_4_bytes("pick_channels", input);
  const at::Tensor checked = check_index("pick_channels", index, src.dims());
  const at::Tensor dst = at::zeros(checked.sizes(), input.options());
  const auto* in = static_cast<const float*>(src.physical.const_data_ptr());
  auto* out = static_cast<float*>(dst.mutable_data_ptr());
  for_chosen(src, checked, [&](std::int64_t i, std::int64_t element) { out[i] = in[element]; });
  return dst;
}

at::Tensor place_channels(const at::Tensor& values, const at::Tensor& index, std::int64_t channels,
                          std::int64_t block) {
  constexpr const char* kOp = "place_channels";
  check_4_bytes(kOp, values);
  Dims dims = values.sizes().vec();
  if (values.dim() < 2 || values.dim() > 4) {
    fail_value(kOp, "values [N, *spatial]", text(values.sizes()), "");
  }
  if (channels < 0 || channels > kMaxChannels) {
    fail_value(kOp, text("0 to ", kMaxChannels, " channels"), text(channels), "");
  }
  check_block(kOp, block);
  dims.insert(dims.begin() + 1, channels);
  const at::Tensor checked = check_index(kOp, index, dims);
  const at::Tensor src = values.contiguous();
  const Blocked dst = empty_blocked(dims, block, values.options());
  dst.physical.zero_();
  const auto* in = static_cast<const float*>(src.const_data_ptr());
  auto* out = static_cast<float*>(dst.physical.mutable_data_ptr());
  for_chosen(dst, checked, [&](std::int64_t i, std::int64_t element) { out[element] = in[i]; });
  return dst.physical;
}

}  // namespace torch_blocked
