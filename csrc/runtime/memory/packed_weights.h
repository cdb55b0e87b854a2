// Weights stay dense parameters; their packed form is kept here for as long as they do not change.
//
// The hash takes, on one core, 4 to 25 % of the time of a 3x3 convolution of 64 to 256 channels,
// and two thirds of that of one of 512 channels on a 7x7 map (benchmarks/dispatch.py).
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <string>

namespace torch_blocked {

// `weights` in the packed form named `format`: from the cache, or made by pack(). An entry serves
// the same storage, strides and version, and is dropped when the weights die.
//
// Writes that hide from the version counter (through .data, or in inference mode) are seen by a
// hook of the storage, which PyTorch calls before it gives out a pointer to write through; that
// costs nothing while nobody writes. Where somebody else may hold such a pointer from earlier,
// because another tensor shares the storage or because its memory came from outside PyTorch's
// allocator, each use compares a hash of all weights. What neither sees: a raw address, or a NumPy
// array of the weights' own tensor object, that is kept from before the last use; after writing
// through one, call clear_packed_weights(). Weights that overlap themselves or have gaps in memory
// are packed on each call, because only dense memory is hashed.
at::Tensor packed_weights(const at::Tensor& weights, const std::string& format,
                          const std::function<at::Tensor()>& pack);

// Bytes held now.
std::int64_t packed_weight_bytes();

// Forgets every packed form.
void clear_packed_weights();

}  // namespace torch_blocked
