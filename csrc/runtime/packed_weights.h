// Weights stay dense parameters; their packed form is kept here for as long as they do not change.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <string>

namespace torch_blocked {

// `weights` in the packed form named `format`: from the cache, or made by pack(). An entry serves
// the same storage, strides and version, so an optimizer's in-place step makes it stale; it is
// dropped when the weights die. Writes that hide from the version counter (through .data) are
// noticed by a sample of 64 elements. Inference tensors have no version and overlapping views no
// clear content: both are packed on each call.
at::Tensor packed_weights(const at::Tensor& weights, const std::string& format,
                          const std::function<at::Tensor()>& pack);

// Bytes held now.
std::int64_t packed_weight_bytes();

void clear_packed_weights();

}  // namespace torch_blocked
