// Says where packed weights are made. Whoever keeps them provides the memory before they are
// packed: a copy afterwards would touch as many fresh pages again, which took 0.08 of the 0.26 s of
// ResNet-50's warm set-up.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>

namespace torch_blocked {

// While an object lives, `take` provides the memory for the first request of this thread, which is
// for the packed weights of a plan. Null: memory comes from the pool.
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

// Memory for packed weights: from this thread's PackedPlace, or from the pool.
at::Tensor empty_packed(std::int64_t elements, at::ScalarType dtype);

}  // namespace torch_blocked
