// Access to a blocked activation, by logical indices or block by block.
//
// An activation [N, C, *spatial] in nC*<b>c is one buffer [N, ceil(C / b), *spatial, b]: b channels
// of a pixel lie side by side. The lanes beyond C in the last block are the zero tail. They are 0
// in every blocked tensor, and every kernel must keep them 0.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <stdexcept>
#include <utility>

#include "torch_blocked/tag.h"
#include "torch_blocked/threads.h"

namespace torch_blocked {

template <typename T>
class BlockedAccessor {
 public:
  // `data`: the contiguous buffer, which is not owned. `dims`: [N, C, *spatial]. `lanes`: b.
  BlockedAccessor(T* data, Dims dims, std::int64_t lanes)
      : data_(data), dims_(std::move(dims)), lanes_(lanes) {
    for (std::size_t i = 2; i < dims_.size(); ++i) pixels_ *= dims_[i];
  }

  const Dims& dims() const { return dims_; }
  std::int64_t batch() const { return dims_[0]; }
  std::int64_t channels() const { return dims_[1]; }
  std::int64_t pixels() const { return pixels_; }  // product of the spatial dims
  std::int64_t lanes() const { return lanes_; }
  std::int64_t blocks() const { return (channels() + lanes_ - 1) / lanes_; }
  // How many lanes of a block are channels. The other lanes of the last block are the zero tail.
  std::int64_t lanes_of(std::int64_t block) const {
    return std::min(lanes_, channels() - block * lanes_);
  }

  // The offset of a logical index in elements: offset(n, c, h, w). As in at::TensorAccessor,
  // indices are not checked; only a wrong number of them throws std::invalid_argument.
  template <typename... Spatial>
  std::int64_t offset(std::int64_t n, std::int64_t c, Spatial... pixel) const {
    if (sizeof...(pixel) + 2 != dims_.size()) {
      throw std::invalid_argument("torch_blocked::BlockedAccessor: expected an index per dim");
    }
    std::int64_t at = n * blocks() + c / lanes_;
    [[maybe_unused]] std::size_t dim = 2;
    ((at = at * dims_[dim++] + pixel), ...);
    return at * lanes_ + c % lanes_;
  }
  template <typename... Spatial>
  T& operator()(std::int64_t n, std::int64_t c, Spatial... pixel) const {
    return data_[offset(n, c, pixel...)];
  }

  // All pixels of one block of channels of one image, [pixels, lanes].
  T* block(std::int64_t n, std::int64_t block) const {
    return data_ + (n * blocks() + block) * pixels_ * lanes_;
  }

 private:
  T* data_;
  Dims dims_;
  std::int64_t lanes_, pixels_ = 1;
};

// Calls body(n, block) once for every block of every image, on torch's threads.
template <typename T, typename Body>
void for_blocks(const BlockedAccessor<T>& activation, Body&& body) {
  const std::int64_t blocks = activation.blocks();
  parallel_units(activation.batch() * blocks, activation.pixels() * activation.lanes(),
                 [&](std::int64_t begin, std::int64_t end) {
                   for (std::int64_t i = begin; i < end; ++i) body(i / blocks, i % blocks);
                 });
}

}  // namespace torch_blocked
