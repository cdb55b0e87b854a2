// A blocked activation as an op gets it: a physical tensor [N, ceil(C / b), *spatial, b] and C.
// Dims and format follow from these two.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/core/SymInt.h>
#include <c10/util/Exception.h>

#include <array>
#include <type_traits>

#include "torch_blocked/accessor.h"

namespace torch_blocked {

inline constexpr std::array<std::int64_t, 4> kBlockSizes{4, 8, 16, 32};
inline constexpr std::int64_t kMostLanes = kBlockSizes.back();

// The elements of a physical tensor, to be read (`const T`) or written. The tensor keeps the
// ownership. Python sees ValueError unless it is a contiguous CPU tensor of T in the physical shape
// of an activation with `channels` channels.
template <typename T>
BlockedAccessor<T> accessor(const at::Tensor& physical, std::int64_t channels) {
  using Element = std::remove_const_t<T>;
  const bool is_image = physical.defined() && physical.dim() >= 4 && physical.dim() <= 6;
  const std::int64_t lanes = is_image ? physical.size(-1) : 0;
  TORCH_CHECK_VALUE(
      std::ranges::find(kBlockSizes, lanes) != kBlockSizes.end() && channels >= 0 &&
          physical.size(1) == channels / lanes + (channels % lanes > 0),
      "torch_blocked::accessor: expected [N, ceil(C / b), *spatial, b] with C = ", channels,
      " and b of 4, 8, 16 or 32, got ", physical.defined() ? physical.sizes() : at::IntArrayRef(),
      "; pass the physical tensor and its logical channels");
  TORCH_CHECK_VALUE(physical.is_cpu() && physical.is_contiguous() &&
                        physical.scalar_type() == c10::CppTypeToScalarType<Element>::value,
                    "torch_blocked::accessor: expected a contiguous CPU tensor of ",
                    c10::CppTypeToScalarType<Element>::value, ", got ", physical.toString(),
                    physical.is_contiguous() ? "" : ", not contiguous",
                    "; call contiguous(), or read another type");
  Dims dims(physical.sizes().begin(), physical.sizes().end() - 1);
  dims[1] = channels;
  if constexpr (std::is_const_v<T>) {
    return {physical.const_data_ptr<Element>(), std::move(dims), lanes};
  } else {
    return {physical.mutable_data_ptr<Element>(), std::move(dims), lanes};
  }
}

// Writes 0 to all lanes beyond the last channel, for kernels with f(0) != 0.
inline void clear_tail(const at::Tensor& physical, std::int64_t channels) {
  static const auto op = c10::Dispatcher::singleton()
                             .findSchemaOrThrow("torch_blocked::clear_tail_", "")
                             .typed<void(at::Tensor&, c10::SymInt)>();
  at::Tensor written = physical;
  op.call(written, channels);
}

// Whether all lanes beyond the last channel are 0. With TORCH_BLOCKED_CHECK=1 in the environment
// this is checked for every op's result.
inline bool tail_is_zero(const at::Tensor& physical, std::int64_t channels) {
  static const auto op = c10::Dispatcher::singleton()
                             .findSchemaOrThrow("torch_blocked::tail_is_zero", "")
                             .typed<bool(const at::Tensor&, c10::SymInt)>();
  return op.call(physical, channels);
}

}  // namespace torch_blocked
