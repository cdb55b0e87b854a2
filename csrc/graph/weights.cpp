// The store of a model's constants: their copies, folded weights, and memory for packed weights.
#include "graph/weights.h"

#include <ATen/Dispatch.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>

#include <algorithm>
#include <utility>

#include "format/errors.h"
#include "format/sizes.h"
#include "runtime/content_hash.h"
#include "runtime/memory/borders.h"
#include "runtime/memory/huge_pages.h"
#include "runtime/memory/memory_pool.h"
#include "runtime/memory/packed_place.h"
#include "runtime/onednn/primitive.h"
#include "runtime/onednn/primitive_cache.h"
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
  return std::move(key).text() + more;  // the key may contain any bytes
}

constexpr std::int64_t kPage = kHugePage;

// Touches fresh huge pages, each by one thread. If two threads meet in a page, both clear it, one
// of them for nothing. Where a virtual machine gives idle memory back, a page takes 0.3 to 4 ms.
void touch(char* data, std::int64_t bytes) {
  parallel_units(bytes / kPage, kPage, [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t page = begin; page < end; ++page) data[page * kPage] = 0;
  });
}

// Multiplies each row of `size` numbers by its factor.
template <typename From, typename To>
void multiply_rows(const From* from, const at::Tensor& factors, std::int64_t size, To* to) {
  const double* factor = factors.const_data_ptr<double>();
  parallel_units(factors.numel(), size, [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t i = begin; i < end; ++i) {
      for (std::int64_t k = i * size; k < (i + 1) * size; ++k) {
        to[k] = static_cast<To>(static_cast<double>(from[k]) * factor[i]);
      }
    }
  });
}

}  // namespace

// Multiplies row by row. A row has one factor; usually it is an output channel's weights. float64
// values stay in registers: ResNet-50's weights as whole float64 tensors took 0.22 s.
at::Tensor Weight::values() const {
  if (!factors.defined()) return source.to(dtype());
  const at::Tensor dense = source.contiguous();
  at::Tensor of_rows = factors.expand(source.sizes()),
             result = at::empty_like(dense, dense.options().dtype(dtype()));
  std::int64_t row = 1;
  for (std::int64_t dim = source.dim() - 1; dim >= 0; --dim) {
    const std::int64_t size = source.size(dim);
    if (size > 1 && of_rows.stride(dim) != 0) break;
    row *= size;
    of_rows = of_rows.narrow(dim, 0, std::min<std::int64_t>(1, size));
  }
  of_rows = of_rows.to(at::kDouble).contiguous();
  AT_DISPATCH_FLOATING_TYPES_AND3(
      at::kBFloat16, at::kHalf, at::kChar, source.scalar_type(), "torch_blocked::Weight::values",
      [&] {
        const auto* from = dense.const_data_ptr<scalar_t>();
        if (dtype() == at::kBFloat16) {
          multiply_rows(from, of_rows, row, result.mutable_data_ptr<c10::BFloat16>());
        } else if (dtype() == at::kFloat) {
          multiply_rows(from, of_rows, row, result.mutable_data_ptr<float>());
        } else {
          multiply_rows(from, of_rows, row, result.mutable_data_ptr<scalar_t>());
        }
      });
  return result;
}

void drop_memory(at::Tensor& tensor) {
  if (tensor.defined()) tensor = at::empty(tensor.sizes(), tensor.options().device(at::kMeta));
}

Weights::~Weights() {
  if (others_) return;
  release();
  own_.clear();
  drop_packed();
  forget_primitives();
  return_idle_memory();
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
    packed = others_ ? pack() : packed_here(pack);
    kept_.insert(kept_.end(), weights.begin(), weights.end());
  }
  return packed;
}

at::Tensor Weights::find_packed(const std::string& key) {
  const std::lock_guard lock(mutex_);
  const auto found = packed_.find(key);
  return found == packed_.end() ? at::Tensor() : found->second;
}

// Memory for packed weights: from the current piece, from a new one, or huge pages of its own.
// Pages of a piece that are never touched take no memory.
at::Tensor Weights::take(std::int64_t bytes) {
  constexpr std::int64_t kPiece = 64 << 20, kLarge = 16 << 20, kAlign = 4096, kPagesAhead = 4;
  if (bytes >= kLarge) {
    const at::Tensor own = empty_pooled({bytes}, at::kByte);
    touch(static_cast<char*>(own.mutable_data_ptr()), bytes);
    return own;
  }
  const std::int64_t held = round_up(bytes + kBorder, kAlign);
  if (!piece_.defined() || filled_ + held > piece_.numel()) {
    piece_ = at::empty({kPage + kPiece}, at::kByte);
    prefer_huge_pages(piece_.mutable_data_ptr(), piece_.nbytes());
    const auto begin = reinterpret_cast<std::intptr_t>(piece_.const_data_ptr());
    touched_ = filled_ = (kPage - begin % kPage) % kPage;
  }
  const at::Tensor place = piece_.narrow(0, filled_, bytes);
  filled_ += held;
  if (filled_ > touched_) {
    const std::int64_t ahead = std::min<std::int64_t>(threads(), kPagesAhead) * kPage;
    const std::int64_t fresh =
        std::min(round_up(filled_ - touched_, ahead), (piece_.numel() - touched_) / kPage * kPage);
    touch(static_cast<char*>(piece_.mutable_data_ptr()) + touched_, fresh);
    touched_ += fresh;
  }
  set_border(place.mutable_data_ptr(), bytes, held);
  return place;
}

at::Tensor Weights::packed_here(const std::function<at::Tensor()>& pack) {
  at::Tensor place;
  const auto [piece, filled] = std::pair(piece_, filled_);
  const at::Tensor packed = [&] {
    const PackedPlace here([&](std::int64_t bytes) { return place = take(bytes); });
    return pack();
  }();
  if (place.defined() && place.is_alias_of(packed)) return packed;
  // pack() built its result elsewhere, with or without the place that it was given.
  if (piece_.is_same(piece)) filled_ = filled;
  const auto bytes = static_cast<std::int64_t>(packed.nbytes());
  const at::Tensor copy = take(bytes).view(packed.scalar_type()).view(packed.sizes());
  return copy.copy_(packed);
}

Folded Weights::folded(const std::vector<at::Tensor>& sources, const std::string& how,
                       const std::function<Folded()>& fold) {
  const std::lock_guard lock(mutex_);
  const std::string key = address_of(sources, how);
  if (const auto found = folded_.find(key); found != folded_.end()) return found->second;
  kept_.insert(kept_.end(), sources.begin(), sources.end());
  return folded_[key] = fold();
}

// A constant with overlaps or gaps is copied together with its memory, and keeps its strides.
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
  for (const at::Tensor& constant : constants) {
    if (constant.layout() != at::kStrided) continue;
    const std::uint64_t hash = content_hash(constant.contiguous());
    const std::lock_guard lock(mutex_);
    const auto [noted, is_new] =
        noted_.try_emplace(address_of({constant}, ""), Noted{constant, hash});
    if (!is_new && noted->second.hash != hash) {
      fail_value("optimize", "the weights that the model had when it was optimized",
                 text("others in a tensor of ", constant.sizes()), "optimize the model again");
    }
  }
}

// Runs in a child of fork(). Everything is made again when it is asked for, and the values of
// weights are noted anew.
void Weights::renew() {
  abandon(packed_);
  abandon(folded_);
  abandon(own_);
  abandon(noted_);
  abandon(kept_);
  abandon(piece_);
  filled_ = touched_ = 0;
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
