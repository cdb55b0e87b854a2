// A cache of packed weights. Weights stay dense parameters; their packed form is kept here until
// they change.
//
// On one core, hashing the weights takes 4 to 25 % of the time of a 3x3 convolution of 64 to 256
// channels, and two thirds of that of a 3x3 convolution of 512 channels on a 7x7 map
// (benchmarks/dispatch.py).
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <string>

namespace torch_blocked {

// `weights` in the packed form named `format`: from the cache, or made by pack(). An entry serves
// the same storage, strides and version, and is dropped when the weights die.
//
// Some writes do not change the version counter: those through .data, or in inference mode. A hook
// of the storage sees them, which PyTorch calls before it gives out a pointer to write through; it
// costs nothing while nobody writes. Somebody may hold such a pointer from earlier if another
// tensor shares the storage, or if the memory came from outside PyTorch's allocator. Then each use
// compares a hash of all weights. Neither sees writes through a raw address, or through a NumPy
// array of the weights' own tensor object, that was kept from before the last use: call
// clear_packed_weights() after such a write. Weights that overlap themselves or have gaps in memory
// are packed on each call, because only dense memory is hashed.
at::Tensor packed_weights(const at::Tensor& weights, const std::string& format,
                          const std::function<at::Tensor()>& pack);

// Bytes held now.
std::int64_t packed_weight_bytes();

// Forgets every packed form.
void clear_packed_weights();

}  // namespace torch_blocked
