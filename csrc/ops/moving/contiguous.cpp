// Copies float32 views in order: as runs of floats, or as transposed pieces if rows of src are
// columns of dst.
#include "ops/moving/contiguous.h"

#include <ATen/ops/empty.h>

#include <algorithm>
#include <cstring>

#include "format/sizes.h"
#include "kernels/kernels.h"
#include "kernels/rows/reorder.h"
#include "torch_blocked/threads.h"

namespace torch_blocked {
namespace {

// The columns of src that are transposed together: a cache line of each row.
constexpr std::int64_t kPiece = 16;

// Copies src to dst, both [q, r, c], where c is a run of kRun floats; kRun 0 takes runs of any
// length.
template <std::int64_t kRun>
void copy_runs(const auto& inner, const float* src, float* dst) {
  const auto& [q, r, c] = inner;
  const std::int64_t run = kRun ? kRun : c.size;
  for (std::int64_t i = 0; i < q.size; ++i) {
    for (std::int64_t j = 0; j < r.size; ++j) {
      std::memcpy(dst + i * q.dst + j * r.dst, src + i * q.src + j * r.src,
                  static_cast<std::size_t>(run) * sizeof(float));
    }
  }
}

void copy_elements(const auto& inner, const float* src, float* dst) {
  const auto& [q, r, c] = inner;
  for (std::int64_t i = 0; i < q.size; ++i) {
    for (std::int64_t j = 0; j < r.size; ++j) {
      for (std::int64_t k = 0; k < c.size; ++k) {
        dst[i * q.dst + j * r.dst + k] = src[i * q.src + j * r.src + k * c.src];
      }
    }
  }
}

}  // namespace

CopyInOrder::CopyInOrder(at::IntArrayRef sizes, at::IntArrayRef strides) {
  // Leaves out dims of one element and joins adjacent dims that form one run.
  for (std::size_t i = 0; i < sizes.size(); ++i) {
    if (sizes[i] == 1) continue;
    if (!outer_.empty() && outer_.back().src == strides[i] * sizes[i]) {
      outer_.back() = {outer_.back().size * sizes[i], strides[i], 0};
    } else {
      outer_.push_back({sizes[i], strides[i], 0});
    }
  }
  std::int64_t stride = 1;
  for (auto dim = outer_.rbegin(); dim != outer_.rend(); stride *= dim++->size) dim->dst = stride;
  std::ranges::fill(inner_, Dim{1, 0, 0});
  const auto take = [&](std::size_t place, auto dim) {
    inner_[place] = *dim;
    outer_.erase(dim);
  };
  const auto run = std::ranges::find(outer_, 1, &Dim::src);
  transposes_ = run != outer_.end() && run + 1 != outer_.end();
  if (transposes_) {
    take(2, run);
    take(1, outer_.end() - 1);
    return;
  }
  for (std::size_t place = 3; place-- > 0 && !outer_.empty();) take(place, outer_.end() - 1);
  if (!outer_.empty()) return;
  outer_.push_back(inner_[0]);  // units that threads can share
  inner_[0] = {1, 0, 0};
}

void CopyInOrder::copy(std::int64_t piece, const float* src, float* dst) const {
  const auto& [q, r, c] = inner_;
  if (transposes_) {
    const std::int64_t first = piece * kPiece, count = std::min(kPiece, c.size - first);
    kernels::kernels().transpose({src + first, r.src, dst + first * c.dst, c.dst, r.size, count});
  } else if (c.size > 1 && c.src != 1) {
    copy_elements(inner_, src, dst);
  } else if (c.size == 2) {
    copy_runs<2>(inner_, src, dst);
  } else if (c.size == 4) {
    copy_runs<4>(inner_, src, dst);
  } else if (c.size == 8) {
    copy_runs<8>(inner_, src, dst);
  } else {
    copy_runs<0>(inner_, src, dst);
  }
}

void CopyInOrder::operator()(const float* src, float* dst) const {
  const std::int64_t pieces = transposes_ ? ceil_div(inner_[2].size, kPiece) : 1;
  std::int64_t units = pieces;
  for (const Dim& dim : outer_) units *= dim.size;
  const std::int64_t unit = inner_[0].size * inner_[1].size * inner_[2].size / pieces;
  parallel_units(units, unit, [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t i = begin; i < end; ++i) {
      std::int64_t from = 0, to = 0, rest = i / pieces;
      for (auto dim = outer_.rbegin(); dim != outer_.rend(); rest /= dim->size, ++dim) {
        from += rest % dim->size * dim->src;
        to += rest % dim->size * dim->dst;
      }
      copy(i % pieces, src + from, dst + to);
    }
  });
}

at::Tensor contiguous(const at::Tensor& src) {
  if (src.is_contiguous() || src.scalar_type() != at::kFloat || src.numel() == 0 || src.is_conj() ||
      src.is_neg()) {
    return src.resolve_conj().resolve_neg().contiguous();
  }
  const at::Tensor dst = at::empty(src.sizes(), src.options());
  CopyInOrder(src.sizes(), src.strides())(src.const_data_ptr<float>(),
                                          dst.mutable_data_ptr<float>());
  return dst;
}

}  // namespace torch_blocked
