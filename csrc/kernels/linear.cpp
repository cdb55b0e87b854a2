// A linear layer of few rows: every weight is used once or a few times, so reading the weights from
// memory takes the time. Here the weights of a block are one stream from end to end: on Zen 4 one
// row reads them at 31 GB/s of the memory's 33, oneDNN's kernels at 17.
#include "kernels/linear.h"

#include <algorithm>
#include <array>

#include "kernels/finish.h"

namespace torch_blocked::kernels::CPU_CAPABILITY {
namespace {

// Inputs that are summed in registers before their sum joins the total: rounding then grows only
// with the root of the number of inputs, and their weights stay in cache for all groups of rows.
constexpr std::int64_t kChain = 256;
constexpr std::int64_t kGroupRows = 4;

// src [kRows, inputs], weights [inputs, kVectors vectors] -> total [kRows, kVectors vectors], for
// inputs [begin, end)
template <int kRows, int kVectors>
void add(const LinearRows& p, const float* src, const float* weights, std::int64_t begin,
         std::int64_t end, float* total) {
  Vec sums[kRows * kVectors];
#pragma GCC unroll 16
  for (int i = 0; i < kRows * kVectors; ++i) sums[i] = Vec(0.f);
  for (std::int64_t i = begin; i < end; ++i) {
    Vec w[kVectors];
#pragma GCC unroll 4
    for (int j = 0; j < kVectors; ++j) w[j] = Vec::loadu(weights + (i * kVectors + j) * kWidth);
#pragma GCC unroll 4
    for (int row = 0; row < kRows; ++row) {
      const Vec x(src[row * p.inputs + i]);
#pragma GCC unroll 4
      for (int j = 0; j < kVectors; ++j) {
        sums[row * kVectors + j] = at::vec::fmadd(x, w[j], sums[row * kVectors + j]);
      }
    }
  }
#pragma GCC unroll 16
  for (int i = 0; i < kRows * kVectors; ++i) {
    (Vec::loadu(total + i * kWidth) + sums[i]).store(total + i * kWidth);
  }
}

// total [rows, kVectors vectors] -> dst [rows, outputs] from output `first` on
template <int kVectors>
void finish(const LinearRows& p, const float* total, std::int64_t first) {
  for (std::int64_t row = 0; row < p.rows; ++row) {
    for (std::int64_t j = 0; j < kVectors; ++j) {
      const std::int64_t output = first + j * kWidth, count = std::min(kWidth, p.outputs - output);
      if (count <= 0) break;
      Vec sum = Vec::loadu(total + (row * kVectors + j) * kWidth);
      if (p.bias) sum = sum + load(p.bias + output, count);
      store(activate(p.activation, sum), p.dst + row * p.outputs + output, count);
    }
  }
}

template <int kVectors>
void blocks(const LinearRows& p, std::int64_t begin, std::int64_t end) {
  static constexpr std::array kAdd{add<1, kVectors>, add<2, kVectors>, add<3, kVectors>,
                                   add<4, kVectors>};
  constexpr std::int64_t kBlock = kVectors * kWidth;
  for (std::int64_t i = begin; i < end; ++i) {
    alignas(64) std::array<float, LinearRows::kMostRows * kBlock> total{};
    for (std::int64_t input = 0; input < p.inputs; input += kChain) {
      for (std::int64_t row = 0; row < p.rows; row += kGroupRows) {
        kAdd[std::min(kGroupRows, p.rows - row) - 1](
            p, p.src + row * p.inputs, p.weights + i * p.weights_stride, input,
            std::min(p.inputs, input + kChain), total.data() + row * kBlock);
      }
    }
    finish<kVectors>(p, total.data(), i * kBlock);
  }
}

}  // namespace

void linear_rows(const LinearRows& p, std::int64_t begin, std::int64_t end) {
  static constexpr std::array kRun{blocks<1>, blocks<2>, blocks<3>, blocks<4>};
  kRun[p.block / kWidth - 1](p, begin, end);
}

}  // namespace torch_blocked::kernels::CPU_CAPABILITY
