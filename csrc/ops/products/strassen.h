// One level of Strassen's product: seven products of quarters of the matrices instead of eight. 1x1
// convolutions and linear layers run on it. The sums of weights are made once, when they are
// packed.
//
// The sums of src are made for as many rows at a time as stay in L2 together with the products. One
// pass combines the products and applies bias, residual and activation. It takes 0.87 to 0.95 of
// the time of the direct kernel where both are fast, and more below 200 channels.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

#include "format/sizes.h"
#include "kernels/direct/direct.h"
#include "kernels/kernels.h"
#include "kernels/matrix/strassen.h"

namespace torch_blocked {

// The distances in floats between rows of a matrix, its vectors, and images. Vectors are whole.
struct VectorSteps {
  std::int64_t row, vector, image;
};

class Strassen {
 public:
  // Its weights take 7/4 of the memory and its errors are larger, so it does not win a tie.
  static constexpr double kHandicap = 1.03;

  // dst [rows, columns] = src [rows, lanes] x weights, for each of `images`.
  Strassen(const kernels::Kernels& kernels, std::int64_t images, std::int64_t rows,
           std::int64_t lanes, std::int64_t columns);

  // Why it does not take matrices so small that their sums cost as much as the eighth product.
  static const char* refuses(const kernels::Kernels& kernels, std::int64_t rows, std::int64_t lanes,
                             std::int64_t columns);

  // Its estimated time as a share of the time of all eight products, for vectors of `width`, with
  // its handicap. The sums of src take time proportional to rows x lanes, and the sums of
  // products to rows x columns. For each lane of a vector they take together 1.35 (1 / lanes + 1
  // / columns) of the time of the products with AVX-512 on a Zen 5, and 1.6 to 2.4 with AVX2 on a
  // Zen 3.
  static double share(std::int64_t width, std::int64_t lanes, std::int64_t columns);

  // weight [columns, lanes], contiguous
  //   -> right sides [products, groups of half the columns, half the lanes, columns of the group].
  at::Tensor pack(const at::Tensor& weight) const;

  struct Buffers {
    const float *src, *weights, *bias, *residual;  // bias [columns] and residual may be null
    float* dst;
  };
  void run(const VectorSteps& src, const VectorSteps& dst, const kernels::Epilogue& epilogue,
           const Buffers& buffers) const;

 private:
  // The columns that tiles take at a time, in vectors: `left` of the left half from `first` on,
  // and `right` at the same places of the right half.
  struct Group {
    std::int64_t first, left, right;
  };
  // The rows that are worked on at a time: `half` of each half, from `upper` and from `lower` on.
  struct Part {
    std::int64_t image, upper, lower, half;
  };
  // The scratchpad of one thread: the left sides of a part, and the products of some groups.
  struct Work;

  const kernels::DirectSizes& sizes() const { return *kernels_->direct_sizes; }
  std::int64_t width() const { return sizes().width; }
  std::int64_t half_lanes() const { return half_vectors_ * width(); }
  // Floats of the weights' right sides under one product.
  std::int64_t side_weights() const { return half_lanes() * half_columns_ * width(); }
  Group group(std::int64_t index) const;
  Part part(std::int64_t index) const;
  std::int64_t spans() const;
  void pack_group(const float* weight, const Group& group, float* to) const;
  void split(const Part& part, const VectorSteps& src, const float* from, Work& work) const;
  void multiply(std::int64_t product, const Group& group, const float* weights, Work& work,
                float* to) const;
  void join(const Part& part, const Group& group, const float* products, const VectorSteps& dst,
            const kernels::Epilogue& epilogue, const Buffers& buffers) const;

  const kernels::Kernels* kernels_;
  std::int64_t images_, rows_, lanes_, columns_;
  std::int64_t half_vectors_, half_columns_;  // of lanes, of columns; both in vectors
  std::int64_t parts_, groups_;               // of an image's rows; of a half of the columns
};

}  // namespace torch_blocked
