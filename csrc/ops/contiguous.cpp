#include "ops/contiguous.h"

#include <ATen/ops/empty.h>

#include <array>
#include <cstring>
#include <vector>

#include "torch_blocked/threads.h"

namespace torch_blocked {
namespace {

struct Dim {
  std::int64_t size, stride;
};

// The dims of a view, those of one element left out and neighbours that are one run joined.
std::vector<Dim> joined_dims(const at::Tensor& view) {
  std::vector<Dim> dims;
  for (std::int64_t i = 0; i < view.dim(); ++i) {
    const Dim dim{view.size(i), view.stride(i)};
    if (dim.size == 1) continue;
    if (!dims.empty() && dims.back().stride == dim.stride * dim.size) {
      dims.back() = {dims.back().size * dim.size, dim.stride};
    } else {
      dims.push_back(dim);
    }
  }
  return dims;
}

// The last three dims; before them are units.
using Inner = std::array<Dim, 3>;

// dst [q, r, c] = src, where the last dim is a run of kRun floats; 0: of any number.
template <std::int64_t kRun>
void copy_runs(const Inner& inner, const float* src, float* dst) {
  const auto& [q, r, c] = inner;
  const std::int64_t run = kRun ? kRun : c.size;
  for (std::int64_t i = 0; i < q.size; ++i) {
    for (std::int64_t j = 0; j < r.size; ++j, dst += run) {
      std::memcpy(dst, src + i * q.stride + j * r.stride,
                  static_cast<std::size_t>(run) * sizeof(float));
    }
  }
}

void copy_inner(const Inner& inner, const float* src, float* dst) {
  switch (inner[2].size) {
    case 2:
      return copy_runs<2>(inner, src, dst);
    case 4:
      return copy_runs<4>(inner, src, dst);
    case 8:
      return copy_runs<8>(inner, src, dst);
    default:
      return copy_runs<0>(inner, src, dst);
  }
}

}  // namespace

at::Tensor contiguous(const at::Tensor& src) {
  if (src.is_contiguous() || src.scalar_type() != at::kFloat || src.numel() == 0 || src.is_conj() ||
      src.is_neg()) {
    return src.resolve_conj().resolve_neg().contiguous();
  }
  std::vector<Dim> outer = joined_dims(src);
  if (outer.empty() || outer.back().stride != 1) return src.contiguous();  // no runs
  Inner inner;
  inner.fill({1, 0});
  for (std::size_t i = 3; i-- > 0 && !outer.empty(); outer.pop_back()) inner[i] = outer.back();
  if (outer.empty()) {  // units that threads can share
    outer.push_back(inner[0]);
    inner[0] = {1, 0};
  }
  std::int64_t units = 1;
  for (const Dim& dim : outer) units *= dim.size;
  const std::int64_t unit = inner[0].size * inner[1].size * inner[2].size;
  const at::Tensor dst = at::empty(src.sizes(), src.options());
  const auto* from = src.const_data_ptr<float>();
  auto* to = dst.mutable_data_ptr<float>();
  parallel_units(units, unit, [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t i = begin; i < end; ++i) {
      std::int64_t offset = 0, rest = i;
      for (auto dim = outer.rbegin(); dim != outer.rend(); rest /= dim->size, ++dim) {
        offset += rest % dim->size * dim->stride;
      }
      copy_inner(inner, from + offset, to + i * unit);
    }
  });
  return dst;
}

}  // namespace torch_blocked
