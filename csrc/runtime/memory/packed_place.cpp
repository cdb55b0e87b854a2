#include "runtime/memory/packed_place.h"

#include <utility>

#include "runtime/memory/memory_pool.h"

namespace torch_blocked {
namespace {

thread_local PackedPlace* innermost = nullptr;

}  // namespace

PackedPlace::PackedPlace(std::function<at::Tensor(std::int64_t bytes)> take)
    : take_(std::move(take)), outer_(std::exchange(innermost, this)) {}

PackedPlace::~PackedPlace() { innermost = outer_; }

at::Tensor empty_packed(std::int64_t elements, at::ScalarType dtype) {
  if (!innermost || !innermost->take_) return empty_pooled({elements}, dtype);
  const auto take = std::exchange(innermost->take_, nullptr);
  return take(elements * static_cast<std::int64_t>(c10::elementSize(dtype))).view(dtype);
}

}  // namespace torch_blocked
