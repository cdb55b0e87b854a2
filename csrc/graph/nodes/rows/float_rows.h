// Rows of float32, bfloat16 or bytes for kernels that take float32: others are converted in the
// cache.
#pragma once

#include "graph/nodes/quantized/quantized.h"
#include "graph/planning/plan.h"
#include "kernels/kernels.h"
#include "runtime/memory/workspace.h"

namespace torch_blocked::graph {

// How a slot holds numbers.
struct NumbersOf {
  at::ScalarType dtype = at::kFloat;
  std::optional<kernels::Quantizer> bytes = {};  // of kByte

  NumbersOf(const SlotPlan& slot, const std::optional<Quantization>& quantization)
      : dtype(slot.dtype) {
    if (quantization) bytes = quantization->quantizer();
  }
  bool are_floats() const { return dtype == at::kFloat; }
  // Converts `count` numbers from element `at` of `data`, or to it.
  void load(const void* data, std::int64_t at, std::int64_t count, float* numbers) const {
    if (bytes) {
      kernels::kernels().dequantize(*bytes, static_cast<const std::uint8_t*>(data) + at, numbers,
                                    count);
    } else if (dtype == at::kBFloat16) {
      kernels::kernels().widen_bfloats(static_cast<const std::uint16_t*>(data) + at, numbers,
                                       count);
    } else {
      std::copy_n(static_cast<const float*>(data) + at, count, numbers);
    }
  }
  void store(const float* numbers, std::int64_t count, void* data, std::int64_t at) const {
    if (bytes) {
      kernels::kernels().quantize(*bytes, numbers, static_cast<std::uint8_t*>(data) + at, count);
    } else if (dtype == at::kBFloat16) {
      kernels::kernels().narrow_floats(numbers, static_cast<std::uint16_t*>(data) + at, count);
    } else {
      std::copy_n(numbers, count, static_cast<float*>(data) + at);
    }
  }
};

// Contiguous rows of `columns` numbers, read and written. They may be the same memory.
struct FloatRows {
  const void* src;
  void* dst;
  NumbersOf from, to;
  std::int64_t columns;

  // Calls run(src, dst, count) on [begin, end), some `at_once` rows at a time. There src and dst
  // may be the same.
  template <typename F>
  void for_each(std::int64_t begin, std::int64_t end, std::int64_t at_once, F&& run) const {
    const auto* floats = static_cast<const float*>(src);
    auto* result = static_cast<float*>(dst);
    if (from.are_floats() && to.are_floats()) {
      run(floats + begin * columns, result + begin * columns, end - begin);
      return;
    }
    float* numbers = workspace(at_once * columns);
    for (std::int64_t first = begin; first < end; first += at_once) {
      const std::int64_t count = std::min(at_once, end - first), at = first * columns;
      if (!from.are_floats()) from.load(src, at, count * columns, numbers);
      run(from.are_floats() ? floats + at : numbers, to.are_floats() ? result + at : numbers,
          count);
      if (!to.are_floats()) to.store(numbers, count * columns, dst, at);
    }
  }
};

}  // namespace torch_blocked::graph
