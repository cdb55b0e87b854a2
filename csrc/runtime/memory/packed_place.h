// Where packed weights are made. Whoever keeps them says so before they are packed, because a copy
// afterwards would touch as many fresh pages once more: of ResNet-50's warm set-up of 0.26 s that
// was 0.08 s.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>

namespace torch_blocked {

// For what this thread packs while it lives: `take` gives memory of so many bytes to the first
// request, which is for the packed weights of a plan; null for the pool's.
class PackedPlace {
 public:
  explicit PackedPlace(std::function<at::Tensor(std::int64_t bytes)> take);
  ~PackedPlace();
  PackedPlace(const PackedPlace&) = delete;
  PackedPlace& operator=(const PackedPlace&) = delete;

 private:
  friend at::Tensor empty_packed(std::int64_t elements, at::ScalarType dtype);

  std::function<at::Tensor(std::int64_t bytes)> take_;
  PackedPlace* outer_;
};

// Memory for packed weights: the place of this thread, or the pool's.
at::Tensor empty_packed(std::int64_t elements, at::ScalarType dtype);

}  // namespace torch_blocked
