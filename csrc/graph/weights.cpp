#include "graph/weights.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/empty.h>

#include <algorithm>
#include <cstring>

#include "format/errors.h"
#include "runtime/content_hash.h"
#include "runtime/huge_pages.h"
#include "runtime/memory_pool.h"
#include "runtime/primitive.h"
#include "torch_blocked/threads.h"

namespace torch_blocked::graph {
namespace {

std::string address_of(const std::vector<at::Tensor>& tensors, const std::string& more) {
  Key key("");
  for (const at::Tensor& tensor : tensors) {
    if (!tensor.defined()) {
      key.add(0);
      continue;
    }
    key.add(reinterpret_cast<std::intptr_t>(tensor.const_data_ptr()));
    key.add(static_cast<std::int64_t>(tensor.scalar_type()));
    key.add(tensor.sizes()).add(tensor.strides());
  }
  return std::move(key).text() + more;  // which may hold any bytes
}

// All threads touch fresh pages: to clear those of ResNet-50's 164 MB took one thread 0.2 s.
void copy_by_pages(void* to, const void* from, std::int64_t bytes) {
  constexpr std::int64_t kUnit = 256 << 10;
  parallel_units((bytes + kUnit - 1) / kUnit, kUnit, [&](std::int64_t begin, std::int64_t end) {
    const std::int64_t first = begin * kUnit, last = std::min(end * kUnit, bytes);
    std::memcpy(static_cast<char*>(to) + first, static_cast<const char*>(from) + first,
                static_cast<std::size_t>(last - first));
  });
}

}  // namespace

// Some rows at a time, so that float64 stays in the cache: whole weights of ResNet-50 took 0.22 s,
// so it is 0.02.
at::Tensor Weight::values() const {
  if (!factors.defined()) return source;
  constexpr std::int64_t kElements = 16384;
  const at::Tensor all = factors.expand(source.sizes());
  at::Tensor result = at::empty(source.sizes(), source.options());
  const std::int64_t rows = source.size(0), row = source.numel() / std::max<std::int64_t>(1, rows);
  const std::int64_t step = std::max<std::int64_t>(1, kElements / std::max<std::int64_t>(1, row));
  parallel_units(rows, row, [&](std::int64_t begin, std::int64_t end) {
    const at::AutoDispatchBelowADInplaceOrView below_autograd;
    for (std::int64_t first = begin; first < end; first += step) {
      const std::int64_t count = std::min(step, end - first);
      const auto part = [&](const at::Tensor& of) { return of.narrow(0, first, count); };
      part(result).copy_(part(source).to(at::kDouble).mul_(part(all)));
    }
  });
  return result;
}

at::Tensor Weights::packed(const std::vector<at::Tensor>& weights, const std::string& format,
                           const std::function<at::Tensor()>& pack) {
  const std::string key = address_of(weights, format);
  if (others_) {
    if (const at::Tensor packed = others_->find_packed(key); packed.defined()) return packed;
  }
  const std::lock_guard lock(mutex_);
  at::Tensor& packed = packed_[key];
  if (!packed.defined()) {
    packed = others_ ? pack() : placed(pack());
    kept_.insert(kept_.end(), weights.begin(), weights.end());
  }
  return packed;
}

at::Tensor Weights::find_packed(const std::string& key) {
  const std::lock_guard lock(mutex_);
  const auto found = packed_.find(key);
  return found == packed_.end() ? at::Tensor() : found->second;
}

// Copies to the current piece, or to a new one. Pages of it that are never touched take no memory.
// What is large and in huge pages of its own stays there: it needs no second set of fresh pages.
at::Tensor Weights::placed(const at::Tensor& packed) {
  constexpr std::int64_t kPiece = 64 << 20, kPage = kHugePage, kLarge = 16 << 20;
  const auto bytes = static_cast<std::int64_t>(packed.nbytes());
  if (bytes >= kLarge && fills_block(packed)) return packed;
  if (!piece_.defined() || filled_ + bytes > piece_.numel()) {
    piece_ = at::empty({kPage + std::max(bytes, kPiece)}, at::kByte);
    prefer_huge_pages(piece_.mutable_data_ptr(), piece_.nbytes());
    const auto begin = reinterpret_cast<std::intptr_t>(piece_.const_data_ptr());
    filled_ = (kPage - begin % kPage) % kPage;
  }
  const at::Tensor place = piece_.narrow(0, filled_, bytes).view(packed.scalar_type());
  constexpr std::int64_t kAlign = 4096;
  filled_ += (bytes + kAlign - 1) / kAlign * kAlign;
  copy_by_pages(place.mutable_data_ptr(), packed.const_data_ptr(), bytes);
  return place.view(packed.sizes());
}

Folded Weights::folded(const std::vector<at::Tensor>& sources, const std::string& how,
                       const std::function<Folded()>& fold) {
  const std::lock_guard lock(mutex_);
  const std::string key = address_of(sources, how);
  if (const auto found = folded_.find(key); found != folded_.end()) return found->second;
  kept_.insert(kept_.end(), sources.begin(), sources.end());
  return folded_[key] = fold();
}

// A constant with overlaps or gaps is copied with the memory behind it, and keeps its strides.
at::Tensor Weights::own(const at::Tensor& constant) {
  const std::lock_guard lock(mutex_);
  at::Tensor& own = own_[address_of({constant}, "")];
  if (own.defined()) return own;
  kept_.push_back(constant);
  if (constant.is_non_overlapping_and_dense() || constant.layout() != at::kStrided) {
    return own = constant.clone();
  }
  std::int64_t span = constant.numel() > 0 ? 1 : 0;
  for (std::int64_t dim = 0; dim < constant.dim() && span > 0; ++dim) {
    span += (constant.size(dim) - 1) * constant.stride(dim);
  }
  const at::Tensor memory = constant.as_strided({span}, {1}).clone();
  return own = memory.as_strided(constant.sizes(), constant.strides(), 0);
}

void Weights::check_unchanged(const std::vector<at::Tensor>& constants) {
  const std::lock_guard lock(mutex_);
  for (const at::Tensor& constant : constants) {
    if (constant.layout() != at::kStrided || constant.is_meta()) continue;
    const std::uint64_t hash = content_hash(constant.contiguous());
    const auto [noted, is_new] =
        noted_.try_emplace(address_of({constant}, ""), Noted{constant, hash});
    if (!is_new && noted->second.hash != hash) {
      fail_value("optimize", "the weights that the model had when it was optimized",
                 text("others in a tensor of ", constant.sizes()), "optimize the model again");
    }
  }
}

void Weights::release() {
  const std::lock_guard lock(mutex_);
  folded_.clear();
  noted_.clear();
  kept_.clear();
}

void Weights::drop_packed() {
  const std::lock_guard lock(mutex_);
  packed_.clear();
  piece_ = at::Tensor();
}

std::int64_t Weights::packed_bytes() {
  const std::lock_guard lock(mutex_);
  std::int64_t bytes = 0;
  for (const auto& [key, packed] : packed_) bytes += static_cast<std::int64_t>(packed.nbytes());
  return bytes;
}

}  // namespace torch_blocked::graph
