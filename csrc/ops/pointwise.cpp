#include "ops/blocked.h"
#include "ops/registered.h"
#include "runtime/memory/memory_pool.h"

namespace torch_blocked {
namespace {

// The lanes beyond C of the last block; undefined if there are none.
at::Tensor tail_of(const char* op, const at::Tensor& physical, std::int64_t channels) {
  blocked_argument(op, physical, channels);
  const std::int64_t block = physical.size(-1), used = channels % block;
  if (used == 0) return {};
  return physical.select(1, -1).narrow(-1, used, block - used);
}

}  // namespace

at::Tensor empty_like(const at::Tensor& physical) {
  return empty_pooled(physical.sizes(), physical.options());
}

void clear_tail_(at::Tensor& physical, std::int64_t channels) {
  if (const at::Tensor tail = tail_of("clear_tail_", physical, channels); tail.defined())
    tail.zero_();
}

bool tail_is_zero(const at::Tensor& physical, std::int64_t channels) {
  const at::Tensor tail = tail_of("tail_is_zero", physical, channels);
  return !tail.defined() || !tail.ne(0).any().item<bool>();
}

}  // namespace torch_blocked
