// One level of Strassen's product: seven products of quarters of the matrices instead of eight.
// The weights' sides are summed once, src's for some rows at a time, and the products are put
// together while they are in the cache; so what it saves is most of an eighth of the time.
// 1x1 convolutions and linear layers run on it.
//
// The sums of src are made for so many rows at a time as stay in L2 with the products; the products
// are put together in one pass with bias, residual and activation. It takes 0.87 to 0.95 of the
// time of the direct kernel where both are fast, and more below 200 channels.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

#include "format/sizes.h"
#include "kernels/direct/direct.h"
#include "kernels/kernels.h"
#include "kernels/matrix/strassen.h"

namespace torch_blocked {

// Floats from a row of a matrix, a vector of it, and an image, to the next; vectors are whole.
struct VectorSteps {
  std::int64_t row, vector, image;
};

class Strassen {
 public:
  // Its weights take 7/4 of the memory and its errors are larger, so a tie is none.
  static constexpr double kHandicap = 1.03;

  // dst [rows, columns] = src [rows, lanes] x weights, for each of `images`.
  Strassen(const kernels::Kernels& kernels, std::int64_t images, std::int64_t rows,
           std::int64_t lanes, std::int64_t columns);

  // Why not, in words, where the matrices are so small that their sums take what the eighth product
  // would.
  static const char* refuses(const kernels::Kernels& kernels, std::int64_t rows, std::int64_t lanes,
                             std::int64_t columns);

  // About what of the time of all products it takes, for vectors of `width`, with its handicap. The
  // sums of src take a time like rows x lanes, those of the products one like rows x columns, for
  // each lane of a vector together 1.35 (1 / lanes + 1 / columns) of the products' with AVX-512 on
  // a Zen 5, and 1.6 to 2.4 with AVX2 on a Zen 3.
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
  // Columns that the tiles take at a time, in vectors: `left` of the left half from `first` on, and
  // those that the right half has beside them.
  struct Group {
    std::int64_t first, left, right;
  };
  // Rows that are worked on at a time: the first of each half, which has `half` of them.
  struct Part {
    std::int64_t image, upper, lower, half;
  };
  // What one thread works with: the left sides of a part, and the products of some groups.
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
