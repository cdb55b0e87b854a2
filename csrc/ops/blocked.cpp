// Checks of blocked arguments, and the formats, descriptors and memory of activations.
#include "ops/blocked.h"

#include <ATen/EmptyTensor.h>

#include <algorithm>
#include <cstdlib>
#include <numeric>
#include <stdexcept>

#include "format/errors.h"
#include "ops/registered.h"
#include "runtime/memory/memory_pool.h"

namespace torch_blocked {

using Type = dnnl::memory::data_type;

Dims channels_last_strides(at::IntArrayRef dims) {
  Dims strides(dims.size(), 1);
  std::int64_t step = dims[1];
  for (std::size_t dim = dims.size() - 1; dim >= 2; --dim) {
    strides[dim] = step;
    step *= dims[dim];
  }
  strides[0] = step;
  return strides;
}

std::int64_t Blocked::pixels() const {
  const at::IntArrayRef spatial = physical.sizes().slice(2, physical.dim() - 3);
  return std::accumulate(spatial.begin(), spatial.end(), std::int64_t{1}, std::multiplies<>());
}

Dims Blocked::dims() const {
  Dims dims(physical.sizes().begin(), physical.sizes().end() - 1);
  dims[1] = channels;
  return dims;
}

dnnl::memory::desc Blocked::md() const {
  return activation_md(dims(), format(), physical.scalar_type());
}

void check_memory(const char* op, const at::Tensor& tensor) {
  if (!tensor.defined()) fail_type(op, "a tensor", "none", "");
  const c10::DispatchKeySet keys = tensor.key_set();
  if (!keys.has(c10::DispatchKey::CPU) || keys.has(c10::DispatchKey::ZeroTensor)) {
    fail_type(op, "a strided CPU tensor with values in memory", text(tensor.toString()),
              "call .to_dense(), .dequantize() or .cpu() first");
  }
  std::int64_t product = tensor.itemsize();  // a size of 0 counts as 1, or it hides an overflow
  for (const std::int64_t size : tensor.sizes()) {
    if (__builtin_mul_overflow(product, std::max<std::int64_t>(size, 1), &product)) {
      fail_value(op, "sizes whose product fits 64 bits", text(tensor.sizes()), "");
    }
  }
  if (tensor.numel() == 0) return;
  std::int64_t last = tensor.storage_offset();
  for (std::int64_t dim = 0; dim < tensor.dim(); ++dim) {
    last += (tensor.size(dim) - 1) * tensor.stride(dim);
  }
  const c10::Storage& storage = tensor.unsafeGetTensorImpl()->unsafe_storage();
  const std::size_t bytes = static_cast<std::size_t>(last + 1) * tensor.itemsize();
  if (!storage || !storage.data() || storage.nbytes() < bytes) {
    fail_value(op, text("a tensor with memory of ", bytes, " bytes"),
               text(storage && storage.data() ? storage.nbytes() : 0, " bytes"),
               "its storage was resized, or it is a wrapper of another tensor");
  }
}

void check_dtype(const char* op, at::ScalarType dtype) {
  if (dtype < at::ScalarType::Byte || dtype >= at::ScalarType::Undefined || at::isQIntType(dtype)) {
    fail_type(op, "a dtype of plain tensors", text(static_cast<int>(dtype)), "");
  }
}

void check_block(const char* op, std::int64_t block) {
  if (!Format::is_block(block)) {
    fail_value(op, "a channel block of 4, 8, 16 or 32", text(block), "8 and 16 are the fast ones");
  }
}

Blocked blocked_argument(const char* op, const at::Tensor& physical, std::int64_t channels) {
  if (physical.dim() < 4 || physical.dim() > 6 || !Format::is_block(physical.size(-1))) {
    fail_value(op,
               "a physical tensor [N, ceil(C/b), *spatial, b] with 1 to 3 spatial dims and b = 4, "
               "8, 16 or 32",
               text(physical.sizes()), "make it with to_blocked");
  }
  const std::int64_t blocks = Format::blocked(physical.size(-1)).blocks(channels);
  if (channels < 0 || physical.size(1) != blocks) {
    fail_value(op, text("ceil(C/b) = ", blocks, " blocks for C = ", channels),
               text(physical.size(1), " in ", physical.sizes()), "pass the logical channel count");
  }
  const std::size_t room = physical.storage().nbytes();
  if (at::detail::computeStorageNbytes(physical.sizes(), physical.strides(), physical.itemsize(),
                                       physical.storage_offset()) > room) {
    fail_value(op, text("memory for ", physical.sizes()), text(room, " bytes"),
               "give the tensor its memory back with x.set_(y), or storage of the size it had");
  }
  return {physical.contiguous(), channels};
}

Blocked float_argument(const char* op, const at::Tensor& physical, std::int64_t channels) {
  if (physical.scalar_type() != at::kFloat) {
    fail_not_implemented(op, "a float32 input", text(physical.dtype().name()),
                         "convert it with .float()");
  }
  return blocked_argument(op, physical, channels);
}

bool checks_tails() {
  static const bool on = [] {
    const char* setting = std::getenv("TORCH_BLOCKED_CHECK");
    return setting && std::string_view(setting) != "" && std::string_view(setting) != "0";
  }();
  return on;
}

void check_tail(const char* op, const at::Tensor& physical, std::int64_t channels,
                const char* remedy) {
  if (tail_is_zero(physical, channels)) return;
  throw std::runtime_error(error_sentence(op, text("a zero tail beyond channel ", channels),
                                          text("other values in ", physical.sizes()), remedy));
}

Blocked empty_blocked(at::IntArrayRef dims, std::int64_t block, const at::TensorOptions& options) {
  return {empty_pooled(Format::blocked(block).physical_shape(dims), options), dims[1]};
}

dnnl::memory::desc activation_md(at::IntArrayRef dims, Format format, at::ScalarType dtype) {
  const auto tag = static_cast<dnnl::memory::format_tag>(format.onednn_tag(dims.size()));
  return {dims.vec(), onednn_type(dtype), tag};
}

dnnl::memory::desc strided_md(const at::Tensor& tensor) {
  return {tensor.sizes().vec(), onednn_type(tensor.scalar_type()), tensor.strides().vec(),
          /*allow_empty=*/true};
}

bool has_onednn_type(at::ScalarType dtype) { return onednn_type(dtype) != Type::undef; }

Type onednn_type(at::ScalarType dtype) {
  switch (dtype) {
    case at::kFloat:
      return Type::f32;
    case at::kBFloat16:
      return Type::bf16;
    case at::kHalf:
      return Type::f16;
    case at::kInt:
      return Type::s32;
    case at::kChar:
      return Type::s8;
    case at::kByte:
      return Type::u8;
    default:
      return Type::undef;
  }
}

Format format_of(const at::Tensor& tensor) {
  if (tensor.is_contiguous()) return kPlain;
  return is_channels_last(tensor) ? kChannelsLast : kStrided;
}

at::Tensor empty_dense(at::IntArrayRef dims, bool channels_last, const at::TensorOptions& options) {
  if (!channels_last) return empty_pooled(dims, options);
  return empty_pooled(dims, channels_last_strides(dims), options);
}

bool is_channels_last(const at::Tensor& tensor) {
  if (tensor.dim() < 3 || tensor.dim() > 5) return false;
  const Dims expected = channels_last_strides(tensor.sizes());
  for (std::int64_t dim = 0; dim < tensor.dim(); ++dim) {
    if (tensor.size(dim) > 1 && tensor.stride(dim) != expected[dim]) return false;
  }
  return true;
}

}  // namespace torch_blocked
