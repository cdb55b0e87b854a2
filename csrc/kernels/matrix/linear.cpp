// A linear layer of few rows. Every weight is used once or a few times, so the time is that of
// reading the weights from memory. The weights of a block are contiguous and are read at kStreams
// places at once, because the hardware prefetches for each place. One core of a Zen 3 reads the
// weights of 1280 x 1000 from L3 at 30 GB/s like this, and at 19 from end to end; those of 25088 x
// 1024 from memory at 21 instead of 15. On a Zen 4 one stream reads at 31 of the memory's 33 GB/s,
// and oneDNN's kernels at 17.
#include "kernels/matrix/linear.h"

#include <algorithm>
#include <array>

#include "kernels/vector/finish.h"
#include "kernels/vector/products.h"

namespace torch_blocked::kernels::CPU_CAPABILITY {
namespace {

// The inputs that are summed in registers before their sum joins the total. With this, rounding
// grows only with the root of the number of inputs, and their weights stay in cache for all groups
// of rows.
constexpr std::int64_t kChain = 256;
constexpr std::int64_t kGroupRows = 4;

constexpr std::int64_t kStreams = 4;

// src [kRows, inputs], weights [inputs, kVectors vectors] -> total [kRows, kVectors vectors], for
// inputs [begin, end) of each of kParts parts, which lie `part` inputs apart. Weights of bfloat16
// are [inputs / 2, kVectors vectors, 2].
template <typename Products, int kParts, int kRows, int kVectors>
void add(const LinearRows& p, const typename Products::Number* src,
         const typename Products::Stored* weights, std::int64_t part, std::int64_t begin,
         std::int64_t end, float* total) {
  constexpr std::int64_t kVector = kWidth * Products::kChannels;
  Vec sums[kRows * kVectors];
#pragma GCC unroll 16
  for (int i = 0; i < kRows * kVectors; ++i) sums[i] = Vec(0.f);
  for (std::int64_t i = begin; i < end; i += Products::kChannels) {
#pragma GCC unroll 4
    for (int at = 0; at < kParts; ++at) {
      const std::int64_t input = at * part + i;
      typename Products::Weights w[kVectors];
#pragma GCC unroll 4
      for (int j = 0; j < kVectors; ++j) {
        w[j] = Products::weights(weights + input * kVectors * kWidth + j * kVector);
      }
#pragma GCC unroll 4
      for (int row = 0; row < kRows; ++row) {
        const auto x = Products::repeat(src + row * p.inputs + input);
#pragma GCC unroll 4
        for (int j = 0; j < kVectors; ++j) {
          sums[row * kVectors + j] = Products::add(sums[row * kVectors + j], x, w[j]);
        }
      }
    }
  }
#pragma GCC unroll 16
  for (int i = 0; i < kRows * kVectors; ++i) {
    (Vec::loadu(total + i * kWidth) + sums[i]).store(total + i * kWidth);
  }
}

// total [rows, kVectors vectors] -> dst [rows, outputs] from output `first` on
template <typename Number, int kVectors>
void finish(const LinearRows& p, const float* total, std::int64_t first) {
  const auto* bias = static_cast<const Number*>(p.bias);
  for (std::int64_t row = 0; row < p.rows; ++row) {
    Number* dst = static_cast<Number*>(p.dst) + row * p.outputs;
    for (std::int64_t j = 0; j < kVectors; ++j) {
      const std::int64_t output = first + j * kWidth, count = std::min(kWidth, p.outputs - output);
      if (count <= 0) break;
      Vec sum = Vec::loadu(total + (row * kVectors + j) * kWidth);
      if (p.scales) sum = sum * Vec::loadu(p.scales + output);
      if (bias) sum = sum + load(bias + output, count);
      store(activate(p.activation, sum), dst + output, count);
    }
  }
}

// The same for all rows.
template <typename Products, int kParts, int kVectors>
void add_rows(const LinearRows& p, const typename Products::Stored* weights, std::int64_t part,
              std::int64_t begin, std::int64_t end, float* total) {
  static constexpr std::array kAdd{
      add<Products, kParts, 1, kVectors>, add<Products, kParts, 2, kVectors>,
      add<Products, kParts, 3, kVectors>, add<Products, kParts, 4, kVectors>};
  const auto* src = static_cast<const typename Products::Number*>(p.src);
  for (std::int64_t row = 0; row < p.rows; row += kGroupRows) {
    kAdd[std::min(kGroupRows, p.rows - row) - 1](p, src + row * p.inputs, weights, part, begin, end,
                                                 total + row * kVectors * kWidth);
  }
}

template <typename Products, int kVectors>
void blocks(const LinearRows& p, std::int64_t begin, std::int64_t end) {
  using Number = typename Products::Number;
  constexpr std::int64_t kBlock = kVectors * kWidth, kUnit = kStreams * Products::kChannels;
  const std::int64_t part = p.inputs / kUnit * Products::kChannels;  // inputs of a stream
  for (std::int64_t i = begin; i < end; ++i) {
    const auto* weights =
        static_cast<const typename Products::Stored*>(p.weights) + i * p.weights_stride;
    alignas(64) std::array<float, LinearRows::kMostRows * kBlock> total{};
    for (std::int64_t input = 0; input < part; input += kChain / kStreams) {
      add_rows<Products, kStreams, kVectors>(
          p, weights, part, input, std::min(part, input + kChain / kStreams), total.data());
    }
    add_rows<Products, 1, kVectors>(p, weights, 0, kStreams * part, p.inputs, total.data());
    finish<Number, kVectors>(p, total.data(), i * kBlock);
  }
}

template <typename Products>
void run(const LinearRows& p, std::int64_t begin, std::int64_t end) {
  static constexpr std::array kRun{blocks<Products, 1>, blocks<Products, 2>, blocks<Products, 3>,
                                   blocks<Products, 4>};
  kRun[p.block / kWidth - 1](p, begin, end);
}

}  // namespace

void linear_rows(const LinearRows& p, std::int64_t begin, std::int64_t end) {
  run<Floats>(p, begin, end);
}

void linear_byte_rows(const LinearRows& p, std::int64_t begin, std::int64_t end) {
  run<FloatsByBytes>(p, begin, end);
}

void linear_bfloat_rows(const LinearRows& p, std::int64_t begin, std::int64_t end) {
  run<Bfloats>(p, begin, end);
}

}  // namespace torch_blocked::kernels::CPU_CAPABILITY
